"""The demo with an actor on Megatron-core, on two ranks: it learns what it learns with FSDP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.config.schema import DemoConfig
from quadriga.trainer.demo import DemoCommand, data_command, sft_command, train_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ENGINE = "actor_rollout_ref.actor.engine"
ON_CPU = """
from quadriga.testing import megatron_on_cpu

megatron_on_cpu.install()
"""


def run(command: DemoCommand, folder: Path, *more: str) -> None:
    # Two tensor-parallel ranks do not divide the three key heads of the demo's model.
    given = [s.replace("num_kv_heads=3", "num_kv_heads=2") for s in command.overrides]
    done = subprocess.run(
        [sys.executable, "-m", "quadriga.cli.main", *command.command.split(), *given, *more],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """The folder of the demo's data and of its model after the warm start."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("demo")
    (folder / "on_cpu.py").write_text(ON_CPU)
    for command in (data_command, sft_command):
        run(command(DemoConfig(), Path("demo")), folder)
    return folder


@pytest.mark.parametrize("size", ["tensor_parallel_size=2", "pipeline_parallel_size=2"])
def test_the_demo_learns_with_megatron(warm, size):
    run(
        train_command(DemoConfig(), Path("demo")), warm,
        "algorithm.user_files=[on_cpu.py]", f"{ENGINE}.name=megatron", f"{ENGINE}.{size}",
    )  # fmt: skip
    with open(warm / "demo" / "train" / "metrics.jsonl") as file:
        steps = [json.loads(line) for line in file]
    accuracy = [step["val/accuracy"] for step in steps if "val/accuracy" in step]
    assert accuracy[0] < 0.6
    assert accuracy[-1] > 0.9
