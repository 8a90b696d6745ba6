"""The coordinates of a rank in a tp × cp × dp × pp layout, without any parallel library.

Tensor parallelism is innermost, then context and data parallelism; pipeline parallelism is
outermost (the order of Megatron-core, arXiv 2104.04473):

    rank = tp + TP · (cp + CP · (dp + DP · pp))

Example: rank 6 of TP=2, CP=1, DP=2, PP=2. 6 = 0 + 2 · (0 + 1 · (1 + 2 · 1)), so tp=0, dp=1, pp=1.

The MEGATRON dispatch modes split by the `RankLayout` that the workers registered:

| mode | part of a rank | results from |
|---|---|---|
| MEGATRON_COMPUTE(_PROTO) | dp rank | tp 0, cp 0, last pp of each dp rank |
| MEGATRON_PP_AS_DP(_PROTO) | dp rank · pp size + pp rank | tp 0, cp 0 |
| MEGATRON_PP_ONLY | all ranks receive the same | one per pp stage: tp 0, cp 0, dp 0 |

Example: 8 ranks with tp=2, dp=2, pp=2. tp is innermost and pp outermost, and * marks the ranks
whose results are collected:

                     MEGATRON_COMPUTE        MEGATRON_PP_AS_DP
                     dp 0       dp 1         dp 0       dp 1
    stage 0  ranks   0  1       2  3         0* 1       2* 3
             part    0  0       1  1         0  0       2  2
    stage 1  ranks   4* 5       6* 7         4* 5       6* 7
             part    0  0       1  1         1  1       3  3

MEGATRON_PP_AS_DP joins parts 0, 1, 2, 3, which come from ranks 0, 4, 2, 6: the stages of one model
replica hold adjacent parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.errors import MeshError


@dataclass(frozen=True)
class RankLayout:
    """The coordinates of one rank and the sizes of the four dimensions."""

    tp_rank: int
    cp_rank: int
    dp_rank: int
    pp_rank: int
    tp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp", "pp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                got = f"got {name}_rank={rank} with {name}_size={size}."
                text = f"{name}_rank must lie in 0..{name}_size-1, {got}"
                raise MeshError(text, mesh_name="layout")

    @classmethod
    def of_rank(cls, rank: int, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> RankLayout:
        """Return the coordinates of `rank` with tp innermost and pp outermost.

        Raises `MeshError` unless 0 ≤ `rank` < tp · cp · dp · pp.
        """
        ranks = tp * cp * dp * pp
        if not 0 <= rank < ranks:
            sizes = f"tp={tp} × cp={cp} × dp={dp} × pp={pp} = {ranks} ranks"
            raise MeshError(f"Rank {rank} does not fit {sizes}.", mesh_name="layout")
        rest, tp_rank = divmod(rank, tp)
        rest, cp_rank = divmod(rest, cp)
        pp_rank, dp_rank = divmod(rest, dp)
        return cls(tp_rank, cp_rank, dp_rank, pp_rank, tp, cp, dp, pp)

    @property
    def is_first(self) -> bool:
        """Whether it is tp 0, cp 0."""
        return self.tp_rank == 0 and self.cp_rank == 0

    @property
    def is_first_of_last_stage(self) -> bool:
        """Whether it is tp 0, cp 0 of the last pipeline stage."""
        return self.is_first and self.pp_rank == self.pp_size - 1

    @property
    def is_first_of_stage(self) -> bool:
        """Whether it is tp 0, cp 0, dp 0."""
        return self.is_first and self.dp_rank == 0

    @property
    def pp_as_dp_rank(self) -> int:
        """`dp rank · pp size + pp rank`."""
        return self.dp_rank * self.pp_size + self.pp_rank

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(tp, cp, dp, pp)."""
        return self.tp_size, self.cp_size, self.dp_size, self.pp_size


@dataclass(frozen=True)
class GroupLayout:
    """The layouts of all ranks of a group, in the order of the ranks."""

    ranks: tuple[RankLayout, ...]

    @classmethod
    def of(cls, layouts: Sequence[RankLayout]) -> GroupLayout:
        """Raise MeshError if sizes differ or if two ranks have the same coordinates."""
        sizes = {layout.sizes for layout in layouts}
        if len(sizes) != 1:
            raise MeshError(
                f"The ranks registered different layouts (tp, cp, dp, pp): {sorted(sizes)}.",
                mesh_name="layout",
            )
        tp, cp, dp, pp = next(iter(sizes))
        if tp * cp * dp * pp != len(layouts) or len(set(layouts)) != len(layouts):
            raise MeshError(
                f"A layout of tp={tp} × cp={cp} × dp={dp} × pp={pp} needs {tp * cp * dp * pp} "
                f"ranks with different coordinates, got {len(layouts)} ranks with "
                f"{len(set(layouts))} different coordinates.",
                mesh_name="layout",
            )
        return cls(tuple(layouts))
