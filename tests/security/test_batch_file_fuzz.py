"""Batch files that were changed at random: a valid batch or a `DataError`, in bounded resources.

About a minute in the suite, with the same changes in every run. The nightly test draws other ones
for 30 minutes, or for as many seconds as `QUADRIGA_FUZZ_SECONDS` says.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
from batch_file_mutations import load_checked, mutate
from batch_file_parts import sample_batch, saved
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from quadriga.protocol import DataProto
from quadriga.protocol.values.operations import object_array

sys.path.append(str(Path(__file__).parents[1] / "protocol"))
from disk_values import VALUES, one_of_each

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
NIGHTLY_SECONDS = float(os.environ.get("QUADRIGA_FUZZ_SECONDS", 1800))
EXAMPLES = 2500
FUZZ = settings(
    deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file that is not flushed to disk."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    warnings.simplefilter("ignore")
    return tmp_path / "batch"


def base_files(path: Path) -> list[bytes]:
    """Valid files: a batch with every kind of field, and one with a value of every type."""
    values = one_of_each()
    del values["larger"]  # 4 KB of digits
    rich = DataProto.from_dict(None, {"o": object_array(list(values.values()))}, values)
    return [saved(sample_batch(), path), saved(rich, path)]


def fuzz(path: Path, bases: list[bytes], options: settings, number: int) -> Counter[str]:
    """Load changed files. Return how often each outcome occurred."""
    outcomes: Counter[str] = Counter()

    @options
    @seed(number)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        base = bases[data.draw(st.integers(0, len(bases) - 1))]
        load_checked(path, mutate(data.draw, base), outcomes)

    run()
    return outcomes


def test_changed_files_are_refused_or_valid(path):
    options = settings(FUZZ, max_examples=EXAMPLES)
    outcomes = fuzz(path, base_files(path), options, number=0)
    # The changes reach the decoders: many different reasons, and some files remain valid.
    assert outcomes["loaded"] > 20 and len(outcomes) > 50, outcomes.most_common()


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_SECONDS + 600)
def test_changed_files_for_half_an_hour(path):
    bases, outcomes = base_files(path), Counter[str]()
    start = time.monotonic()
    number = 1
    while time.monotonic() - start < NIGHTLY_SECONDS:
        outcomes += fuzz(path, bases, settings(FUZZ, max_examples=500), number)
        drawn = VALUES.filter(lambda value: value is not None)
        bases[2:] = [_drawn(path, drawn, number + i) for i in range(3)]
        number += 10
    print(f"{outcomes.total()} files, {len(outcomes)} outcomes, {outcomes['loaded']} loaded")
    print("\n".join(f"{count:7} {reason}" for reason, count in outcomes.most_common()))
    assert len(outcomes) > 60


def _drawn(path: Path, values: st.SearchStrategy, number: int) -> bytes:
    """Return the file of a batch of drawn values."""
    found: list[bytes] = []

    @settings(FUZZ, max_examples=5)
    @seed(number)
    @given(st.lists(values, min_size=1, max_size=5))
    def draw(rows: list[object]) -> None:
        tensors = sample_batch().select(["x"])[:1].batch
        data = DataProto(tensors, {"o": object_array([rows])}, {"m": rows})
        found.append(saved(data, path))

    draw()
    return found[-1]
