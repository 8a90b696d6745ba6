"""`worker_env`: environment variables of all ranks, or of each rank."""

from __future__ import annotations

import os

import pytest

from quadriga.errors import ConfigError
from quadriga.single_controller import Dispatch, Worker, register


class Reader(Worker):
    def __init__(self):
        super().__init__()
        self.at_start = os.environ.get("MINE")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self):
        return self.at_start, os.environ.get("MINE"), os.environ["RANK"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("worker_env", "values"),
    [
        ({"MINE": "all"}, ["all", "all", "all"]),
        ([{"MINE": "a"}, {}, {"MINE": "c"}], ["a", None, "c"]),
        (lambda rank: {"MINE": str(10 * rank)}, ["0", "10", "20"]),
    ],
    ids=["mapping", "list", "function"],
)
def test_variables_of_each_rank(start, worker_env, values):
    group = start(Reader, 3, worker_env=worker_env)
    assert group.read() == [(value, value, str(rank)) for rank, value in enumerate(values)]
    assert "MINE" not in os.environ


@pytest.mark.parametrize(
    ("worker_env", "words"),
    [
        ([{}, {}], "worker_env has 2 entries for 3 ranks"),
        ({"MINE": 1}, "worker_env of rank 0: .*'MINE': 1"),
        ({"WORLD_SIZE": "9"}, "worker_env of rank 0 has WORLD_SIZE, which the worker group sets"),
        (lambda rank: {"MINE": None} if rank == 2 else {}, "worker_env of rank 2"),
    ],
)
def test_wrong_variables_are_refused_before_the_start(start, worker_env, words):
    with pytest.raises(ConfigError, match=words):
        start(Reader, 3, worker_env=worker_env)
