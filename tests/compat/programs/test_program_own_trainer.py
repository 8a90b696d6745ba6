"""Subclasses of verl's trainer: a loop of one's own, and methods that nothing would call."""

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.ray_trainer import (
    AdvantageEstimator,
    RayPPOTrainer,
    compute_advantage,
    compute_response_mask,
)

from quadriga.errors import ConfigError


class LengthTrainer(RayPPOTrainer):
    """Rewards short responses, in a loop like that of verl."""

    def fit(self):
        n = self.config.actor_rollout_ref.rollout.n
        metrics: dict = {}
        for batch_dict in self.train_dataloader:
            self.global_steps += 1
            prompts = DataProto.from_single_dict(batch_dict)
            prompts.non_tensor_batch["uid"] = np.array([str(i) for i in range(len(prompts))])
            batch = prompts.repeat(repeat_times=n, interleave=True)
            batch.batch["sample_seed"] = torch.arange(len(batch))
            gen_batch = batch.pop(
                batch_keys=["input_ids", "attention_mask", "position_ids", "sample_seed"]
            )
            batch = batch.union(self.actor_rollout_wg.generate_sequences(gen_batch))
            batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
            assert torch.equal(compute_response_mask(batch), batch.batch["response_mask"])
            batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
            batch.batch["token_level_scores"] = self.score(batch)
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch = compute_advantage(batch, AdvantageEstimator.GRPO, num_repeat=n)
            output = self.actor_rollout_wg.update_actor(batch)
            assert isinstance(output, DataProto)
            self.actor_rollout_wg.sync_weights()
            metrics |= compute_data_metrics(batch, use_critic=self.use_critic)
            spans = {"gen": 1.0, "step": 2.0}
            metrics |= compute_timing_metrics(batch, spans)
            metrics |= compute_throughout_metrics(batch, spans, n_gpus=1)
            if self.global_steps >= self.total_training_steps:
                return reduce_metrics(metrics)

    def score(self, batch):
        mask = batch.batch["response_mask"]
        return (
            torch.nn.functional.one_hot(mask.sum(-1) - 1, mask.shape[-1])
            * -0.1
            * mask.sum(-1, keepdim=True)
        )


@pytest.mark.nightly
def test_a_loop_of_ones_own_in_a_subclass_of_the_trainer(cluster, settings):
    trainer = LengthTrainer(settings)
    assert trainer.tokenizer.pad_token_id is not None and trainer.val_dataloader is None
    try:
        trainer.init_workers()
        assert (trainer.use_critic, trainer.use_reference_policy) == (False, False)
        metrics = trainer.fit()
    finally:
        trainer.close()
    assert trainer.global_steps == trainer.total_training_steps == 1
    length = metrics["response_length/mean"]
    assert 1 <= length <= 6
    assert metrics["critic/score/mean"] == pytest.approx(-0.1 * length)
    assert metrics["perf/throughput"] == metrics["perf/total_num_tokens"] / 2


def test_a_method_of_a_trainer_whose_body_would_not_run_is_refused(settings):
    async def later(self, *args):
        pass

    for name in ("save", "make_validator", "end_step", "fit"):
        own = type("Own", (RayPPOTrainer,), {name: later})
        with pytest.raises(ConfigError, match=rf"Own\.{name} is a coroutine function, whose body"):
            own(settings)

    class Own(RayPPOTrainer):
        def schedule(self):  # a generator, as in the trainer
            yield from super().schedule()

        async def own_method(self):
            pass

    Own(settings).close()


@pytest.mark.parametrize(
    ("method", "use"),
    [
        ("_validate", "override make_validator"),
        ("_save_checkpoint", "override save"),
        ("_update_actor", "override the method of the worker class"),
        ("_compute_reward_colocate", "pass reward_fn"),
    ],
)
def test_a_method_that_nothing_would_call_is_refused(settings, method, use):
    own = type("Own", (RayPPOTrainer,), {method: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Own defines {method}, which .* does not call; {use}"):
        own(settings)
    with_loop = type("Own", (own,), {"fit": lambda self: None})
    trainer = with_loop(settings)
    assert (trainer.global_steps, trainer.kl_ctrl_in_reward.value) == (0, 0.001)
    trainer.close()
