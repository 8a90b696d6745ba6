"""A rollout engine that holds adapters receives its base once, and then only the adapters."""

from dataclasses import replace

import pytest
import torch

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig, RolloutConfig
from quadriga.engines import build_engine
from quadriga.errors import ConfigError, WorkerError
from quadriga.models.adapters import is_stored_part, merged, stored_part
from quadriga.rollout import build_rollout, check_adapters, loads_adapters
from quadriga.rollout.base import RolloutEngine, tensor_digest
from quadriga.rollout.guard import GuardedRollout, probe_ids
from quadriga.testing import write_reference_model
from quadriga.weight_sync.remote import WeightReceiver, WeightSender
from quadriga.weight_sync.sync import WeightSync
from quadriga.weight_sync.transport import needs_of, trained_scores

RANK = 3


class HoldsAdapters(RolloutEngine):
    """The reference engine with A and B of each linear layer beside its weights."""

    name = "holds adapters"
    holds_adapters = True
    generate = None

    def __init__(self, folder):
        self.inner = build_rollout("hf", ModelConfig(path=folder), dtype="float32")
        self.base = {n: t.clone() for n, t in self.inner.module.state_dict().items()}
        self.adapters = {}
        for name, tensor in self.base.items():
            if "_proj.weight" in name:
                layer, (outputs, inputs) = name.removesuffix(".weight"), tensor.shape
                self.adapters[stored_part(layer, "lora_A")] = torch.zeros(RANK, inputs)
                self.adapters[stored_part(layer, "lora_B")] = torch.zeros(outputs, RANK)
        self.abilities = self.inner.abilities
        self.loses = ""

    @property
    def version(self):
        return self.inner.version

    def update_weights(self, stream, version):
        for name, tensor in stream:
            if not self.loses or self.loses not in name:
                (self.adapters if is_stored_part(name) else self.base)[name] = tensor.clone()
        whole = dict(self.base)
        for name in whole:
            a = self.adapters.get(stored_part(name.removesuffix(".weight"), "lora_A"))
            if a is not None:
                b = self.adapters[stored_part(name.removesuffix(".weight"), "lora_B")]
                whole[name] = merged(whole[name], a, b, 1.0)
        self.inner.update_weights(whole.items(), version)

    def score(self, ids, attention_mask):
        return self.inner.score(ids, attention_mask)

    def weights_digest(self):
        return {n: tensor_digest(t) for n, t in {**self.base, **self.adapters}.items()}

    def weight_dtypes(self):
        return {n: t.dtype for n, t in {**self.base, **self.adapters}.items()}


@pytest.fixture
def both(tmp_path):
    """A training engine with adapters on the attention, and the engine that holds them."""
    folder = str(tmp_path / "model")
    write_reference_model(folder)
    lora = LoraConfig(rank=RANK, alpha=7.0, target_modules=("q_proj", "k_proj", "down_proj"))
    config = ModelConfig(path=folder, lora=lora)
    yield build_engine(config, EngineConfig(), OptimConfig(lr=0.05)), HoldsAdapters(folder)


def step(trainer):
    ids = torch.arange(5, 65).view(3, 20)
    ones = torch.ones(3, 12, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": ones}
    trainer.train_step(batch, lambda out, rows: (-out["log_probs"].sum(), {}))


def agree(trainer, target, version):
    ids = probe_ids(target.abilities, version)
    found = target.score(ids, torch.ones_like(ids))[:, 1:]
    torch.testing.assert_close(
        found, trained_scores(trainer, target.abilities, version), atol=1e-4, rtol=0
    )
    assert target.version == version


class TestOneProcess:
    def test_the_base_is_sent_once_and_later_syncs_send_the_adapters(self, both):
        trainer, target = both
        assert needs_of(target).part == "unmerged"
        sync = WeightSync(trainer, target)
        first = sync.run(1)["local"]
        agree(trainer, target, 1)
        for version in (2, 3):
            before = trained_scores(trainer, target.abilities, version)
            step(trainer)
            moved = sync.run(version)
            agree(trainer, target, version)
            after = trained_scores(trainer, target.abilities, version)
            assert (after - before).abs().max() > 1e-3
            adapted = [n for n in trainer.module.state_dict() if "lora" in n]
            sent = sum(4 * trainer.module.get_parameter(n).numel() for n in adapted)
            assert moved == {"local": sent} and sent < first / 2

    @pytest.mark.parametrize("part", ["lora_A", "lora_B"])
    def test_an_adapter_that_is_lost_is_named(self, both, part):
        trainer, target = both
        sync = WeightSync(trainer, target)
        sync.run(1)
        step(trainer)
        target.loses = f"layers.1.self_attn.k_proj.{part}"
        with pytest.raises(WorkerError, match="differs between trainer and rollout") as raised:
            sync.run(2)
        assert raised.value.tensors == (stored_part("model.layers.1.self_attn.k_proj", part),)

    def test_an_engine_without_adapters_is_refused(self, both):
        trainer, target = both
        trainer._part = replace(trainer._part, adapter=None)
        with pytest.raises(ConfigError, match=r"the trained model has none; set model\.lora or"):
            WeightSync(trainer, target).run(1)


def test_buckets_to_another_process_have_the_adapters_only(both):
    trainer, target = both
    guard = GuardedRollout(target)
    receiver, sender = WeightReceiver(guard), WeightSender(trainer, 1 << 12)
    sizes = []
    for version in (1, 2, 3):
        step(trainer)
        for part in sender.send(needs_of(guard), version):
            receiver.receive([part])
        assert receiver.finish() == version
        agree(trainer, target, version)
        sizes.append(guard.moved["store"])
    assert sizes[1] == sizes[2] < sizes[0] / 2


ADAPTERS = LoraConfig(rank=8)


class TestSettings:
    @pytest.mark.parametrize(
        ("rollout", "lora", "expected"),
        [
            (RolloutConfig(name="vllm"), ADAPTERS, True),
            (RolloutConfig(name="vllm", load_adapters=True), ADAPTERS, True),
            (RolloutConfig(name="vllm", load_adapters=False), ADAPTERS, False),
            (RolloutConfig(name="vllm"), LoraConfig(), False),
            (RolloutConfig(name="vllm"), LoraConfig(rank=513), False),
            (RolloutConfig(name="vllm", options={"tensor_parallel_size": 2}), ADAPTERS, False),
            (RolloutConfig(name="hf"), ADAPTERS, False),
            (RolloutConfig(name="sglang"), ADAPTERS, False),
        ],
    )
    def test_an_engine_loads_adapters_if_it_can_and_the_settings_do_not_forbid_it(
        self, rollout, lora, expected
    ):
        assert loads_adapters(rollout, lora) == expected

    @pytest.mark.parametrize(
        ("rollout", "lora", "message"),
        [
            (RolloutConfig(load_adapters=False), LoraConfig(), "the model has no adapters; set"),
            (RolloutConfig(load_adapters=True), ADAPTERS, "needs rollout.name=vllm .* name=hf;"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, rollout, lora, message):
        with pytest.raises(ConfigError, match=message):
            check_adapters(rollout, lora)
