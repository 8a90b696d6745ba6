"""`quadriga data make`: arithmetic problems, and a tiny model for them."""

from dataclasses import fields
from typing import Any, TypeVar

from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.convert import check_values
from quadriga.config.paths import Dataclass

T = TypeVar("T", bound=Dataclass)


def run_make_data(config: ArithmeticDataConfig) -> None:
    """Write the data files, and a model if `model_output` is set. Print their paths.

    Raises:
        InputError: no problems or no model can have these settings.
    """
    from pyarrow.parquet import read_table

    from quadriga.data import ArithmeticTask, write_arithmetic
    from quadriga.models import TinyModel, write_tiny_model

    check_values(config)
    shape = _of_config(TinyModel, config) if config.model_output is not None else None
    sizes = ("train_size", "sft_size", "rm_size", "sft_careful", "seed")
    options: dict[str, Any] = {name: getattr(config, name) for name in sizes}
    task = _of_config(ArithmeticTask, config)
    files = write_arithmetic(config.output, task, test_size=config.val_size, **options)
    rows = (config.train_size, config.val_size, config.sft_size)
    for path, count in zip((files.train, files.test, files.sft), rows, strict=True):
        print(f"{path}  {count} problems")
    if files.rm is not None:
        print(f"{files.rm}  {config.rm_size} pairs")
        print(f"{files.rm_test}  {config.val_size} pairs")
    if shape is not None and config.model_output is not None:
        # The tokenizer is trained on the demonstrations.
        notes = read_table(files.sft, columns=["extra_info"])["extra_info"].to_pylist()
        texts = [note[part] for note in notes for part in ("question", "answer")]
        parameters = write_tiny_model(config.model_output, texts, shape, seed=config.seed)
        print(f"{config.model_output}  {parameters:,} parameters")


def _of_config(cls: type[T], config: ArithmeticDataConfig) -> T:
    """Return a dataclass of the settings that have the names of its fields."""
    names = [f.name for f in fields(cls) if hasattr(config, f.name)]
    made: T = cls(**{name: getattr(config, name) for name in names})
    return made
