"""What the tests of this folder share."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import rank_groups

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(count, main, *args)` runs `main(rank, *args, port)` in `count` processes."""
    return partial(rank_groups.run_ranks, wait_s=240)
