"""A dataset or a sampler of the user: a class in a Python file.

A dataset class is called with `(files, tokenizer, config)`, where `config` are the settings
`data.*`, and is a `Prompts`. A subclass of `PromptDataset` has all that is needed. For a model that
takes images, a class with an argument `images` is also given how images become tokens.

A sampler class is called with `(dataset, seed=…, **options)` and is a `RowSampler`: it chooses the
rows of each batch, for example by their difficulty, and learns from each step.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict, TypeVar, cast

from quadriga.containment import import_file, reported
from quadriga.errors import ConfigError, DataError, QuadrigaError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.config.schema import DataConfig, SamplerConfig
    from quadriga.data.chat import Chat
    from quadriga.data.images import ImageRules, PromptImages


T = TypeVar("T")


class PromptItem(TypedDict):
    """One prompt of a `PromptDataset`.

    `index` is the number of the row in all files together. The three behind it come from the row
    and are None if it does not have them. `columns` are all of the row, for reward functions. For a
    model that takes images, every item has the last.
    """

    input_ids: list[int]
    raw_prompt: Chat
    index: int
    data_source: object
    reward_model: object
    extra_info: object
    columns: NotRequired[dict[str, object]]
    multi_modal_inputs: NotRequired[PromptImages]


class Prompts(Protocol):
    """Prompts by number.

    Attributes:
        longest: tokens of the longest prompt.
        largest_id: the largest token id.
        same_width: whether batches are padded to `longest`; set by the trainer.
        keeps_columns: whether items have all columns of their rows; set by the trainer.
    """

    longest: int
    largest_id: int
    same_width: bool
    keeps_columns: bool

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> PromptItem: ...
    def collate(self, items: Sequence[PromptItem], /) -> DataProto: ...


class RowSampler(Protocol):
    """Chooses the rows of each batch."""

    def rows(self, batch: int, batch_size: int) -> Sequence[int]:
        """Return `batch_size` numbers of rows for a batch; `batch` counts from 0 over the run."""
        ...

    def update(self, data: DataProto) -> None:
        """Learn from a step. `data` has the fields of the batch after the update: `index` names
        the rows of the data files, `token_level_scores` [B, R] their scores."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """Return the state as JSON values. It is stored in checkpoints."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state."""
        ...


def user_dataset(
    path: str,
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    images: ImageRules | None = None,
) -> Prompts:
    """Return the dataset of the class `config.dataset.name` in the file `path`.

    `images`: how images become tokens; None: the model takes text only.

    Raises:
        DataError: there is no such file.
        InputError: the file cannot be imported.
        ConfigError: it has no such class, the object lacks a method or an attribute, or it drops a
            setting of the texts.
    """
    needed = ("__len__", "__getitem__", "collate", "longest", "largest_id", "same_width")
    args, name = (files, tokenizer, config), config.dataset.name
    options = {} if images is None else {"images": images}
    dataset = _made(path, name, "data.dataset", needed, *args, optional=options)
    for key in ("special_tokens", "chat_template_kwargs"):
        given = getattr(config, key)
        if getattr(dataset, key, given) != given:
            raise ConfigError(
                f"data.{key} has no effect: {name} of {path} does not pass {key}=config.{key} on "
                "to the class that it extends",
                key=f"data.{key}",
            )
    return cast(Prompts, dataset)


def user_sampler(path: str, config: SamplerConfig, dataset: Prompts, seed: int) -> RowSampler:
    """Return the sampler of the class `config.name` in the file `path`.

    Raises:
        As `user_dataset`.
    """
    needed = ("rows", "update", "state_dict", "load_state_dict")
    options = {"seed": seed, **config.options}
    return cast(RowSampler, _made(path, config.name, "data.sampler", needed, dataset, **options))


def sampled_rows(sampler: RowSampler, batch: int, batch_size: int, total: int) -> list[int]:
    """Return the rows that a sampler chooses for a batch.

    Raises:
        DataError: it did not return `batch_size` numbers of rows from 0 to `total` - 1.
    """
    name = type(sampler).__name__
    rows = called(
        sampler, f"rows, for batch {batch},", lambda: [*map(index, sampler.rows(batch, batch_size))]
    )
    if len(rows) != batch_size:
        wanted = f"{batch_size} rows for batch {batch}"
        raise DataError(f"{name}.rows must return {wanted}, got {len(rows)}")
    outside = [f"row {row} of batch {batch}" for row in rows if not 0 <= row < total]
    if outside:
        raise DataError(f"{name}.rows: {outside[0]} is not one of 0 to {total - 1}")
    return rows


def sampler_state(sampler: RowSampler) -> dict[str, object]:
    """Return the state of a sampler as JSON values.

    Raises:
        DataError: the state holds something else.
    """
    state = called(sampler, "state_dict", sampler.state_dict)
    try:
        same: bool = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        same = False
    if not same or not isinstance(state, dict):
        raise DataError(
            f"{type(sampler).__name__}.state_dict must return a dict of JSON values (numbers, "
            f"texts, lists, and dicts with texts as keys), got {state!r:.300}"
        )
    return state


def called(sampler: RowSampler, what: str, call: Callable[[], T]) -> T:
    """Return what a method of the user returns; `DataError` for whatever it raises."""
    with reported(lambda said: DataError(f"{type(sampler).__name__}.{what} failed: {said}")):
        return call()


def _made(
    path: str,
    name: str,
    key: str,
    needed: Sequence[str],
    *args: object,
    optional: Mapping[str, object] = MappingProxyType({}),
    **options: object,
) -> object:
    """Return an object of the user's class, which has the attributes `needed`.

    Args:
        optional: arguments that the class is given if it has them.
        options: arguments with the names of settings.
    """
    module = import_file(Path(path).resolve(), f"file {key}.path")
    made, what = getattr(module, name, None), f"{key}.name={name}"
    if not callable(made):
        defined = [n for n, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(
            f"{what}: {path} has no such class; it has {', '.join(defined) or 'none'}",
            key=f"{key}.name",
        )
    signature = inspect.signature(made)
    options |= {k: value for k, value in optional.items() if k in signature.parameters}
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        given = f" and the options {', '.join(options)}" if options else ""
        raise ConfigError(
            f"{what}: the class cannot be called with {len(args)} arguments{given}: {error}",
            key=f"{key}.name",
        ) from error
    fails = partial(ConfigError, key=f"{key}.name")
    with reported(lambda said: fails(f"{what} cannot be made: {said}"), QuadrigaError):
        found: object = made(*args, **options)
    lacks = [attribute for attribute in needed if not hasattr(found, attribute)]
    if lacks:
        raise ConfigError(f"{what}: {type(found).__name__} lacks {', '.join(lacks)}")
    return found
