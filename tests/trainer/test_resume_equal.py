"""Six steps equal three steps, a resume, and three more steps, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ACTOR = "actor_rollout_ref.actor"
CRITIC = ("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")

# Settings that together use every counter and every random number of a run.
VARIANTS = {
    "critic, KL in the loss": CRITIC,
    "critic warm-up, shuffled, three epochs of two mini-batches": (
        *CRITIC, "critic.warmup_steps=2", f"{ACTOR}.shuffle=true", f"{ACTOR}.ppo_epochs=3",
        f"{ACTOR}.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=2", "critic.ppo_epochs=1",
        f"{ACTOR}.optim.lr_scheduler=cosine", f"{ACTOR}.optim.lr_warmup_steps=3",
        "critic.optim.lr_scheduler=linear",
    ),
    "Muon, selective checkpointing, states on the host": (
        *CRITIC, f"{ACTOR}.optim.name=muon", f"{ACTOR}.optim.momentum=0.9",
        "actor_rollout_ref.model.gradient_checkpointing=selective",
        f"{ACTOR}.engine.offload_policy=true", "actor_rollout_ref.ref.engine.offload_policy=true",
        "critic.engine.optimizer_offload=true", f"{ACTOR}.engine.reduce_each_micro_batch=true",
    ),
    "prompts drawn again, adaptive KL in the reward": (
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill",
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.rollout.n=4", f"{ACTOR}.shuffle=true", "reward.path={rule}",
    ),
}  # fmt: skip

RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 3 / 2
"""


def lines(path: Path, *, first: int) -> list[dict[str, object]]:
    """Return the rows of a file of steps from `first` on, without those that depend on time."""
    clocks = ("time/", "perf/", "progress/")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(clocks)}
        for row in rows
        if row["step"] >= first
    ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder: weights, moments and random states."""
    return {
        f"{file.relative_to(folder)}: {name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


NIGHTLY = ("critic, KL in the loss", "prompts drawn again, adaptive KL in the reward")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[pytest.mark.nightly] * (v in NIGHTLY)) for v in VARIANTS],
)
def test_a_resumed_run_equals_an_uninterrupted_one(run, tmp_path, variant) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)
    settings = [setting.format(rule=rule) for setting in VARIANTS[variant]]
    # Both runs have six steps, so that their schedules are equal.
    settings += ["trainer.total_training_steps=6", "trainer.save_freq=3", "data.shuffle=true"]
    whole, resumed = tmp_path / "run", tmp_path / "resumed"
    run(*settings)
    half = whole / "checkpoints" / "global_step_3"
    run(*settings, f"trainer.resume_mode={half}", f"trainer.default_local_dir={resumed}")
    for name in ("metrics.jsonl", "samples.jsonl"):
        steps = lines(resumed / name, first=0)
        assert {row["step"] for row in steps} == {4, 5, 6}
        assert steps == lines(whole / name, first=4), name
    for name in ("checkpoints/global_step_6", "model"):
        ours, theirs = tensors(whole / name), tensors(resumed / name)
        assert list(ours) == list(theirs) and len(ours) > 5
        unequal = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert unequal == [], name
