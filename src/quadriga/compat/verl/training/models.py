"""verl's classes of a model in one rank: actor, critic, reward model, rollout.

    actor = DataParallelPPOActor(config.actor_rollout_ref.actor, actor_module=engine)
    log_probs, entropys = actor.compute_log_prob(data, calculate_entropy=True)
    metrics = actor.update_policy(data)

`engine` is a training engine of `quadriga.engines.build_engine`, FSDP or Megatron, which has its
optimizer; a rollout is one of `quadriga.rollout.build_rollout`. As in verl, `config` is the section
of a worker, whose `ppo_mini_batch_size` counts rows of this rank.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.compat.verl.training.inputs import with_response_mask
from quadriga.compat.verl.training.run_settings import train_settings
from quadriga.compat.verl.training.workers import translated
from quadriga.compat.verl_settings import plain_values
from quadriga.config.schema import ActorConfig, CriticConfig, ModelConfig, RewardModelConfig
from quadriga.engines.base import ENTROPY, LOG_PROBS, VALUES, TrainEngine
from quadriga.errors import ConfigError
from quadriga.models.images import MultiModalRows
from quadriga.protocol import DataProto, fields
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine
from quadriga.workers import RewardModelWorker
from quadriga.workers.actor_rollout_ref import generate_batch, sampling_params
from quadriga.workers.method_fields import MODEL_INPUTS
from quadriga.workers.reward_model import same_tokens
from quadriga.workers.updates import shuffle_seed, update_policy, update_values


def engine_of(owner: object, module: object, optimizer: object = None) -> Any:
    """Return the training engine that a program passes. Raises `ConfigError` for anything else."""
    name = type(owner).__name__
    if not hasattr(module, "state_stream"):
        raise ConfigError(
            f"{name} needs a training engine of quadriga.engines.build_engine as its module, got "
            f"{type(module).__name__}"
        )
    if optimizer is not None:
        raise ConfigError(f"{name}: the engine has its optimizer; pass None", key="optimizer")
    return module


class _OnEngine:
    """A model with a training engine.

    `data.meta_info` may have `micro_batch_size` and `temperature`, as verl's workers set them.
    """

    engine: TrainEngine
    config: ActorConfig | CriticConfig

    def _forward(self, data: DataProto, **options: Any) -> Any:
        data = with_response_mask(data)
        size = data.meta_info.get("micro_batch_size", self.config.ppo_micro_batch_size_per_gpu)
        rows = {key: data.batch[key] for key in MODEL_INPUTS}
        dynamic = data.meta_info.get("use_dynamic_bsz", self.config.engine.use_dynamic_bsz)
        size = None if dynamic else size
        return self.engine.forward(rows, micro_batch_size=size, **options)


class DataParallelPPOActor(_OnEngine):
    """The policy: `actor_module` is its engine. Without an optimizer it is a reference policy."""

    def __init__(
        self, config: VerlConfig, actor_module: TrainEngine, actor_optimizer: object = None
    ) -> None:
        self.engine = self.actor_module = engine_of(self, actor_module, actor_optimizer)
        if not isinstance(config, ActorConfig):
            section = {"actor_rollout_ref": {"actor": plain_values(config)}}
            config = train_settings(section, tell=False).actor_rollout_ref.actor
        self.config = config

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities and the entropies [B, R] of the responses."""
        outputs = self._forward(
            data,
            temperature=data.meta_info.get("temperature", 1.0),
            entropy=calculate_entropy,
            images=MultiModalRows.of(data),
        )
        return outputs[LOG_PROBS], outputs.get(ENTROPY)

    def make_minibatch_iterator(self, data: DataProto) -> Iterator[DataProto]:
        """Yield the batch itself: `update_policy` makes the mini-batches."""
        yield data

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, Any]:
        """Update the policy with a batch or each batch of a loader. Return the last metrics."""
        config, metrics = self.config, dict[str, Any]()
        assert isinstance(config, ActorConfig)
        for rows in [data] if isinstance(data, DataProto) else data:
            metrics = update_policy(
                self.engine, with_response_mask(rows), config, responses_per_prompt=1,
                temperature=rows.meta_info.get("temperature", 1.0),
                length_scale=rows.batch[fields.RESPONSES].shape[1], data_ranks=1,
                seed=shuffle_seed(0, self.engine.optimizer_steps),
            ).meta_info["metrics"]  # fmt: skip
        return metrics


class DataParallelPPOCritic(_OnEngine):
    """The value model: `critic_module` is its engine."""

    def __init__(
        self, config: VerlConfig, critic_module: TrainEngine, critic_optimizer: object = None
    ) -> None:
        self.engine = self.critic_module = engine_of(self, critic_module, critic_optimizer)
        if not isinstance(config, CriticConfig):
            config = train_settings({"critic": plain_values(config)}, tell=False).critic
        self.config = config

    def compute_values(self, data: DataProto) -> Tensor:
        """Return the value before each response token, [B, R]."""
        return cast(Tensor, self._forward(data)[VALUES])

    def update_critic(self, data: DataProto) -> dict[str, Any]:
        """Update the value model. Return the metrics."""
        assert isinstance(self.config, CriticConfig)
        length = data.batch[fields.RESPONSES].shape[1]
        options: Any = {"responses_per_prompt": 1, "data_ranks": 1, "length_scale": length}
        data = with_response_mask(data)
        found = update_values(self.engine, data, self.config, **options).meta_info["metrics"]
        return dict(found)


class MegatronPPOActor(DataParallelPPOActor):
    """The same with verl's arguments for Megatron. The engine has the configs of the model."""

    def __init__(
        self, config: VerlConfig, model_config: object, hf_config: object, tf_config: object,
        actor_module: TrainEngine, actor_optimizer: object = None,
    ) -> None:  # fmt: skip
        super().__init__(config, actor_module, actor_optimizer)


class MegatronPPOCritic(DataParallelPPOCritic):
    """The same with verl's arguments for Megatron. The engine has the configs of the model."""

    def __init__(
        self, config: VerlConfig, model_config: object, hf_config: object, tf_config: object,
        critic_module: TrainEngine, critic_optimizer: object = None,
        critic_optimizer_config: object = None,
    ) -> None:  # fmt: skip
        super().__init__(config, critic_module, critic_optimizer)


class MegatronRewardModel(RewardModelWorker):
    """The reward model: `reward_model_module` is its engine, with the head "score".

    With two tokenizers, responses of `sft_tokenizer` are encoded again with `rm_tokenizer`.
    """

    def __init__(
        self, config: VerlConfig, model_config: object, reward_model_module: TrainEngine,
        hf_config: object, tf_config: object, sft_tokenizer: Any = None, rm_tokenizer: Any = None,
    ) -> None:  # fmt: skip
        size = setting(config, "micro_batch_size_per_gpu")
        self.config, self.longest = RewardModelConfig(micro_batch_size_per_gpu=size), None
        self.engine, self.role = engine_of(self, reward_model_module), "reward_model"
        self.tokenizer, self.policy_tokenizer = rm_tokenizer, sft_tokenizer or rm_tokenizer
        given = rm_tokenizer is not None
        self.pad = rm_tokenizer.pad_token_id if given else 0
        self.same_tokens = not given or same_tokens(rm_tokenizer, self.policy_tokenizer)

    def compute_reward(self, data: DataProto) -> DataProto:
        """Return `rm_scores` [B, R]: the score at the last response token, 0 elsewhere."""
        return self.compute_rm_score(data)


class HFRollout:
    """A rollout engine. `config`: the section `rollout` of verl."""

    def __init__(self, module: RolloutEngine, config: VerlConfig) -> None:
        if not isinstance(module, RolloutEngine) or not hasattr(module, "model"):
            raise ConfigError(
                f"{type(self).__name__} needs a rollout engine of quadriga.rollout.build_rollout, "
                f"got {type(module).__name__}"
            )
        self.inference_engine, self.model = module, module.model
        section = {"model": {"path": self.model.path}, "rollout": plain_values(config)}
        ours, _ = translated(section, "actor_rollout_ref")
        self.config, self.length = ours.actor_rollout_ref.rollout, ours.data.max_response_length

    def generate_sequences(self, prompts: DataProto, **options: Any) -> DataProto:
        """Sample one response per row.

        `options` and `prompts.meta_info` may have `do_sample=False` (greedy), `validate=True` (the
        sampling of the validation), `temperature`, `top_p`, `top_k` and `response_length`.
        """
        given = {**prompts.meta_info, **options}
        settings = self.config.val_sampling if given.get("validate") else self.config.sampling
        known = {key: given[key] for key in ("temperature", "top_p", "top_k") if key in given}
        if given.get("do_sample") is False:
            known = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
        length = given.get("response_length", self.length)
        sampling = sampling_params(replace(settings, **known), self.model, max_new_tokens=length)
        if fields.SAMPLE_SEED not in prompts.batch:
            seeds = torch.randint(2**62, (len(prompts),))
            prompts = prompts.select().union(DataProto.from_dict({fields.SAMPLE_SEED: seeds}))
        return generate_batch(self.inference_engine, prompts, sampling)


class vLLMRollout(HFRollout):
    """The engine vLLM with the weights of a model folder.

    `tokenizer` and `model_hf_config` are not read: the engine loads both from the folder.
    """

    def __init__(
        self, model_path: str, config: VerlConfig, tokenizer: object = None,
        model_hf_config: object = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(build_rollout("vllm", ModelConfig(path=model_path), **options), config)
