"""Laws of meshes: which rank gets which part, and who is collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.single_controller import DispatchMode, make_nd_compute_dataproto_dispatch_fn
from quadriga.single_controller.dispatch.mesh_modes import check_mesh as check_registration
from quadriga.single_controller.dispatch.modes import inline_dispatch_mode
from quadriga.testing.laws import Law, LawBroken, check_all, expect, law
from quadriga.testing.mode_laws import MODE_LAWS, ModeUnderTest, content, rows
from quadriga.testing.simulated import SimulatedGroup

MESH = "mesh"


@dataclass(frozen=True)
class MeshUnderTest:
    """A mesh as its workers register it, one entry per rank, and the mode that goes by it."""

    dp_ranks: tuple[int, ...]
    collects: tuple[bool, ...]
    mode: DispatchMode

    @property
    def parts(self) -> int:
        return max(self.dp_ranks) + 1

    @property
    def group(self) -> SimulatedGroup:
        return SimulatedGroup(len(self.dp_ranks), {MESH: (self.dp_ranks, self.collects)})

    @property
    def is_whole(self) -> bool:
        """Whether every data-parallel rank is collected from somewhere."""
        collected = {dp for dp, c in zip(self.dp_ranks, self.collects, strict=True) if c}
        return len(collected) == self.parts


@law("registration", "data-parallel ranks are 0..n-1 and each is collected from one rank at most")
def registration(subject: MeshUnderTest) -> None:
    check_registration(MESH, subject.dp_ranks, subject.collects)


@law("one object per part", "ranks that share a data-parallel rank receive one and the same part")
def one_object_per_part(subject: MeshUnderTest) -> None:
    _, parts = subject.group.split(subject.mode, rows(2 * subject.parts))
    received: dict[int, object] = {}
    for rank, (args, _) in enumerate(parts):
        dp_rank = subject.dp_ranks[rank]
        if received.setdefault(dp_rank, args[0]) is not args[0]:
            raise LawBroken(f"rank {rank} received a copy of the part of dp rank {dp_rank}")
    expect(len({id(part) for part in received.values()}), subject.parts, "different parts")


@law("order", "results are joined in data-parallel order, whichever ranks they come from")
def order(subject: MeshUnderTest) -> None:
    sent = rows(2 * subject.parts)
    result = subject.group.call(subject.mode, lambda rank, data: data, sent)
    if subject.is_whole:
        expect(content(result), content(sent), "rows")
    else:
        seen = result.batch["row"].tolist()
        expect(seen, sorted(seen), "rows of the collected ranks")


@law("as a mode", "the mesh's dispatch mode obeys the laws of dispatch modes")
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
    """Check every law of meshes on one registration per rank. `mode`: a mode of your own that
    asks for `group.dispatch_info("mesh")` and `group.collect_info("mesh")`. Raises LawBroken."""
    mode = mode or inline_dispatch_mode(make_nd_compute_dataproto_dispatch_fn(MESH))
    subject = MeshUnderTest(tuple(dp_ranks), tuple(collects), mode)
    check_all(MESH_LAWS, subject, f"The mesh {list(dp_ranks)}")
