"""The output of the commands."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from quadriga.config.commands import (
    AlgorithmsConfig,
    EvalConfig,
    GenerateConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.convert import help_text, walk_keys
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import shown
from quadriga.errors import UnknownSettingError, nearest_name, printable
from quadriga.observability.run_folder import REPORT, RunFolder
from quadriga.report.events import PARTS, version_of

if TYPE_CHECKING:
    from quadriga.algorithms.catalog import AlgorithmEntry
    from quadriga.trainer.evaluation import Answer


def show_generation(config: GenerateConfig) -> None:
    """Generate responses, to a file or to standard output."""
    from quadriga.trainer.evaluation import run_generation

    answers = run_generation(config)
    if config.output is None:
        show_responses(answers)
    else:
        print(f"wrote the responses to {len(answers)} prompts to {config.output}")


def show_responses(answers: Sequence[Answer]) -> None:
    """Print a single response alone, and several responses below their prompts.

    On a terminal, what would control it is escaped. A file or a pipe gets each response unchanged.
    """
    form = printable if sys.stdout.isatty() else str
    single = len(answers) == 1 and len(answers[0].responses) == 1
    for answer in answers:
        texts = "\n".join(answer.responses)
        print(form(texts if single else f"> {answer.prompt[-1]['content']}\n{texts}\n"))


def show_evaluation(config: EvalConfig) -> None:
    """Score responses, after generating them unless files hold them, and print a table."""
    from quadriga.trainer.evaluation import run_evaluation, summary_table

    done = run_evaluation(config)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(summary_table(done.summaries, config.confidence))
    if done.left_out:
        console.print(f"{done.left_out} prompts were left out: longer than max_prompt_length")
    if done.failed:
        console.print(f"{done.failed} responses count as 0, because their reward function failed")
    if done.agent:
        means = ", ".join(f"{name} {value:.3f}" for name, value in done.agent.items())
        console.print(shown(f"means over the episodes: {means}"), soft_wrap=True)
    console.print(shown(f"results and samples are in {done.folder}"), soft_wrap=True)


def show_plan(config: TrainConfig | SFTConfig | RMConfig | GenerateConfig) -> None:
    """Print the batches and the memory of a command; no process is started.

    Raises:
        InputError: the settings, the data or the config of a model do not fit.
    """
    if isinstance(config, TrainConfig):
        show_training_plan(config)
    elif isinstance(config, GenerateConfig):
        show_generation_plan(config)
    else:
        show_fine_tuning_plan(config)


def show_training_plan(config: TrainConfig) -> None:
    """Print the batch arithmetic and the memory of a run."""
    from quadriga.algorithms.user_files import load_user_file
    from quadriga.config.plan import batch_plan
    from quadriga.config.stores import local_file
    from quadriga.data.rows import count_rows
    from quadriga.trainer.checks.settings import check_train_settings, role_engines
    from quadriga.trainer.dataflow import StepPlan
    from quadriga.trainer.preflight import check_models_of_engines
    from quadriga.trainer.roles.needs import needs_critic

    for path in config.algorithm.user_files:
        load_user_file(path)
    check_train_settings(config)
    files = [local_file(file) for file in config.data.train_files]
    known = bool(files) and all(file.is_file() for file in files)
    plan = batch_plan(config, train_rows=sum(map(count_rows, files)) if known else None)
    print(plan.text(with_critic=needs_critic(config)))
    print(StepPlan.of(config).text())
    if config.actor_rollout_ref.model.path:
        from quadriga.trainer.checks.memory import RunMemory

        check_models_of_engines(role_engines(config))
        print(RunMemory(config).text())
    else:
        print("memory                 set actor_rollout_ref.model.path, whose config.json it needs")


def show_fine_tuning_plan(config: SFTConfig | RMConfig) -> None:
    """Print the batches and the memory of fine-tuning, for the rows or pairs of its data."""
    from quadriga.engines.loading import check_trained_part
    from quadriga.trainer.checks.settings import check_fine_tuning_settings

    check_fine_tuning_settings(config)
    trainer, batch = config.trainer, config.data.train_batch_size
    kind = "pairs" if isinstance(config, RMConfig) else "rows"
    ranks = trainer.ranks // config.engine.model_parallel_size
    print(f"{kind + ' per step':<23}{batch}, {batch // ranks} on each of {ranks} data ranks")
    if not (config.model.path and config.data.train_files):
        print(f"memory                 set model.path and data.train_files, whose {kind} it needs")
        return
    check_trained_part(config.model, "score" if kind == "pairs" else "lm")
    from quadriga.trainer.checks.memory import RunMemory

    if isinstance(config, RMConfig):
        from quadriga.trainer.fine_tuning import load_pairs

        pairs = load_pairs(config)
        count, memory = len(pairs.train), RunMemory(config, pairs.lengths).text()
        longest = f"{pairs.lengths.longest} tokens, and one more is added"
    else:
        from quadriga.trainer.fine_tuning import load_sft_rows

        loaded = load_sft_rows(config)
        own = loaded.val_conversations and loaded.val_conversations.lengths
        count = len(loaded.train)
        memory = RunMemory(config, loaded.train.lengths, loaded.val_prompts, own or None).text()
        prompt, response = loaded.train.longest
        longest = f"{prompt} + {response} = {prompt + response} tokens"
    steps = trainer.total_training_steps or count // batch * trainer.total_epochs
    print(f"run                    {steps} steps, {count} {kind}")
    print(f"longest conversation   {longest}")
    print(memory)


def show_generation_plan(config: GenerateConfig) -> None:
    """Print the batches and the memory of generation."""
    from quadriga.trainer.checks.early import require_model_path
    from quadriga.trainer.checks.memory import RunMemory, generated_rows
    from quadriga.trainer.checks.settings import check_generate_settings

    check_generate_settings(config)
    require_model_path(config.model.path, "model.path")
    of_rank, rows, longest = generated_rows(config, None)
    print(
        f"responses of a batch   {config.batch_size * config.n} = {config.batch_size} prompts × "
        f"{config.n}, {of_rank} on each of {config.trainer.ranks} ranks"
    )
    print(f"  at once on a rank    {rows} of up to {longest} + {config.max_response_length} tokens")
    print(RunMemory(config).text())


def show_report(runs: Sequence[Path], output: Path | None) -> None:
    """Write the report of runs, and print where it is."""
    from quadriga.report import write_report

    page = output or (RunFolder(runs[0]).report if len(runs) == 1 else Path(REPORT))
    write_report(runs, page)
    print(shown(f"{page}: open it in a browser"))


def show_settings(*words: str) -> None:
    """Print the settings of all commands with all these words in name or meaning.

    Raises:
        UnknownSettingError: there is none; the message has the nearest name.
    """
    from quadriga.cli.main import COMMANDS

    of_command = {c.name: c.settings for c in COMMANDS if c.settings and c.name != "plan"}
    found = {name: help_text(cls(), words).strip("\n") for name, cls in of_command.items()}
    for name, text in found.items():
        print(f"quadriga {name}\n{text}\n" if text else "", end="")
    if not any(found.values()):
        keys = {key.rpartition(".")[2] for cls in of_command.values() for key, _ in walk_keys(cls)}
        hint = f"; did you mean {near}?" if (near := nearest_name(words[0], keys)) else ""
        raise UnknownSettingError(f"no setting has {' and '.join(words)} in name or meaning{hint}")


def show_algorithms(config: AlgorithmsConfig) -> None:
    """Print every entry of every registry: its formula, inputs, settings and source."""
    from quadriga.algorithms.catalog import describe_algorithms
    from quadriga.algorithms.user_files import load_user_file

    for path in config.user_files:
        load_user_file(path)
    for kind, group in groupby(describe_algorithms(), lambda entry: entry.kind):
        entries = list(group)
        width = max(len(entry.name) for entry in entries)
        print(f"\n{kind}")
        for entry in entries:
            print(f"  {entry.name:<{width}}  {entry.formula}")
            for note in _notes(entry):
                print(f"  {'':<{width}}  {note}")


def _notes(entry: AlgorithmEntry) -> list[str]:
    """Return the lines below the formula of an entry."""
    notes = []
    if entry.needs:
        needs = ["prompt groups" if need == "groups" else need for need in entry.needs]
        notes.append(f"needs {', '.join(needs)}")
    if entry.settings:
        notes.append(f"settings {', '.join(entry.settings)}")
    paper = f"arXiv {entry.paper}" if entry.paper[:1].isdigit() else entry.paper
    sources = [s for s in (paper, entry.origin) if s and s != "built-in"]
    return [*notes, *([f"from {', '.join(sources)}"] if sources else [])]


def show_doctor() -> None:
    """Print the versions of packages, with those that are missing, and the machine's resources."""
    import psutil

    from quadriga.parallel.control_groups import available_cpus, available_memory

    table = Table(title="installed", title_justify="left")
    for heading in ("package", "version", "for"):
        table.add_column(heading)
    for name, purpose in PARTS.items():
        table.add_row(name, version_of(name) or "not installed", purpose)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    free, memory = available_memory() / 2**30, psutil.virtual_memory().total / 2**30
    console.print(
        f"{available_cpus()} of {os.cpu_count()} CPUs, {free:.1f} of {memory:.1f} GiB of memory "
        "are free for a run"
    )
    if version_of("torch") is not None:
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        console.print(f"accelerators: {', '.join(names) or 'none, so runs use the CPU'}")
