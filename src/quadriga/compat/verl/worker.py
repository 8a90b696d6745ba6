"""verl's records of the place of a rank in a tp × dp × pp × cp layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistRankInfo:
    """Coordinates of a rank in a tp × dp × pp × cp layout."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Sizes of a tp × dp × pp × cp layout."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
