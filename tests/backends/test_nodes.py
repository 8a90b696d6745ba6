"""Several nodes, simulated on this machine by Ray's own cluster for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def seen():
    program = Path(__file__).with_name("cluster_program.py")
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


def test_each_placement_group_lies_on_one_node(seen):
    assert seen["one node per group"] == [1, 1]


def test_ranks_go_by_node_also_in_a_part_of_an_uneven_pool(seen):
    assert seen["nodes of ranks"] == [0, 1, 1, 1]
    assert seen["local ranks"] == [0, 0, 1, 2]


def test_what_no_node_can_hold_is_refused_although_the_total_suffices(seen):
    assert "wants 4 processes on one node" in seen["too big for any node"]
    assert seen["packed over nodes"] == 5


def test_a_lost_node_is_noticed(seen):
    assert seen["lost node"][:2] == ["actor", "stuck_on"]
    assert seen["lost node is the doomed one"]
    assert seen["seconds"] < 10
    assert seen["alive"] == 3
