"""`quadriga generate`: responses of a model folder to one prompt, or to files of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

from quadriga.config.commands import GenerateConfig
from quadriga.data.images.prompts import TAG
from quadriga.errors import ConfigError
from quadriga.protocol import fields
from quadriga.trainer.checks.settings import check_generate_settings
from quadriga.trainer.evaluation.response_file import StoredRows
from quadriga.trainer.evaluation.responses import generate, load_prompts, write_responses

Messages = Sequence[Mapping[str, object]]
"""A chat: messages with `role` and `content`."""


@dataclass(frozen=True)
class Answer:
    """One prompt and the responses to it."""

    prompt: Messages
    responses: list[str]


class WrittenAnswers(Sequence[Answer]):
    """The answers in a file, which are read each time that they are iterated over."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Answer]:
        return map(_answer, self._rows)

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> list[Answer]: ...
    def __getitem__(self, index: int | slice) -> Answer | list[Answer]:
        """Return answers by number. All rows before them are read."""
        if isinstance(index, slice):
            wanted = range(len(self))[index]
            chosen = {n: a for n, a in enumerate(self) if n in wanted}
            return [chosen[number] for number in wanted]
        number = range(len(self))[index]
        return next(islice(self, number, None))


def run_generation(config: GenerateConfig) -> Sequence[Answer]:
    """Generate `n` responses per prompt, and write them to `output` if it is set.

    Responses that `output` holds from an earlier run of the same command are kept.

    Returns:
        One entry per prompt, in the order of the prompts. With `output` they stay in the file.

    Raises:
        ConfigError: neither or both of `prompt` and `data_files` are set, or another setting does
            not fit, or `output` is of other settings or data, or the generation does not fit the
            memory of the ranks.
        ModelError: the folder holds no model, or a sequence or a token does not fit it.
        WorkerError: a rank failed. What was generated before is in `output`.
    """
    if (config.prompt is None) == (not config.data_files):
        raise ConfigError("set either prompt=… or data_files=[…], and not both", key="prompt")
    if config.images and config.prompt is None:
        raise ConfigError(
            "images are the image files of prompt; set prompt=…, or write the images of data_files "
            "into the column image_key",
            key="images",
        )
    check_generate_settings(config)
    prompts = load_prompts(config, _tagged(config), config.images)
    if config.output is None:
        from quadriga.trainer.memory.generation import check_generation_memory  # imports torch

        check_generation_memory(config, prompts.dataset)
        return [_answer(row) for batch in generate(config, prompts) for row in batch]
    return WrittenAnswers(write_responses(config, prompts, config.output))


def _answer(row: Mapping[str, object]) -> Answer:
    return Answer(_messages(row["prompt"]), _texts(row[fields.RESPONSES]))


def _tagged(config: GenerateConfig) -> str | None:
    """Return the prompt. Images for which it has no tag come before its text."""
    if config.prompt is None or TAG in config.prompt:
        return config.prompt
    return TAG * len(config.images) + config.prompt


def main_generation(config: GenerateConfig) -> Sequence[Answer]:
    """Call `run_generation`; verl has this name for it."""
    return run_generation(config)


def _messages(value: object) -> Messages:
    assert isinstance(value, list)
    return value


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value
