"""The demo with an actor on Megatron-core, on two ranks: it learns what it learns with FSDP."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatron_on_cpu
from processes import accuracies, quadriga
from quadriga.cli.demo import DemoCommand, data_command, sft_command, train_command
from quadriga.config.commands import DemoConfig

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ENGINE = "actor_rollout_ref.actor.engine"


def run(command: DemoCommand, folder: Path, *more: str) -> None:
    quadriga(*command.command.split(), *command.overrides, *more, cwd=folder)


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """The folder of the demo's data and of its model after the warm start."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("demo")
    (folder / "on_cpu.py").write_text(megatron_on_cpu.USER_FILE)
    for command in (data_command, sft_command):
        run(command(DemoConfig(), Path("demo")), folder)
    return folder


def with_each_key_head_twice(source: Path, target: Path) -> None:
    """Write a model that computes the same: two tensor-parallel ranks do not divide the three key
    heads of the demo's model."""
    shutil.copytree(source, target)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    state, config = model.state_dict(), copy.deepcopy(model.config)
    heads = config.num_key_value_heads
    for name in state:
        if ".k_proj." in name or ".v_proj." in name:
            rows = state[name].unflatten(0, (heads, -1))
            state[name] = rows.repeat_interleave(2, 0).flatten(0, 1)
    config.num_key_value_heads = 2 * heads
    doubled = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    doubled.load_state_dict(state)
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(doubled(ids).logits, model(ids).logits)
    doubled.save_pretrained(target)


@pytest.mark.parametrize("size", ["tensor_parallel_size=2", "pipeline_parallel_size=2"])
def test_the_demo_learns_with_megatron(warm, size):
    doubled = Path("demo") / "doubled"
    if size.startswith("tensor"):
        with_each_key_head_twice(warm / "demo" / "sft" / "model", warm / doubled)
    own = [f"actor_rollout_ref.model.path={doubled}"] if size.startswith("tensor") else []
    run(
        train_command(DemoConfig(), Path("demo")), warm, *own,
        f"trainer.default_local_dir=demo/{size}",
        "algorithm.user_files=[on_cpu.py]", f"{ENGINE}.name=megatron", f"{ENGINE}.{size}",
    )  # fmt: skip
    accuracy = accuracies(warm / "demo" / size)
    print(size, accuracy)
    assert accuracy[0] < 0.6
    assert accuracy[-1] > 0.9
