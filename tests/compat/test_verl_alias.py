"""The distribution `packages/verl-alias`: `import verl` and `python -m verl.…` run on Quadriga."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_python

PACKAGE = Path(__file__).parents[2] / "packages" / "verl-alias"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder into which pip has installed the distribution, without a package index."""
    folder = tmp_path_factory.mktemp("alias")
    options = "--no-index --no-deps --no-build-isolation --disable-pip-version-check -q"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(folder)]
    # A copy, because setuptools writes its files beside the sources.
    copy = folder / "source"
    subprocess.run(["cp", "-r", str(PACKAGE), str(copy)], check=True)
    subprocess.run([*command, str(copy)], check=True, capture_output=True, timeout=120)
    return folder


def run(target, *arguments, status=0):
    env = {**os.environ, "PYTHONPATH": f"{target}:{os.environ.get('PYTHONPATH', '')}"}
    return run_python(*arguments, status=status, timeout=120, env=env)


def test_programs_import_verl_first(target):
    program = (
        "from verl import DataProto\n"
        "from verl.workers.fsdp_workers import ActorRolloutRefWorker\n"
        "import sys, verl, quadriga.compat.verl, quadriga.workers\n"
        "assert issubclass(ActorRolloutRefWorker, quadriga.workers.ActorRolloutRefWorker)\n"
        "print(DataProto.__module__, verl.__version__, type(sys.modules['verl']).__name__)"
    )
    done = run(target, "-c", program)
    assert done.stdout.split() == ["quadriga.protocol.dataproto", "0.9.1+quadriga", "AliasModule"]


def test_a_command_line_of_verl(target, tmp_path):
    module = ("-m", "verl.trainer.main_ppo")
    (tmp_path / "t.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    overrides = [
        f"data.train_files=[{tmp_path / 't.jsonl'}]", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.model.path=hf://owner/name", "critic.model.path=hf://owner/name",
    ]  # fmt: skip
    done = run(target, *module, "--cfg=job", *overrides)
    assert "train_batch_size: 1024" in done.stdout and "adv_estimator: gae" in done.stdout
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 6}\n")
    path = (f"--config-path={tmp_path}", "--config-name=mine")
    done = run(target, *module, *path, "--cfg", "job", *overrides)
    assert "train_batch_size: 6" in done.stdout
    done = run(target, *module, "data.train_batch_siz=4", status=2)
    assert done.stderr.count("\n") == 1
    assert "data.train_batch_size" in done.stderr
    done = run(target, "-m", "verl.trainer.main_eval", "data.path=x", status=1)
    assert "quadriga eval" in done.stderr
