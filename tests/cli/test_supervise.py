"""`--supervise` starts a lost controller again, and leaves no process."""

import json
import subprocess
import sys

import pytest

CONTROLLER = """
import json, os, subprocess, sys, time
from pathlib import Path
folder, case = Path(sys.argv[1]), json.loads(sys.argv[2])
starts = folder / "starts"
starts.open("a").write(json.dumps(sys.argv[3:]) + "\\n")
number = len(starts.read_text().splitlines()) - 1
if "opens" in case:
    (folder / "config.yaml").write_text(str(number))
    saved = folder / "checkpoints" / f"global_step_{number}"
    saved.mkdir(parents=True)
    (saved / "COMPLETE.json").touch()
if "progress" in case:
    rows = [{"step": None}, {"step": "x"}, {"step": number}]
    (folder / "metrics.jsonl").open("a").writelines(json.dumps(row) + "\\n" for row in rows)
if "leaves" in case:
    words = [case["leaves"], "600"]
    left = subprocess.Popen(words, executable="/bin/sleep", start_new_session=True)
    (folder / "left").write_text(str(left.pid))
end = case["ends"][min(number, len(case["ends"]) - 1)]
if isinstance(end, str):
    os.kill(os.getpid(), int(end))
sys.exit(end)
"""
PROGRAM = """
import json, sys
from quadriga.cli import supervise
from quadriga.cli.main import parse
controller, folder, case = sys.argv[1:]
supervise.LEFT_S = json.loads(case).get("left_s", 0.1)
supervise.command = lambda words: [sys.executable, "-c", controller, folder, case, *words]
more = json.loads(case).get("settings", [])
invocation = parse(["train", "--supervise", f"trainer.default_local_dir={folder}", *more])
sys.exit(supervise.supervise(invocation))
"""
RESUMES = ["trainer.resume_mode=auto", "trainer.overwrite=false"]
CASES = {
    # how the controllers end → exit code, number of starts, settings of the last one
    "success": ({"ends": [0]}, 0, 1, []),
    "a signal without a name": ({"ends": ["35", 0]}, 0, 2, []),
    "wrong input": ({"ends": [2]}, 2, 1, []),
    "an error of the program": ({"ends": [1]}, 1, 1, []),
    "stopped": ({"ends": [143]}, 143, 1, []),
    "lost before it has opened its folder": ({"ends": ["9", 75, 0]}, 0, 3, []),
    "lost": ({"ends": [75, "9", 0], "opens": 1}, 0, 3, RESUMES),
    "no new step": ({"ends": ["9"], "opens": 1}, 137, 4, RESUMES),
    "new steps": ({"ends": [75, 75, 75, 75, 75, 0], "progress": 1,
                   "settings": ["trainer.restart_window_s=1e-6"]}, 0, 6, []),
    "none allowed": ({"ends": [75], "settings": ["trainer.max_restarts=0"]}, 75, 1, []),
    "a process is left": ({"ends": [75, 0], "leaves": "sleep"}, 0, 2, []),
    # They wait for a minute for Ray, which has ended, and leave nothing.
    "an agent of Ray is left": ({"ends": [75, 0], "leaves": "ray::RuntimeEnvAgent",
                                 "left_s": 999}, 0, 2, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_controller_that_is_lost_is_started_again(name, tmp_path):
    case, code, count, changes = CASES[name]
    command = [sys.executable, "-c", PROGRAM, CONTROLLER, str(tmp_path), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    starts = [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()]
    assert (done.returncode, len(starts)) == (code, count), done.stderr
    assert starts[-1][-2:] == (changes or starts[0][-2:]) and starts[0][0] == "train"
    assert done.stderr.count("it is not started again") == (name in ("no new step", "none allowed"))
    if "leaves" in case:
        gone = subprocess.run(["ps", "-p", (tmp_path / "left").read_text()], check=False)
        assert gone.returncode == 1
