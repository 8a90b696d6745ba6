"""Keep some responses of each step as text, in `samples.jsonl` of the run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quadriga.observability.jsonl import JsonlFile, read_jsonl


@dataclass(frozen=True)
class Sample:
    """One response. `reward` is the sum over its tokens; `split` is "train" or "val"."""

    step: int
    split: str
    prompt: str
    response: str
    reward: float
    ground_truth: object = None
    data_source: str | None = None
    response_tokens: int | None = None


class SampleLog:
    """Appends samples to a JSON-lines file. Raises `InputError` if it cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self._file = JsonlFile(path)

    def write(self, samples: Iterable[Sample]) -> None:
        """Append samples, one line each."""
        for sample in samples:
            self._file.write(dataclasses.asdict(sample))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_samples(path: str | Path, *, step: int | None = None) -> list[Sample]:
    """Return the samples of a file, either of one step or of all steps."""
    rows = (Sample(**row) for row in read_jsonl(path))
    return [sample for sample in rows if step is None or sample.step == step]
