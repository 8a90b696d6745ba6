"""Commands that only show something, and runs that are refused, run no code of the user."""

import hashlib
import io
import re
import sys
from pathlib import Path

import pytest

from quadriga.algorithms import user_files
from quadriga.cli.main import main


@pytest.fixture
def ran(tmp_path, monkeypatch, restored_tables) -> Path:
    """A file that exists when code of the user has run."""
    monkeypatch.setattr(user_files, "_LOADED", {})
    return tmp_path / "ran"


def code(ran: Path, more: str = "") -> Path:
    file = ran.with_name("mine.py")
    file.write_text(f"open({str(ran)!r}, 'w').close()\n{more}\ndef compute_score(*a, **k): ...")
    return file


def settings_of(kind: str, ran: Path) -> list[str]:
    file, program = code(ran), ran.with_name("python")
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    rollout = "actor_rollout_ref.rollout"
    return {
        "user_files": [f"algorithm.user_files=[{file}]"],
        "reward": [f"reward.path={file}"],
        "agent": [f"agent.path={file}"],
        "part": [f"reward.parts={{a: {{path: {file}}}}}"],
        "python": [f"{rollout}.name=sglang", f"{rollout}.options={{python: {program}}}"],
    }[kind]


@pytest.mark.parametrize("kind", ["user_files", "reward", "agent", "part", "python"])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan"], "plan would run the code of"),
        (["train", "--print-config"], "train --print-config would run the code of"),
        (["train", "data.train_files=[absent.parquet]"], "absent.parquet|model.path"),
        (["train", "trainer.sed=1"], "no setting trainer.sed"),
        (["train", "trainer.seed=x"], "trainer.seed"),
    ],
)
def test_code_does_not_run(kind, words, problem, ran, capsys) -> None:
    """`train` is refused; the others say what they would run."""
    done = main([*words, *settings_of(kind, ran), "data.train_batch_size=8"])
    told = capsys.readouterr().err
    assert not ran.exists() and done == (0 if "would run" in problem else 2), told
    assert re.search(problem, told), told


ESTIMATOR = """
from quadriga.algorithms.advantages import register_advantage
@register_advantage("mine")
def mine(token_level_rewards_BT, response_mask_BT): return token_level_rewards_BT
"""


@pytest.mark.parametrize("answer", ["y\n", "\n"])
def test_a_plan_runs_code_that_is_allowed(answer, ran, capsys, monkeypatch) -> None:
    words = [
        "plan",
        f"algorithm.user_files=[{code(ran, ESTIMATOR)}]",
        "algorithm.adv_estimator=mine",
    ]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "mine.py was not run: see --allow-code" in told and not ran.exists(), told
    terminal = io.StringIO(answer)
    for stream in (terminal, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(words) == (0 if answer == "y\n" else 2), capsys.readouterr().err
    assert "Run it? [y/N]" in capsys.readouterr().err
    assert ran.exists() == (answer == "y\n")
    assert main([*words, "--allow-code"]) == 0 and ran.exists()


def test_a_run_says_whose_code_it_runs(ran, capsys) -> None:
    file = code(ran)
    absent = ["model.path=absent", "prompt=a"]
    (responses := file.parent / "own.jsonl").write_text('{"responses": 5}')
    words = ["eval", f"reward.path={file}", "response_files=[absent.jsonl]"]
    assert main(words) == 2 and not ran.exists()
    assert main([*words[:2], f"response_files=[{responses}]"]) == 2 and ran.exists()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    told = f"eval runs the code of {file} ({file.stat().st_size} bytes, sha256 {digest})"
    assert told in capsys.readouterr().err
    assert main(["generate", *absent]) == 2
    assert "runs the code" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["generate", *absent, "--allow-code"])
    assert "--allow-code: generate runs the code that its settings name" in capsys.readouterr().err
