"""Laws of dispatch modes, checked on a simulated group without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, Unpack

import torch

from quadriga.errors import DispatchError, LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import DispatchMode
from quadriga.testing.laws import Law, LawBroken, check_all, expect, expect_raises, law
from quadriga.testing.simulated import SimulatedGroup

Carries = Literal["batch", "metric", "list", "same"]
Content: TypeAlias = tuple[list[int], list[list[int]], list[str]]
"""The values of the fields `row`, `wide` and `name` of a batch."""


@dataclass(frozen=True)
class ModeUnderTest:
    """A dispatch mode, the group on which it is checked, and the kind of its arguments.

    `carries`: "batch" (batches split by rows, results concatenated), "metric" (batches split by
    rows, results in a list), "list" (each argument is a list with one entry per part) or "same"
    (every rank receives the same arguments). `parts`: the number of parts; None: one per rank.
    """

    mode: DispatchMode
    group: SimulatedGroup
    carries: Carries = "batch"
    parts: int | None = None
    pads: bool = True
    """Whether the mode accepts batches of any length if padding is enabled."""
    uneven: bool = False
    """Whether it also accepts them without padding (`uneven_dispatch_mode`)."""
    functions: tuple[Callable[..., object], ...] = ()
    """Arguments before the batch: a function, for modes that send one."""

    @property
    def n(self) -> int:
        """The number of parts."""
        return self.parts if self.parts is not None else self.group.world_size

    def call(self, worker: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call `worker(rank, *args, **kwargs)` on the simulated group."""
        return self.group.call(self.mode, worker, *self.functions, *args, **kwargs)

    def echo(self, value: object) -> object:
        """Call a worker that returns its argument."""
        return self.call(lambda rank, *args: args[-1], value)


def rows(count: int, padding: bool = False) -> DataProto:
    """Return a batch of `count` rows, all different."""
    return DataProto.from_dict(
        tensors={"row": torch.arange(count), "wide": torch.arange(count * 3).reshape(count, 3)},
        non_tensors={"name": [f"row {i}" for i in range(count)]},
        meta_info={"temperature": 0.5},
        auto_padding=padding,
    )


def as_batch(value: object) -> DataProto:
    """Return `value`. Raises `LawBroken` if it is not a `DataProto`."""
    if not isinstance(value, DataProto):
        raise LawBroken(f"expected a DataProto, got {type(value).__name__}")
    return value


def content(value: object) -> Content:
    """Return the values of a batch that was made by `rows`, as lists."""
    batch = as_batch(value)
    return (
        batch.batch["row"].tolist(),
        batch.batch["wide"].tolist(),
        list(batch.non_tensor_batch["name"]),
    )


def as_list(value: object) -> list[object]:
    """Return `value` as a list. Raises `LawBroken` if it is neither a list nor a tuple."""
    if not isinstance(value, list | tuple):
        raise LawBroken(f"expected a list, got {type(value).__name__}")
    return list(value)


def _joined(subject: ModeUnderTest, result: object) -> DataProto:
    if subject.carries == "metric":
        return DataProto.concat([as_batch(part) for part in as_list(result)])
    return as_batch(result)


def _carries_batches(subject: ModeUnderTest) -> bool:
    return subject.carries in ("batch", "metric")


@law("identity", "dispatch followed by collect returns the input, in order")
def identity(subject: ModeUnderTest) -> None:
    if _carries_batches(subject):
        for count in (subject.n, 3 * subject.n):
            sent = rows(count)
            expect(content(_joined(subject, subject.echo(sent))), content(sent), f"{count} rows")
    elif subject.carries == "list":
        sent_list = [f"part {i}" for i in range(subject.n)]
        expect(as_list(subject.echo(sent_list)), sent_list, "a list with one entry per part")
    else:
        # A list of 3 entries must not be split, also on 3 ranks. A mode for one rank returns the
        # bare result, other modes return a list with one result per rank.
        for value in ("text", [1, 2, 3], {"a": 1}, None):
            result = subject.echo(value)
            results = result if isinstance(result, list) and value is not result else [result]
            expect([r == value for r in results], [True] * len(results), f"the value {value!r}")


@law("keywords", "an argument may be passed by keyword")
def keywords(subject: ModeUnderTest) -> None:
    by_keyword = subject.call(lambda rank, *args, data: data, data=_sample(subject))
    by_position = subject.echo(_sample(subject))
    if _carries_batches(subject):
        seen, expected = _joined(subject, by_keyword), _joined(subject, by_position)
        expect(content(seen), content(expected), "data=…")
    else:
        expect(by_keyword, by_position, "data=…")


@law("equal parts", "all parts of a batch have the same number of rows, and no row is lost")
def equal_parts(subject: ModeUnderTest) -> None:
    if not _carries_batches(subject):
        return
    seen: list[int] = []
    view, parts = subject.group.split(subject.mode, *subject.functions, rows(2 * subject.n))
    received = [as_batch(args[-1]) for args, _ in parts]
    expect({len(part) for part in received}, {2}, "rows in each part")
    for part in received:
        seen.extend(part.batch["row"].tolist())
    # Ranks that share a data-parallel rank receive the same rows, hence the set.
    expect(sorted(set(seen)), list(range(2 * subject.n)), "rows that the ranks received")
    expect(len(parts), len(view.ranks), "parts for executing ranks")


@law("padding", "with padding enabled any length is split, and the result has no padding rows")
def padding(subject: ModeUnderTest) -> None:
    if not _carries_batches(subject) or not subject.pads:
        return
    for count in range(1, 2 * subject.n + 2):
        sent = rows(count, padding=True)
        result = subject.echo(sent)
        if subject.carries == "metric":  # the list of results keeps the padding rows
            parts = [as_batch(part) for part in as_list(result)]
            expect(sum(map(len, parts)) % subject.n, 0, f"{count} rows, padded")
        else:
            expect(content(result), content(sent), f"{count} rows, padded")
        expect(len(sent), count, "rows of the caller's batch")


@law("padding of growing results", "rows that a method made from padding rows are removed too")
def growing(subject: ModeUnderTest) -> None:
    if subject.carries != "batch" or not subject.pads:
        return
    # 4 parts, 5 rows: 3 padding rows make 8 rows, 2 per part. The method returns each row twice, 16
    # rows; the last 6 of them come from padding rows.
    count = subject.n + 1
    result = subject.call(
        lambda rank, *args: args[-1].repeat(2, interleave=True), rows(count, padding=True)
    )
    expected = [i for i in range(count) for _ in range(2)]
    expect(as_batch(result).batch["row"].tolist(), expected, "each row twice")


@law("refusal", "without padding, a length that does not divide raises a typed error")
def refusal(subject: ModeUnderTest) -> None:
    if subject.n == 1 or subject.carries == "same" or subject.uneven:
        return
    if _carries_batches(subject):
        expect_raises(lambda: subject.echo(rows(subject.n + 1)), LengthError, "one row too many")
    else:
        long = list(range(subject.n + 1))
        expect_raises(lambda: subject.echo(long), LengthError, "one entry too many")
        expect_raises(lambda: subject.echo(3), DispatchError, "not a list")


@law("uneven parts", "a mode for uneven parts adds no row, and lengths differ by at most one")
def uneven_parts(subject: ModeUnderTest) -> None:
    if not subject.uneven:
        return
    for count in range(2 * subject.n + 2):  # fewer rows than parts, as many, and more
        lengths: list[int] = []

        def note(rank: int, *args: object, seen: list[int] = lengths) -> object:
            seen.append(len(as_batch(args[-1])))
            return args[-1]

        sent = rows(count)
        result = subject.call(note, sent)
        expect(content(_joined(subject, result)), content(sent), f"{count} rows")
        expect(max(lengths) - min(lengths) <= 1, True, f"{count} rows in parts of {lengths}")


@law("untouched", "the caller's arguments are not changed")
def untouched(subject: ModeUnderTest) -> None:
    if _carries_batches(subject):
        sent = rows(2 * subject.n)
        before = content(sent)
        subject.echo(sent)
        expect(content(sent), before, "the caller's batch")
    else:
        value = _entries(subject)
        before_call = list(value)
        subject.echo(value)
        expect(value, before_call, "the caller's list")


MODE_LAWS: tuple[Law[ModeUnderTest], ...] = (
    identity,
    keywords,
    equal_parts,
    padding,
    growing,
    refusal,
    uneven_parts,
    untouched,
)


class ModeOptions(TypedDict, total=False):
    """The optional fields of `ModeUnderTest`."""

    parts: int | None
    pads: bool
    uneven: bool
    functions: tuple[Callable[..., object], ...]


def check_mode(
    mode: DispatchMode,
    world_size: int = 4,
    carries: Carries = "batch",
    group: SimulatedGroup | None = None,
    **options: Unpack[ModeOptions],
) -> None:
    """Check every law of dispatch modes. Raises `LawBroken` if one does not hold.

    Args:
        mode: the mode to check.
        world_size: number of ranks of the simulated group.
        carries: the kind of its arguments (see `ModeUnderTest`).
        group: a simulated group with meshes or a layout, instead of `world_size` plain ranks.
        options: the other fields of `ModeUnderTest`.
    """
    subject = ModeUnderTest(mode, group or SimulatedGroup(world_size), carries, **options)
    check_all(MODE_LAWS, subject, f"Dispatch.{mode.name} on {subject.group.world_size} ranks")


def _entries(subject: ModeUnderTest) -> list[str]:
    return [f"part {i}" for i in range(subject.n)]


def _sample(subject: ModeUnderTest) -> DataProto | list[str]:
    return rows(2 * subject.n) if _carries_batches(subject) else _entries(subject)
