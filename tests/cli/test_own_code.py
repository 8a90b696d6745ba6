"""Commands that only show something, and runs that are refused, run no code of the user."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path

import pytest

from quadriga.algorithms import user_files
from quadriga.cli.main import main

FILES = ("data.train_files=[absent.parquet]", "data.train_batch_size=8")


@pytest.fixture
def ran(tmp_path, monkeypatch, restored_tables) -> Path:
    """A file that exists when code of the user has run."""
    monkeypatch.setattr(user_files, "_LOADED", {})
    return tmp_path / "ran"


def code(ran: Path, more: str = "") -> Path:
    file = ran.with_name("mine.py")
    file.write_text(f"open({str(ran)!r}, 'w').close()\n{more}\ndef compute_score(*a, **k): ...")
    return file


def interpreter(ran: Path) -> Path:
    file = ran.with_name("python")
    file.write_text(f"#!/bin/sh\ntouch {ran}\n")
    file.chmod(0o755)
    return file


def settings_of(kind: str, ran: Path) -> list[str]:
    if kind == "python":
        options = f"actor_rollout_ref.rollout.options={{python: {interpreter(ran)}}}"
        return ["actor_rollout_ref.rollout.name=sglang", options]
    return [{"user_files": f"algorithm.user_files=[{code(ran)}]",
             "reward": f"reward.path={code(ran)}",
             "part": f"reward.parts={{a: {{path: {code(ran)}}}}}"}[kind]]  # fmt: skip


@pytest.mark.parametrize("kind", ["user_files", "reward", "part", "python"])
@pytest.mark.parametrize("words", [["plan"], ["train", "--print-config"], ["train"]])
def test_code_does_not_run(kind, words, ran, capsys) -> None:
    """`train` is refused for its missing data; the others say what they would run."""
    done = main([*words, *settings_of(kind, ran), *FILES])
    told = capsys.readouterr().err
    assert not ran.exists() and done == (2 if words == ["train"] else 0), told
    if words == ["train"]:
        assert "train_files: no such file" in told or "model.path" in told
    else:
        assert f"{' '.join(words)} would run the code of {ran.parent}" in told


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [("trainer.sed=1", "no setting trainer.sed"), ("trainer.seed=x", "trainer.seed")],
)
def test_a_setting_that_is_wrong_without_the_code_is_refused_before_it_runs(
    wrong, problem, ran, capsys
) -> None:
    assert main(["train", f"algorithm.user_files=[{code(ran)}]", wrong]) == 2
    assert problem in capsys.readouterr().err and not ran.exists()


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
    words = ["eval", f"reward.path={file}", "response_files=[absent.jsonl]"]
    assert main(words) == 2 and ran.exists()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    told = f"eval runs the code of {file} ({file.stat().st_size} bytes, sha256 {digest})"
    assert told in capsys.readouterr().err
    assert main(["generate", *absent]) == 2
    assert "runs the code" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["generate", *absent, "--allow-code"])
    assert "--allow-code: generate runs the code that its settings name" in capsys.readouterr().err
