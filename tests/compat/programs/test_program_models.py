"""Programs that use verl's actors, critics, reward models and rollouts on engines of Quadriga."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.actor.dp_actor import DataParallelPPOActor
from verl.workers.actor.megatron_actor import MegatronPPOActor
from verl.workers.config import ActorConfig
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.critic.megatron_critic import MegatronPPOCritic
from verl.workers.reward_model.megatron import MegatronRewardModel
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.vllm_rollout import vLLMRollout

from quadriga.config.commands import RanksConfig
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import ConfigError
from quadriga.rollout import build_rollout

ACTOR = {"ppo_mini_batch_size": 2, "use_kl_loss": False, "ppo_micro_batch_size_per_gpu": 1}


def engine(folder, head="lm", lr=0.05):
    optim = OptimConfig(lr=lr) if lr else None
    return build_engine(ModelConfig(path=folder), EngineConfig(), optim, head=head, total_steps=4)


def batch():
    ids = torch.arange(5, 45).view(4, 10)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 4:]}
    data = DataProto.from_dict(tensors, meta_info={"temperature": 0.5, "micro_batch_size": 3})
    data.batch["attention_mask"][0, -2:] = 0
    return data


@pytest.mark.parametrize("names", ["dp", "megatron"])
def test_an_actor_learns_what_has_an_advantage(folder, names):
    held = engine(folder)
    given = {"actor_module": held, "actor_optimizer": None}
    if names == "dp":
        actor = DataParallelPPOActor(config=ACTOR, **given)
    else:
        actor = MegatronPPOActor(ACTOR, model_config=None, hf_config=None, tf_config=None, **given)
    data = batch()
    before, entropys = actor.compute_log_prob(data, calculate_entropy=True)
    assert before.shape == entropys.shape == (4, 6) and before[0, -2:].tolist() == [0.0, 0.0]
    assert actor.compute_log_prob(data)[1] is None
    data.batch["old_log_probs"] = before
    data.batch["advantages"] = torch.ones(4, 6) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    rows = data if names == "dp" else actor.make_minibatch_iterator(data)
    metrics = actor.update_policy(rows)
    assert held.optimizer_steps == 2 and "actor/loss" in metrics  # two rows each
    change = (actor.compute_log_prob(data)[0] - before).sum(-1)
    assert (change > 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize("names", ["dp", "megatron"])
def test_a_critic_learns_the_returns(folder, names):
    config, held = {"ppo_mini_batch_size": 4, "cliprange_value": 10.0}, engine(folder, "value")
    if names == "dp":
        critic = DataParallelPPOCritic(config, critic_module=held, critic_optimizer=None)
    else:
        critic = MegatronPPOCritic(config, None, None, None, critic_module=held)
    data = batch()
    data.batch["values"] = critic.compute_values(data)
    data.batch["returns"] = torch.ones(4, 6)
    assert data.batch["values"].shape == (4, 6) and critic.update_critic(data)
    assert critic.compute_values(data)[1:].mean() > data.batch["values"][1:].mean()


def test_a_reward_model_scores_the_last_token(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_labels=1, pad_token_id=0)
    plain = LlamaForSequenceClassification(config)
    plain.save_pretrained(tmp_path)
    module = engine(str(tmp_path), "score", lr=0)
    model = MegatronRewardModel({}, None, module, hf_config=None, tf_config=None)
    scores = model.compute_reward(batch()).batch["rm_scores"]
    assert scores.count_nonzero() == 4 and scores[0, 3] and scores[1:, 5].all()
    expected = plain(batch().batch["input_ids"][1:]).logits[:, 0]
    assert torch.allclose(scores[1:, 5], expected, atol=1e-4)


def test_a_rollout_generates_as_the_prompts_ask(folder):
    model = ModelConfig(path=folder)
    rollout = HFRollout(build_rollout("hf", model), {"temperature": 1.0, "response_length": 3})
    data = batch().select(batch_keys=["input_ids", "attention_mask"])
    data.batch["attention_mask"][:] = 1
    data.meta_info = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    first, again = rollout.generate_sequences(data), rollout.generate_sequences(data)
    assert first.batch["responses"].shape == (4, 3)
    assert torch.equal(first.batch["responses"], again.batch["responses"])
    data.meta_info = {"response_length": 5}
    assert rollout.generate_sequences(data, temperature=0.0).batch["input_ids"].shape == (4, 15)


def test_what_is_no_engine_is_refused(folder):
    for make, use in (
        (lambda: DataParallelPPOActor(ACTOR, torch.nn.Linear(1, 1)), "build_engine .* got Linear"),
        (lambda: DataParallelPPOActor(ACTOR, engine(folder), object()), "has its optimizer"),
        (lambda: HFRollout(torch.nn.Linear(1, 1), {}), "build_rollout, got Linear"),
        (lambda: vLLMRollout(folder, {}), "vllm"),
        (lambda: omega_conf_to_dataclass({"_target_": "os.getcwd"}), "not os.getcwd"),
        (lambda: omega_conf_to_dataclass({"a": 1}), "a class of verl as _target_"),
        (lambda: omega_conf_to_dataclass({"_target_": "verl.workers.config.No"}), "has no 'No'"),
        (lambda: omega_conf_to_dataclass({"nod": 1}, RanksConfig), "nod"),
        (lambda: omega_conf_to_dataclass({"a": 1}, int), "must be a dataclass"),
        (lambda: omega_conf_to_dataclass({"clip": 1}, ActorConfig), "no setting 'clip'"),
    ):
        with pytest.raises(ConfigError, match=use):
            make()


def test_sections_become_objects():
    kl = {"_target_": "verl.trainer.config.KLControlConfig", "kl_coef": 0.5}
    made = omega_conf_to_dataclass(
        {"_target_": "verl.trainer.config.AlgoConfig", "gamma": 0.9, "kl_ctrl": kl}
    )
    assert type(made) is AlgoConfig and (made.gamma, made.kl_ctrl.kl_coef) == (0.9, 0.5)
    assert omega_conf_to_dataclass({"clip_ratio": 0.3}, ActorConfig).clip_ratio == 0.3
    assert omega_conf_to_dataclass({"nnodes": 2}, RanksConfig) == RanksConfig(nnodes=2)
    assert omega_conf_to_dataclass({}, RanksConfig) == RanksConfig()
    assert (omega_conf_to_dataclass(None), omega_conf_to_dataclass(made)) == (None, made)
