"""One call of a worker method passes few files of the package."""

import json
import os
import subprocess
import sys

import pytest
from source_tree import ROOT

FILES = 12

sys.path.append(str(ROOT / "benchmarks"))
import call_path  # noqa: E402


@pytest.mark.nightly
def test_update_actor_passes_few_files():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/call_path.py", "--max", str(FILES)],
        capture_output=True, text=True, timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    path = json.loads(done.stdout)
    # The files of both sides are recorded.
    assert "single_controller/worker_group.py" in path["controller"]
    assert any(name.startswith("backends/ray/") for name in path["worker"])


@pytest.mark.parametrize("files", [FILES, FILES + 1])
def test_a_longer_path_is_an_error(monkeypatch, capsys, files):
    path = {"controller": ["a"] + [f"c{i}" for i in range(files - 2)], "worker": ["a", "w"]}
    monkeypatch.setattr(call_path, "call_path", lambda: path)
    monkeypatch.setattr(sys, "argv", ["call_path.py", "--max", str(FILES)])
    if files > FILES:
        with pytest.raises(SystemExit):
            call_path.main()
    else:
        call_path.main()
    assert json.loads(capsys.readouterr().out)["total"] == files
