"""The output of the commands."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from quadriga.config.commands import GenerateConfig, RMConfig, SFTConfig
from quadriga.config.schema import TrainConfig

if TYPE_CHECKING:
    from quadriga.algorithms.catalog import AlgorithmEntry
    from quadriga.trainer.evaluation.evaluate import Evaluation
    from quadriga.trainer.evaluation.generate import Answer

PARTS = {
    "torch": "training and rollout",
    "ray": "trainer.backend=ray",
    "transformers": "models and tokenizers",
    "tensordict": "batches",
    "pyarrow": "parquet files",
    "tensorboard": "trainer.loggers: tensorboard",
    "wandb": "trainer.loggers: wandb (extra: wandb)",
    "matplotlib": "the learning curve",
    "peft": "LoRA (extra: lora)",
    "torchao": "optim.name=adamw_8bit (extra: optim8bit)",
    "math_verify": "rewards for mathematics (extra: math)",
    "vllm": "rollout.name=vllm (scripts/engines.sh vllm)",
    "sglang": "rollout.name=sglang (scripts/engines.sh sglang)",
}


def show_responses(answers: Iterable[Answer]) -> None:
    """Print a single response as it is, and several responses below their prompts."""
    answers = list(answers)
    single = len(answers) == 1 and len(answers[0].responses) == 1
    for answer in answers:
        if not single:
            print(f"> {prompt_text(answer.prompt)}")
        for response in answer.responses:
            print(response)
        if not single:
            print()


def show_evaluation(done: Evaluation, confidence: float) -> None:
    """Print the table of an evaluation, and where its files are."""
    from quadriga.trainer.evaluation.evaluate import summary_table

    console = Console(highlight=False)
    console.print(summary_table(done.summaries, confidence))
    if done.left_out:
        console.print(f"{done.left_out} prompts were left out: longer than max_prompt_length")
    if done.failed:
        console.print(f"{done.failed} responses count as 0, because their reward function failed")
    console.print(f"results and samples are in {done.folder}", soft_wrap=True)


def prompt_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """Return the last message of a chat, or a prompt that is a text."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1]["content"])


def show_plan(config: TrainConfig) -> None:
    """Print the batch arithmetic and the memory of a run.

    Raises:
        InputError: the settings or the config of a model are invalid.
    """
    from quadriga.algorithms.user_files import load_user_file
    from quadriga.config.plan import batch_plan
    from quadriga.trainer.checks.settings import check_train_settings, role_engines
    from quadriga.trainer.dataflow import StepPlan
    from quadriga.trainer.preflight import check_models_of_engines
    from quadriga.trainer.roles.workers import needs_critic

    for path in config.algorithm.user_files:
        load_user_file(path)
    check_train_settings(config)
    plan = batch_plan(config, train_rows=count_rows(config.data.train_files))
    print(plan.text(with_critic=needs_critic(config)))
    print(StepPlan.of(config).text())
    if config.actor_rollout_ref.model.path:
        from quadriga.trainer.memory.check import RunMemory

        check_models_of_engines(role_engines(config))
        print(RunMemory(config).text())
    else:
        print("memory                 set actor_rollout_ref.model.path, whose config.json it needs")


def show_fine_tuning_plan(config: SFTConfig | RMConfig) -> None:
    """Print the batches and the memory of fine-tuning, for the rows or pairs of its data.

    Raises:
        InputError: the settings, the data or the model do not fit.
    """
    from quadriga.engines.loading import check_trained_part
    from quadriga.trainer.checks.settings import check_fine_tuning_settings

    check_fine_tuning_settings(config)
    trainer, batch = config.trainer, config.data.train_batch_size
    kind = "pairs" if isinstance(config, RMConfig) else "rows"
    ranks = trainer.nnodes * trainer.n_gpus_per_node // config.engine.model_parallel_size
    print(f"{kind + ' per step':<23}{batch}, {batch // ranks} on each of {ranks} data ranks")
    if not (config.model.path and config.data.train_files):
        print(f"memory                 set model.path and data.train_files, whose {kind} it needs")
        return
    check_trained_part(config.model, "score" if kind == "pairs" else "lm", config.optim)
    if isinstance(config, RMConfig):
        from quadriga.trainer.fine_tuning.rm import load_pairs
        from quadriga.trainer.memory.check import RunMemory

        pairs = load_pairs(config)
        count, memory = len(pairs.train), RunMemory(config, pairs.lengths).text()
        longest = f"{pairs.lengths.longest} tokens, and one more is added"
    else:
        from quadriga.trainer.fine_tuning.sft import load_sft_rows
        from quadriga.trainer.memory.check import RunMemory

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
    """Print the batches and the memory of generation.

    Raises:
        InputError: the settings or the config of the model are invalid.
    """
    from quadriga.trainer.checks.settings import check_generate_settings
    from quadriga.trainer.memory.check import RunMemory
    from quadriga.trainer.memory.plan import generated_rows
    from quadriga.trainer.preflight import require_model_path

    check_generate_settings(config)
    require_model_path(config.model.path, "model.path")
    of_rank, rows, longest = generated_rows(config, None)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    print(
        f"responses of a batch   {config.batch_size * config.n} = {config.batch_size} prompts × "
        f"{config.n}, {of_rank} on each of {ranks} ranks"
    )
    print(f"  at once on a rank    {rows} of up to {longest} + {config.max_response_length} tokens")
    print(RunMemory(config).text())


def count_rows(files: Sequence[str]) -> int | None:
    """Return the number of rows of data files; None without files, or if one does not exist."""
    paths = [Path(file) for file in files]
    if not paths or not all(path.is_file() for path in paths):
        return None
    from quadriga.data.rows import count_rows as rows_of

    return sum(rows_of(path) for path in paths)


def show_algorithms() -> None:
    """Print every entry of every registry: its formula, inputs, settings and source."""
    from quadriga.algorithms.catalog import describe_algorithms

    entries = describe_algorithms()
    for kind in dict.fromkeys(entry.kind for entry in entries):
        same_kind = [entry for entry in entries if entry.kind == kind]
        width = max(len(entry.name) for entry in same_kind)
        print(f"\n{kind}")
        for entry in same_kind:
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
    table = Table(title="installed", title_justify="left")
    for heading in ("package", "version", "for"):
        table.add_column(heading)
    for name, purpose in PARTS.items():
        table.add_row(name, version_of(name) or "not installed", purpose)
    console = Console(highlight=False)
    console.print(table)
    for line in machine_lines():
        console.print(line)


def version_of(name: str) -> str | None:
    """Return the installed version of a package, "unknown" without metadata, or None."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def machine_lines() -> list[str]:
    """Return lines about Python, CPUs, memory and accelerators of this machine."""
    import psutil

    lines = [
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"{os.cpu_count()} CPUs, {psutil.virtual_memory().total / 2**30:.1f} GiB of memory",
    ]
    if version_of("torch") is None:
        return lines
    import torch

    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    return [*lines, f"accelerators: {', '.join(names) or 'none, so runs use the CPU'}"]
