"""Laws of dispatch modes, checked on a simulated group without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quadriga.errors import DispatchError, LengthError, MeshError
from quadriga.protocol import DataProto
from quadriga.single_controller import DispatchMode, GroupLayout
from quadriga.single_controller.dispatch import GroupView
from quadriga.single_controller.worker_group import Part, parts_of_ranks
from quadriga.testing import check_all, expect, expect_raises
from quadriga.testing.backends import as_batch, rows

Carries = Literal["batch", "metric", "list", "same"]
Mesh: TypeAlias = tuple[Sequence[int], Sequence[bool]]
"""For each rank its data-parallel rank, and whether its result is collected."""


@dataclass
class SimulatedGroup:
    """A group of `world_size` ranks without processes. A function stands for the worker's method.

    `meshes`: the meshes that the workers would register.
    """

    world_size: int
    meshes: Mapping[str, Mesh] = field(default_factory=dict)

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh."""
        return list(self._mesh(mesh_name)[0])

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected in a mesh."""
        return list(self._mesh(mesh_name)[1])

    @property
    def rank_layout(self) -> GroupLayout:
        """The MEGATRON modes read the layout of real workers."""
        raise MeshError("a simulated group has no layout", mesh_name="layout")

    def _mesh(self, name: str) -> Mesh:
        if name not in self.meshes:
            raise MeshError(
                f"no mesh {name!r}; pass SimulatedGroup(meshes={{name: (dp_ranks, collects)}})",
                mesh_name=name,
            )
        return self.meshes[name]

    def split(
        self, mode: DispatchMode, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[GroupView, Sequence[Part]]:
        """Dispatch the arguments. Return the view and (args, kwargs) for each executing rank."""
        view = GroupView(self, range(self.world_size), "simulated.call")
        if mode.ranks is not None:
            view.ranks = mode.ranks(view)
        return view, parts_of_ranks(view, mode.dispatch_fn(view, *args, **kwargs))

    def call(
        self, mode: DispatchMode, worker: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Dispatch, call `worker(rank, *args, **kwargs)` for each executing rank, and collect."""
        view, parts = self.split(mode, args, kwargs)
        outputs = [
            worker(rank, *given, **named)
            for rank, (given, named) in zip(view.ranks, parts, strict=True)
        ]
        return mode.collect_fn(view, outputs)


@dataclass(frozen=True)
class ModeUnderTest:
    """A dispatch mode, the group on which it is checked, and the kind of its arguments.

    Attributes:
        carries: "batch" (batches split by rows, results concatenated), "metric" (batches split by
            rows, results in a list), "list" (each argument is a list with one entry per part) or
            "same" (every rank receives the same arguments).
        parts: the number of parts; None: one per rank.
        uneven: it accepts batches of any length without padding (`uneven_dispatch_mode`).
    """

    mode: DispatchMode
    group: SimulatedGroup
    carries: Carries = "batch"
    parts: int | None = None
    uneven: bool = False

    @property
    def n(self) -> int:
        """The number of parts."""
        return self.parts if self.parts is not None else self.group.world_size

    @property
    def carries_batches(self) -> bool:
        """Whether its arguments are split by rows."""
        return self.carries in ("batch", "metric")

    def call(self, worker: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call `worker(rank, *args, **kwargs)` on the simulated group."""
        return self.group.call(self.mode, worker, *args, **kwargs)

    def echo(self, value: object) -> object:
        """Return the result of a worker that returns its argument, joined if it is of batches."""
        return self.joined(self.call(lambda rank, *args: args[-1], value))

    def joined(self, result: object) -> object:
        """Return the parts of a "metric" as one batch, and other results as they are."""
        if self.carries != "metric" or not isinstance(result, list | tuple):
            return result
        return DataProto.concat([as_batch(part) for part in result])


def content(value: object) -> object:
    """Return the values of a batch that was made by `rows`, as lists; other values as they are."""
    if not isinstance(value, DataProto):
        return value
    batch = value.batch
    return batch["row"].tolist(), batch["wide"].tolist(), list(value.non_tensor_batch["name"])


def identity(subject: ModeUnderTest) -> None:
    """Dispatch followed by collect returns the input, in order."""
    if subject.carries == "same":
        # A list of 3 entries must not be split, also on 3 ranks. A mode for one rank returns the
        # bare result, other modes return a list with one result per rank.
        for value in ("text", [1, 2, 3], {"a": 1}, None):
            result = subject.echo(value)
            results = result if isinstance(result, list) and value is not result else [result]
            expect([r == value for r in results], [True] * len(results), f"the value {value!r}")
        return
    for count in (subject.n, 3 * subject.n) if subject.carries_batches else (subject.n,):
        sent = rows(count) if subject.carries_batches else list(range(count))
        expect(content(subject.echo(sent)), content(sent), f"{count} rows or entries")


def keywords(subject: ModeUnderTest) -> None:
    """An argument may be passed by keyword."""
    sent = rows(2 * subject.n) if subject.carries_batches else list(range(subject.n))
    named = subject.joined(subject.call(lambda rank, *args, data: data, data=sent))
    expect(content(named), content(subject.echo(sent)), "data=…")


def equal_parts(subject: ModeUnderTest) -> None:
    """All parts of a batch have the same number of rows, and no row is lost."""
    if not subject.carries_batches:
        return
    view, parts = subject.group.split(subject.mode, [rows(2 * subject.n)], {})
    received = [as_batch(args[-1]) for args, _ in parts]
    expect({len(part) for part in received}, {2}, "rows in each part")
    # Ranks that share a data-parallel rank receive the same rows, hence the set.
    seen = {row for part in received for row in part.batch["row"].tolist()}
    expect(seen, set(range(2 * subject.n)), "rows that the ranks received")
    expect(len(parts), len(view.ranks), "parts for executing ranks")


def padding(subject: ModeUnderTest) -> None:
    """With padding enabled any length is split, and the result has no rows made from padding."""
    if subject.carries != "batch":
        return
    for count in range(1, 2 * subject.n + 2):
        sent = rows(count, padding=True)
        expect(content(subject.echo(sent)), content(rows(count)), f"{count} rows, padded")
        expect(len(sent), count, "rows of the caller's batch")
    # 4 parts, 5 rows: 3 padding rows make 8 rows, 2 per part. The method returns each row twice, 16
    # rows; the last 6 of them come from padding rows.
    count = subject.n + 1
    twice = subject.call(
        lambda rank, *args: args[-1].repeat(2, interleave=True), rows(count, padding=True)
    )
    expected = [i for i in range(count) for _ in range(2)]
    expect(as_batch(twice).batch["row"].tolist(), expected, "each row twice")


def refusal(subject: ModeUnderTest) -> None:
    """Without padding, a length that does not divide raises a typed error, or parts are uneven."""
    if subject.uneven:
        for count in range(2 * subject.n + 2):  # fewer rows than parts, as many, and more
            lengths: list[int] = []

            def note(rank: int, *args: object, seen: list[int] = lengths) -> object:
                seen.append(len(as_batch(args[-1])))
                return args[-1]

            result = subject.joined(subject.call(note, rows(count)))
            expect(content(result), content(rows(count)), f"{count} rows")
            expect(max(lengths) - min(lengths) <= 1, True, f"{count} rows in parts of {lengths}")
    elif subject.n > 1 and subject.carries != "same":
        count = subject.n + 1
        wrong = rows(count) if subject.carries_batches else list(range(count))
        expect_raises(lambda: subject.echo(wrong), LengthError, "one row or entry too many")
        if not subject.carries_batches:
            expect_raises(lambda: subject.echo(3), DispatchError, "not a list")


def untouched(subject: ModeUnderTest) -> None:
    """The caller's arguments are not changed."""
    sent = rows(2 * subject.n) if subject.carries_batches else list(range(subject.n))
    before = content(sent if isinstance(sent, DataProto) else list(sent))
    subject.echo(sent)
    expect(content(sent), before, "the caller's batch or list")


MODE_LAWS: tuple[Callable[[ModeUnderTest], None], ...] = (
    identity, keywords, equal_parts, padding, refusal, untouched,
)  # fmt: skip


def check_mode(
    mode: DispatchMode,
    world_size: int = 4,
    carries: Carries = "batch",
    *,
    parts: int | None = None,
    uneven: bool = False,
    meshes: Mapping[str, Mesh] | None = None,
) -> None:
    """Check every law of dispatch modes on `world_size` ranks; see `ModeUnderTest`.

    Args:
        meshes: name → (data-parallel rank, whether it is collected) of each rank, for a mode that
            reads the meshes that workers register.

    Raises:
        LawBroken: one does not hold.
    """
    group = SimulatedGroup(world_size, meshes or {})
    subject = ModeUnderTest(mode, group, carries, parts, uneven)
    check_all(MODE_LAWS, subject, f"Dispatch.{mode.name} on {world_size} ranks")
