"""What commands print."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from quadriga.config.schema import TrainConfig

if TYPE_CHECKING:
    from quadriga.algorithms.catalog import AlgorithmEntry

PARTS = {
    "torch": "training and rollout",
    "ray": "trainer.backend=ray",
    "transformers": "models and tokenizers",
    "tensordict": "batches",
    "pyarrow": "parquet files",
    "tensorboard": "trainer.loggers: tensorboard",
    "matplotlib": "the learning curve",
    "peft": "LoRA (extra: lora)",
    "math_verify": "rewards for mathematics (extra: math)",
    "vllm": "rollout.name=vllm",
    "sglang": "rollout.name=sglang",
}


def show_answers(answers: Iterable[Any]) -> None:
    """Answers as they are where there is one; under their prompts where there are more."""
    answers = list(answers)
    alone = len(answers) == 1 and len(answers[0].responses) == 1
    for answer in answers:
        if not alone:
            print(f"> {prompt_text(answer.prompt)}")
        for response in answer.responses:
            print(response)
        if not alone:
            print()


def prompt_text(prompt: Any) -> str:
    """The last turn of a chat, or the prompt itself."""
    if isinstance(prompt, str):
        return prompt
    return str(prompt[-1]["content"])


def show_plan(config: TrainConfig) -> None:
    """How batches divide. Raises `InputError` where they do not."""
    from quadriga.algorithms.user_files import load_user_file
    from quadriga.config.checks import check_train_settings
    from quadriga.config.plan import batch_plan
    from quadriga.trainer.preflight import known_names

    for path in config.algorithm.user_files:
        load_user_file(path)
    known = known_names()
    check_train_settings(config, known)
    plan = batch_plan(config, train_rows=count_rows(config.data.train_files))
    with_critic = config.algorithm.adv_estimator in known.estimators_with_values
    print(plan.text(with_critic=with_critic))


def count_rows(files: Sequence[str]) -> int | None:
    """Rows of data files; None without files, or while one of them does not exist."""
    paths = [Path(file) for file in files]
    if not paths or not all(path.is_file() for path in paths):
        return None
    return sum(_rows_of(path) for path in paths)


def _rows_of(path: Path) -> int:
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def show_algorithms() -> None:
    """Every entry of every table: what it computes, reads and needs, and where it comes from."""
    from quadriga.algorithms.catalog import describe_algorithms

    entries = describe_algorithms()
    for kind in dict.fromkeys(entry.kind for entry in entries):
        group = [entry for entry in entries if entry.kind == kind]
        width = max(len(entry.name) for entry in group)
        print(f"\n{kind}")
        for entry in group:
            print(f"  {entry.name:<{width}}  {entry.formula}")
            for note in _notes(entry):
                print(f"  {'':<{width}}  {note}")


def _notes(entry: AlgorithmEntry) -> list[str]:
    """What is worth saying of an entry besides its formula."""
    notes = []
    if entry.needs:
        notes.append(f"needs {', '.join(entry.needs)}")
    if entry.settings:
        notes.append(f"settings {', '.join(entry.settings)}")
    paper = f"arXiv {entry.paper}" if entry.paper[:1].isdigit() else entry.paper
    sources = [s for s in (paper, entry.origin) if s and s != "built-in"]
    return [*notes, *([f"from {', '.join(sources)}"] if sources else [])]


def show_doctor() -> None:
    """Versions, extras that are missing, and what the machine has."""
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
    """The installed version of a package, or None."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def machine_lines() -> list[str]:
    """Python, CPUs, memory and accelerators of this machine."""
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
    return [*lines, f"accelerators: {', '.join(names) or 'none; runs use the CPU'}"]
