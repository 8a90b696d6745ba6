"""Laws of meshes: the part that each rank receives, and the ranks whose results are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.single_controller import DispatchMode, make_nd_compute_dataproto_dispatch_fn
from quadriga.single_controller.dispatch.batch_modes import check_mesh as check_registration
from quadriga.single_controller.dispatch.modes import inline_dispatch_mode
from quadriga.testing.laws import Law, LawBroken, check_all, expect, law
from quadriga.testing.mode_laws import MODE_LAWS, ModeUnderTest, as_batch, content, rows
from quadriga.testing.simulated import SimulatedGroup

MESH = "mesh"


@dataclass(frozen=True)
class MeshUnderTest:
    """A mesh as its workers register it, with one entry per rank, and its dispatch mode."""

    dp_ranks: tuple[int, ...]
    collects: tuple[bool, ...]
    mode: DispatchMode

    @property
    def parts(self) -> int:
        """The number of data-parallel ranks."""
        return max(self.dp_ranks) + 1

    @property
    def group(self) -> SimulatedGroup:
        """A simulated group with this mesh."""
        return SimulatedGroup(len(self.dp_ranks), {MESH: (self.dp_ranks, self.collects)})

    @property
    def is_whole(self) -> bool:
        """Whether each data-parallel rank has a collecting rank."""
        collected = {dp for dp, c in zip(self.dp_ranks, self.collects, strict=True) if c}
        return len(collected) == self.parts


@law(
    "registration",
    "data-parallel ranks are 0..n-1, and each is collected from at most one rank",
)
def registration(subject: MeshUnderTest) -> None:
    check_registration(MESH, subject.dp_ranks, subject.collects)


@law("one object per part", "ranks that share a data-parallel rank receive the same object")
def one_object_per_part(subject: MeshUnderTest) -> None:
    # dp_ranks [0, 0, 1, 1]: ranks 0 and 1 must receive one object, ranks 2 and 3 another one. The
    # group then sends each object once. Two equal copies would be sent twice.
    _, parts = subject.group.split(subject.mode, rows(2 * subject.parts))
    received: dict[int, object] = {}
    for rank, (args, _) in enumerate(parts):
        dp_rank = subject.dp_ranks[rank]
        if received.setdefault(dp_rank, args[0]) is not args[0]:
            raise LawBroken(f"rank {rank} received a copy of the part of dp rank {dp_rank}")
    expect(len({id(part) for part in received.values()}), subject.parts, "different parts")


@law("order", "results are concatenated in the order of data-parallel ranks")
def order(subject: MeshUnderTest) -> None:
    # dp_ranks [1, 1, 0, 0]: rank 0 returns rows 2 and 3, rank 2 returns rows 0 and 1. Collecting in
    # the order of ranks would give 2 3 0 1 instead of 0 1 2 3.
    sent = rows(2 * subject.parts)
    result = subject.group.call(subject.mode, lambda rank, data: data, sent)
    if subject.is_whole:
        expect(content(result), content(sent), "rows")
    else:  # the rows of data-parallel ranks without a collecting rank are missing
        seen = as_batch(result).batch["row"].tolist()
        expect(seen, sorted(seen), "rows of the collected ranks")


@law("as a mode", "the dispatch mode of the mesh satisfies the laws of dispatch modes")
def as_a_mode(subject: MeshUnderTest) -> None:
    if subject.is_whole:
        check_all(
            MODE_LAWS,
            ModeUnderTest(subject.mode, subject.group, "batch", subject.parts),
            f"The mesh {list(subject.dp_ranks)}",
        )


MESH_LAWS: tuple[Law[MeshUnderTest], ...] = (registration, one_object_per_part, order, as_a_mode)


def check_mesh(
    dp_ranks: Sequence[int], collects: Sequence[bool], mode: DispatchMode | None = None
) -> None:
    """Check every law of meshes. Raises `LawBroken` if one does not hold.

    Args:
        dp_ranks: the data-parallel rank of each rank.
        collects: for each rank whether its result is collected.
        mode: your own dispatch mode, which reads `group.dispatch_info("mesh")` and
            `group.collect_info("mesh")`; None: the built-in mode.
    """
    mode = mode or inline_dispatch_mode(make_nd_compute_dataproto_dispatch_fn(MESH))
    subject = MeshUnderTest(tuple(dp_ranks), tuple(collects), mode)
    check_all(MESH_LAWS, subject, f"The mesh {list(dp_ranks)}")
