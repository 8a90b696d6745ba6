"""An update whose outputs are not finite is skipped by all ranks, and counted."""

import logging

import pytest
import torch

from quadriga.config import schema
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import NonFiniteError
from quadriga.protocol import DataProto, fields
from quadriga.workers.updates import update_policy, update_values

torch.set_num_threads(1)
ROWS, P, R = 4, 3, 4
ONE_STEP = schema.ActorConfig(ppo_micro_batch_size_per_gpu=2)
FOUR_STEPS = schema.ActorConfig(ppo_mini_batch_size=1)


def batch(*without: str) -> DataProto:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 9, (ROWS, P + R), generator=random)
    tensors = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: torch.ones_like(ids),
        fields.RESPONSE_MASK: torch.ones(ROWS, R, dtype=torch.int64),
        fields.ADVANTAGES: torch.randn(ROWS, R, generator=random),
        fields.OLD_LOG_PROBS: torch.full((ROWS, R), -2.0),
        fields.ROLLOUT_LOG_PROBS: torch.full((ROWS, R), -2.0),
        fields.VALUES: torch.zeros(ROWS, R),
        fields.RETURNS: torch.ones(ROWS, R),
    }
    return DataProto.from_dict({name: t for name, t in tensors.items() if name not in without})


class Engine(FSDPEngine):
    """The passes with gradient that `damaged` counts, from 0, return a factor of NaN."""

    def __init__(self, folder: str, *damaged: int, head: str = "lm", limit: int | None = 10):
        optim = schema.OptimConfig(lr=1e-3, max_skipped_steps=limit)
        super().__init__(
            schema.ModelConfig(path=folder), schema.EngineConfig(), optim, total_steps=9, head=head
        )
        self.damaged, self.passes = damaged, 0
        self.module.model.layers[-1].mlp.register_forward_hook(self._damage)

    def _damage(self, _module, _inputs, output):
        if not torch.is_grad_enabled():
            return output
        self.passes += 1
        return output * float("nan") if self.passes - 1 in self.damaged else output

    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.state_stream()])


def policy(engine: FSDPEngine, data: DataProto, config: schema.ActorConfig) -> dict[str, float]:
    report = update_policy(
        engine, data, config, responses_per_prompt=1, temperature=1.0, length_scale=R,
        data_ranks=1, seed=0,
    )  # fmt: skip
    return report.meta_info["metrics"]


@pytest.mark.parametrize("without", [(), (fields.OLD_LOG_PROBS,)], ids=["old given", "old taken"])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_nan_of_one_micro_batch_skips_the_step_of_the_policy(folder, caplog, without, loss):
    engine = Engine(folder, 1)
    before = engine.weights()
    config = schema.ActorConfig(
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=0.1,
        policy_loss=schema.PolicyLossConfig(name=loss),
    )
    with caplog.at_level(logging.WARNING):
        metrics = policy(engine, batch(*without), config)
    assert metrics["actor/skipped_steps"] == 1
    assert torch.equal(engine.weights(), before)
    (record,) = caplog.records
    assert "optimizer step is skipped" in record.message and "`log_probs` is nan" in record.message
    assert policy(engine, batch(*without), config)["actor/skipped_steps"] == 1
    assert not torch.equal(engine.weights(), before)


def test_the_metric_counts_the_steps_that_were_skipped_so_far(folder):
    """Not their mean over the optimizer steps of the update, which would be 0.75 here."""
    engine = Engine(folder, 1, 3)
    metrics = policy(engine, batch(), FOUR_STEPS)
    assert metrics["actor/optimizer_steps"] == 4
    assert metrics["actor/skipped_steps"] == engine.optimizer.skipped == 2


@pytest.mark.parametrize("name", [fields.ADVANTAGES, fields.OLD_LOG_PROBS])
def test_inputs_that_are_not_finite_are_refused(folder, name):
    """They do not come from this pass, and no later step would be better."""
    data = batch()
    data.batch[name][1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="is nan at row 1, token 2"):
        policy(Engine(folder), data, schema.ActorConfig())


def test_a_nan_skips_the_step_of_the_critic(folder):
    engine = Engine(folder, 0, head="value")
    before = engine.weights()

    def update() -> dict[str, float]:
        config = schema.CriticConfig()
        report = update_values(
            engine, batch(), config, responses_per_prompt=1, data_ranks=1, length_scale=R
        )
        return report.meta_info["metrics"]

    assert update()["critic/skipped_steps"] == 1
    assert torch.equal(engine.weights(), before)
    assert update()["critic/skipped_steps"] == 1
    assert not torch.equal(engine.weights(), before)
