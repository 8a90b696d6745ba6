"""A tiny task and a tiny model, for complete runs of a few steps."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_cases import RULE, Task, metrics_of_run, two_steps

from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.loading import load_config
from quadriga.trainer import record

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def pictures() -> None:
    """The runs of a test draw their learning curve and write their report."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take a third of the time of a run of two steps."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(record, "plot_learning_curve", lambda *_, **__: False)
        monkeypatch.setattr(record, "write_report", lambda *_: None)


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    from quadriga.cli.make_data import run_make_data

    folder = tmp_path_factory.mktemp("task")
    settings = [
        f"output={folder / 'data'}", f"model_output={folder / 'base'}", "train_size=64",
        "val_size=16", "sft_size=64", "max_number=5", "hidden_size=32", "num_layers=2",
        "num_heads=2", "intermediate_size=64",
    ]  # fmt: skip
    run_make_data(load_config(ArithmeticDataConfig, settings))
    return Task(folder)


@pytest.fixture
def train_overrides(tiny_task: Task, tmp_path: Path) -> list[str]:
    """Settings of two steps of eight prompts with two responses each, on the local backend."""
    return two_steps(tiny_task, tmp_path)


@pytest.fixture(scope="session")
def rule(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting of a reward that differs from response to response."""
    file = tmp_path_factory.mktemp("rule") / "rule.py"
    file.write_text(RULE)
    return f"reward.path={file}"


@pytest.fixture
def run(train_overrides: list[str]):
    """run("a=b", …) trains with these settings and returns the metrics of each step."""
    return lambda *more: metrics_of_run([*train_overrides, *more])


@pytest.fixture
def refused_command(capsys, monkeypatch):
    """refused_command("sft", "a=b", …) returns the error that it prints; no worker is built.

    `runs`: the files of the user whose code it says it runs, in the line before the error.
    """
    import quadriga.rollout
    import quadriga.single_controller.worker as worker
    from quadriga.cli.main import main
    from quadriga.cli.own_code import described

    def no_worker(*_args, **_kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "__init__", no_worker)
    monkeypatch.setattr(quadriga.rollout.Rollout, "build", no_worker)

    def _refused(*words: str, runs: Sequence[str] = ()) -> str:
        code = main(list(words))
        *told, error = capsys.readouterr().err.strip().splitlines()
        expected = [f"{words[0]} runs the code of {described(list(runs))}"] if runs else []
        assert code == 2 and told == expected, [*told, error]
        return error

    return _refused


@pytest.fixture
def refused(refused_command, train_overrides, tmp_path):
    """refused("a=b", …) returns the error that `quadriga train` prints; no worker is built."""

    def _refused(*more: str, runs: Sequence[str] = ()) -> str:
        error = refused_command("train", *train_overrides, *more, runs=runs)
        assert not (tmp_path / "run").exists()
        return error

    return _refused
