"""Six steps equal three steps, a resume, and three more steps, bit for bit."""

import pytest
from run_cases import assert_equal_tensors, often, timeless

from quadriga.observability.jsonl import read_jsonl

ACTOR = "actor_rollout_ref.actor"

# Settings that together use every counter and every random number of a run.
VARIANTS = {
    "critic warm-up, shuffled, three epochs of two mini-batches, states on the host": (
        "algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true", "critic.warmup_steps=2",
        f"{ACTOR}.shuffle=true", f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=2", "critic.ppo_epochs=1",
        f"{ACTOR}.optim.lr_scheduler=cosine", f"{ACTOR}.optim.lr_warmup_steps=3",
        "critic.optim.lr_scheduler=linear",
        "actor_rollout_ref.model.gradient_checkpointing=selective",
        f"{ACTOR}.engine.offload_policy=true", "actor_rollout_ref.ref.engine.offload_policy=true",
        "critic.engine.optimizer_offload=true", f"{ACTOR}.engine.reduce_each_micro_batch=true",
    ),
    "prompts drawn again, adaptive KL in the reward": (
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill",
        "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.rollout.n=4", f"{ACTOR}.shuffle=true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", often(VARIANTS, next(iter(VARIANTS))))
def test_a_resumed_run_equals_an_uninterrupted_one(run, rule, tmp_path, variant) -> None:
    # Both runs have six steps, so that their schedules are equal.
    settings = [*VARIANTS[variant], rule, "trainer.total_training_steps=6", "trainer.save_freq=3",
                "data.shuffle=true"]  # fmt: skip
    whole, resumed = tmp_path / "run", tmp_path / "resumed"
    run(*settings)
    half = whole / "checkpoints" / "global_step_3"
    run(*settings, f"trainer.resume_mode={half}", f"trainer.default_local_dir={resumed}")
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = (timeless([*read_jsonl(folder / name)]) for folder in (whole, resumed))
        assert {row["step"] for row in theirs} == {4, 5, 6}
        assert theirs == [row for row in ours if row["step"] > 3], name
    for name in ("checkpoints/global_step_6", "model"):
        assert_equal_tensors(whole / name, resumed / name)
