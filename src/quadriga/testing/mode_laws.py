"""Laws of dispatch modes, checked without any process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from quadriga.errors import DispatchError, LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import DispatchMode
from quadriga.testing.laws import Law, check_all, expect, expect_raises, law
from quadriga.testing.simulated import SimulatedGroup

Carries = Literal["batch", "metric", "list", "same"]


@dataclass(frozen=True)
class ModeUnderTest:
    """A mode, the group it is tried on, and what its arguments are.

    `carries`: "batch" (split by rows, joined again), "metric" (split by rows, results in a list),
    "list" (an argument is a list with one entry per part) or "same" (everything to everybody).
    `parts`: into how many parts an argument is split; None: one per rank.
    """

    mode: DispatchMode
    group: SimulatedGroup
    carries: Carries = "batch"
    parts: int | None = None
    pads: bool = True
    """Whether batches with padding enabled may be of any length."""
    functions: tuple[Any, ...] = field(default=())
    """Arguments in front of the batch (a function, for modes that send one)."""

    @property
    def n(self) -> int:
        return self.parts if self.parts is not None else self.group.world_size

    def call(self, worker: Any, *args: Any, **kwargs: Any) -> Any:
        return self.group.call(self.mode, worker, *self.functions, *args, **kwargs)

    def echo(self, value: Any) -> Any:
        """The call of a worker that gives back what it got."""
        return self.call(lambda rank, *args: args[-1], value)


def rows(count: int, padding: bool = False) -> DataProto:
    """A batch of `count` rows that can be told apart."""
    return DataProto.from_dict(
        tensors={"row": torch.arange(count), "wide": torch.arange(count * 3).reshape(count, 3)},
        non_tensors={"name": [f"row {i}" for i in range(count)]},
        meta_info={"temperature": 0.5},
        auto_padding=padding,
    )


def content(batch: Any) -> tuple[list[int], list[list[int]], list[str]]:
    """What a batch of `rows` holds, comparable."""
    return (
        batch.batch["row"].tolist(),
        batch.batch["wide"].tolist(),
        list(batch.non_tensor_batch["name"]),
    )


def _joined(subject: ModeUnderTest, result: Any) -> Any:
    return DataProto.concat(list(result)) if subject.carries == "metric" else result


def _carries_batches(subject: ModeUnderTest) -> bool:
    return subject.carries in ("batch", "metric")


@law("identity", "splitting and joining gives the input back, in order")
def identity(subject: ModeUnderTest) -> None:
    if _carries_batches(subject):
        for count in (subject.n, 3 * subject.n):
            sent = rows(count)
            expect(content(_joined(subject, subject.echo(sent))), content(sent), f"{count} rows")
    elif subject.carries == "list":
        sent_list = [f"part {i}" for i in range(subject.n)]
        expect(list(subject.echo(sent_list)), sent_list, "a list with one entry per part")
    else:
        for value in ("text", [1, 2, 3], {"a": 1}, None):
            result = subject.echo(value)
            results = result if isinstance(result, list) and value is not result else [result]
            expect([r == value for r in results], [True] * len(results), f"the value {value!r}")


@law("keywords", "an argument may be given by keyword as well")
def keywords(subject: ModeUnderTest) -> None:
    by_keyword = subject.call(lambda rank, *args, data: data, data=_sample(subject))
    by_position = subject.echo(_sample(subject))
    if _carries_batches(subject):
        seen, wanted = _joined(subject, by_keyword), _joined(subject, by_position)
        expect(content(seen), content(wanted), "data=…")
    else:
        expect(by_keyword, by_position, "data=…")


@law("equal parts", "every part of a batch has the same number of rows, and none is lost")
def equal_parts(subject: ModeUnderTest) -> None:
    if not _carries_batches(subject):
        return
    seen: list[int] = []
    view, parts = subject.group.split(subject.mode, *subject.functions, rows(2 * subject.n))
    lengths = {len(args[-1]) for args, _ in parts}
    expect(lengths, {2}, "rows in each part")
    for args, _ in parts:
        seen.extend(args[-1].batch["row"].tolist())
    expect(sorted(set(seen)), list(range(2 * subject.n)), "rows that some rank received")
    expect(len(parts), len(view.ranks), "parts for executing ranks")


@law("padding", "with padding enabled any length is split, and the padding is gone afterwards")
def padding(subject: ModeUnderTest) -> None:
    if not _carries_batches(subject) or not subject.pads:
        return
    for count in range(1, 2 * subject.n + 2):
        sent = rows(count, padding=True)
        result = subject.echo(sent)
        if subject.carries == "metric":
            expect(sum(map(len, result)) % subject.n, 0, f"{count} rows, padded")
        else:
            expect(content(result), content(sent), f"{count} rows, padded")
        expect(len(sent), count, "rows of the caller's own batch")


@law("padding of growing results", "rows that a method made from padding are gone as well")
def growing(subject: ModeUnderTest) -> None:
    if subject.carries != "batch" or not subject.pads:
        return
    count = subject.n + 1
    result = subject.call(
        lambda rank, *args: args[-1].repeat(2, interleave=True), rows(count, padding=True)
    )
    wanted = [i for i in range(count) for _ in range(2)]
    expect(result.batch["row"].tolist(), wanted, "each row twice")


@law("refusal", "without padding a length that does not divide is a typed error")
def refusal(subject: ModeUnderTest) -> None:
    if subject.n == 1 or subject.carries == "same":
        return
    if _carries_batches(subject):
        expect_raises(lambda: subject.echo(rows(subject.n + 1)), LengthError, "one row too many")
    else:
        long = list(range(subject.n + 1))
        expect_raises(lambda: subject.echo(long), LengthError, "one entry too many")
        expect_raises(lambda: subject.echo(3), DispatchError, "no list")


@law("untouched", "the caller's arguments are not changed")
def untouched(subject: ModeUnderTest) -> None:
    if _carries_batches(subject):
        sent = rows(2 * subject.n)
        before = content(sent)
        subject.echo(sent)
        expect(content(sent), before, "the caller's batch")
    else:
        value = _sample(subject)
        kept = list(value)
        subject.echo(value)
        expect(value, kept, "the caller's list")


MODE_LAWS: tuple[Law[ModeUnderTest], ...] = (
    identity,
    keywords,
    equal_parts,
    padding,
    growing,
    refusal,
    untouched,
)


def check_mode(
    mode: DispatchMode,
    world_size: int = 4,
    carries: Carries = "batch",
    group: SimulatedGroup | None = None,
    **options: Any,
) -> None:
    """Check every law of dispatch modes. `options`: the other fields of `ModeUnderTest`.

    Raises LawBroken.
    """
    subject = ModeUnderTest(mode, group or SimulatedGroup(world_size), carries, **options)
    check_all(MODE_LAWS, subject, f"Dispatch.{mode.name} on {subject.group.world_size} ranks")


def _sample(subject: ModeUnderTest) -> Any:
    if _carries_batches(subject):
        return rows(2 * subject.n)
    return [f"part {i}" for i in range(subject.n)]
