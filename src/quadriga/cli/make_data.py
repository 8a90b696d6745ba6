"""`quadriga data make`: arithmetic problems, and a tiny model for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.convert import check_values

if TYPE_CHECKING:
    from quadriga.models import TinyModel


def run_make_data(config: ArithmeticDataConfig) -> None:
    """Write the data files, and a model if `model_output` is set. Print their paths.

    Raises:
        InputError: no problems or no model can have these settings.
    """
    from quadriga.data import ArithmeticTask, write_arithmetic

    check_values(config)
    shape = _shape(config) if config.model_output is not None else None
    task = ArithmeticTask(
        max_number=config.max_number,
        min_steps=config.min_steps,
        max_steps=config.max_steps,
        max_total=config.max_total,
        phrasings=config.phrasings,
        operations=tuple(config.operations),
    )
    files = write_arithmetic(
        config.output,
        task,
        train_size=config.train_size,
        test_size=config.val_size,
        sft_size=config.sft_size,
        rm_size=config.rm_size,
        sft_careful=config.sft_careful,
        seed=config.seed,
    )
    for path, rows in (
        (files.train, config.train_size),
        (files.test, config.val_size),
        (files.sft, config.sft_size),
    ):
        print(f"{path}  {rows} problems")
    if files.rm is not None:
        print(f"{files.rm}  {config.rm_size} pairs")
        print(f"{files.rm_test}  {config.val_size} pairs")
    if shape is not None and config.model_output is not None:
        parameters = _make_model(shape, config.model_output, files.sft, config.seed)
        print(f"{config.model_output}  {parameters:,} parameters")


def _make_model(shape: TinyModel, folder: str, demonstrations: Path, seed: int) -> int:
    """Write the model, with a tokenizer trained on the demonstrations. Return its size."""
    from pyarrow.parquet import read_table

    from quadriga.models import write_tiny_model

    notes = read_table(demonstrations, columns=["extra_info"])["extra_info"].to_pylist()
    texts = [note[part] for note in notes for part in ("question", "answer")]
    return write_tiny_model(folder, texts, shape, seed=seed)


def _shape(config: ArithmeticDataConfig) -> TinyModel:
    from quadriga.models import TinyModel

    sizes = {name: value for name, value in vars(config).items() if hasattr(TinyModel, name)}
    return TinyModel(**sizes)
