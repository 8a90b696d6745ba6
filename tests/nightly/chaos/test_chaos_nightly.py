"""A minute of random programs with faults on three nodes ends without a violation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("chaos_run.py")


@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_chaos(tmp_path, seed):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, PROGRAM, "--seconds", "60", "--seed", str(seed), "--out", report],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    counts = json.loads(report.read_text())
    assert sum(counts["operations"].values()) > 100
    assert sum(counts["faults"].values()) > 3
    assert counts["violations"] == []
