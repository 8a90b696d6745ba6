"""What each setting of verl becomes. `settings` applies the table.

A row is `verl's key → our key`, or several of ours. A conversion turns verl's value into ours; it
returns `LEAVE` for a value that stands for our default (-1 steps, null). A value of another type
than verl's stays as it is, so that the check of our settings refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

from quadriga.errors import ConfigError

Convert = Callable[[object], object]


class Leave:
    """The type of `LEAVE`."""


LEAVE: Final = Leave()
"""A converted value that is not written, so that our default holds."""


@dataclass(frozen=True)
class Row:
    """Our keys for one of verl's, and the conversion of its value.

    `left_out`: the parts of verl's value that the conversion drops.
    """

    keys: tuple[str, ...]
    convert: Convert
    left_out: Callable[[object], Sequence[str]]


def same(value: object) -> object:
    """Return the value; None stands for our default."""
    return LEAVE if value is None else value


def nothing(value: object) -> Sequence[str]:
    """Return no parts: the whole value is converted."""
    return ()


def to(
    *keys: str, convert: Convert = same, left_out: Callable[[object], Sequence[str]] = nothing
) -> Row:
    """Return a row of the table."""
    return Row(keys, convert, left_out)


def named(names: Mapping[object, object]) -> Convert:
    """Return a conversion of names; other names stay as they are."""
    return lambda value: names.get(value, value) if isinstance(value, str) else same(value)


def files(value: object) -> object:
    """A file or a list of files → a list."""
    return LEAVE if value is None else [value] if isinstance(value, str) else value


def positive(value: object) -> object:
    """A number of steps; -1 and 0 stand for our default."""
    return LEAVE if _is_integer(value) and value <= 0 else same(value)


def frequency(value: object) -> object:
    """Every so many steps; -1 (never) → 0 (only after the last step)."""
    return max(value, 0) if _is_integer(value) else same(value)


def only(name: str) -> Convert:
    """Return a conversion that accepts one name: a setting of verl that Quadriga has fixed."""

    def convert(value: object) -> object:
        if value not in (None, name):
            raise ConfigError(f"the column must have the name {name!r}, got {value!r}; rename it")
        return LEAVE

    return convert


def hugging_face(value: object) -> object:
    """The name of any rollout engine → "hf"."""
    return "hf" if isinstance(value, str) else same(value)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


KL = named({"kl": "k1", "mse": "k2", "kl+": "k1+", "mse+": "k2"})
DTYPE = named({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"})
DEVICE = named({"cuda": "auto"})
LOSS = named({"vanilla": "ppo_clip", "gspo": "gspo_token"})
ESTIMATOR = named({"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"})
OPTIMIZER = named({"AdamW": "adamw", "AdamW8bit": "adamw_8bit", "Muon": "muon"})
STRATEGY = named({"fsdp2": "fsdp"})
RESUME = named({"resume_path": LEAVE})  # then `resume_from_path` is the value
TRACKERS = {
    "console": "console",
    "file": "jsonl",
    "jsonl": "jsonl",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""verl's logger → our tracker."""


def _loggers(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, list | tuple) else []


def trackers(value: object) -> object:
    """Our trackers for verl's loggers. If we have none of them, our default holds."""
    names = _loggers(value)
    if not names:
        return same(value)
    return [TRACKERS[name] for name in map(str, names) if name in TRACKERS] or LEAVE


def other_loggers(value: object) -> Sequence[str]:
    """The loggers for which Quadriga has no tracker."""
    return [name for name in map(str, _loggers(value)) if name not in TRACKERS]


def _optim(verl: str, ours: str) -> dict[str, Row]:
    return {
        f"{verl}.optimizer": to(f"{ours}.name", convert=OPTIMIZER),
        f"{verl}.lr": to(f"{ours}.lr"),
        f"{verl}.betas": to(f"{ours}.betas"),
        f"{verl}.weight_decay": to(f"{ours}.weight_decay"),
        f"{verl}.lr_warmup_steps": to(f"{ours}.lr_warmup_steps", convert=positive),
        f"{verl}.total_training_steps": to(f"{ours}.total_steps", convert=positive),
        f"{verl}.min_lr_ratio": to(f"{ours}.min_lr_ratio"),
        f"{verl}.lr_scheduler_type": to(f"{ours}.lr_scheduler"),
        f"{verl}.lr_scheduler": to(f"{ours}.lr_scheduler"),
        f"{verl}.warmup_style": to(f"{ours}.lr_scheduler"),
        f"{verl}.clip_grad": to(f"{ours}.grad_clip"),
    }


def _engine(verl: str, ours: str) -> dict[str, Row]:
    return {
        f"{verl}.param_offload": to(f"{ours}.param_offload"),
        f"{verl}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{verl}.offload_policy": to(f"{ours}.offload_policy"),
        f"{verl}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
        f"{verl}.fsdp_size": to(f"{ours}.fsdp_size"),
        f"{verl}.dtype": to(f"{ours}.dtype", convert=DTYPE),
    }


def _megatron(verl: str, ours: str) -> dict[str, Row]:
    """Settings of verl's Megatron engine, which `strategy=megatron` reads only."""
    return {
        f"{verl}.param_offload": to(f"{ours}.param_offload"),
        f"{verl}.optimizer_offload": to(f"{ours}.optimizer_offload"),
        f"{verl}.tensor_model_parallel_size": to(f"{ours}.tensor_parallel_size"),
        f"{verl}.pipeline_model_parallel_size": to(f"{ours}.pipeline_parallel_size"),
        f"{verl}.virtual_pipeline_model_parallel_size": to(
            f"{ours}.virtual_pipeline_parallel_size"
        ),
        f"{verl}.context_parallel_size": to(f"{ours}.context_parallel_size"),
        f"{verl}.expert_model_parallel_size": to(f"{ours}.expert_parallel_size"),
        f"{verl}.expert_tensor_parallel_size": to(f"{ours}.expert_tensor_parallel_size"),
        f"{verl}.sequence_parallel": to(f"{ours}.sequence_parallel"),
        f"{verl}.use_distributed_optimizer": to(f"{ours}.distributed_optimizer"),
        f"{verl}.dtype": to(f"{ours}.dtype", convert=DTYPE),
    }


def _model(verl: str, ours: str) -> dict[str, Row]:
    return {
        f"{verl}.path": to(f"{ours}.path"),
        f"{verl}.tokenizer_path": to(f"{ours}.tokenizer_path"),
        f"{verl}.trust_remote_code": to(f"{ours}.trust_remote_code"),
        f"{verl}.enable_gradient_checkpointing": to(f"{ours}.gradient_checkpointing"),
        f"{verl}.use_shm": to(f"{ours}.use_shm"),
        **_lora(verl, f"{ours}.lora"),
    }


def _lora(verl: str, ours: str) -> dict[str, Row]:
    return {
        f"{verl}.lora_rank": to(f"{ours}.rank", convert=positive),
        f"{verl}.lora_alpha": to(f"{ours}.alpha"),
        f"{verl}.target_modules": to(f"{ours}.target_modules", convert=files),
        f"{verl}.exclude_modules": to(f"{ours}.exclude_modules", convert=files),
        f"{verl}.lora_adapter_path": to(f"{ours}.path"),
    }


_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"

_TRAINER = {
    "trainer.nnodes": to("trainer.nnodes"),
    "trainer.n_gpus_per_node": to("trainer.n_gpus_per_node"),
    "trainer.total_epochs": to("trainer.total_epochs"),
    "trainer.total_training_steps": to("trainer.total_training_steps", convert=positive),
    "trainer.project_name": to("trainer.project_name"),
    "trainer.experiment_name": to("trainer.experiment_name"),
    "trainer.default_local_dir": to("trainer.default_local_dir"),
    "trainer.logger": to("trainer.loggers", convert=trackers, left_out=other_loggers),
    "trainer.test_freq": to("trainer.test_freq", convert=frequency),
    "trainer.device": to("trainer.device", convert=DEVICE),
    "ray_kwargs.ray_init.num_cpus": to("trainer.num_cpus"),
    "ray_init.num_cpus": to("trainer.num_cpus"),
}

TRAIN: dict[str, Row] = {
    "data.train_files": to("data.train_files", convert=files),
    "data.val_files": to("data.val_files", convert=files),
    "data.prompt_key": to("data.prompt_key"),
    "data.image_key": to("data.image_key"),
    "data.train_batch_size": to("data.train_batch_size"),
    "data.val_batch_size": to("data.val_batch_size"),
    "data.max_prompt_length": to("data.max_prompt_length"),
    "data.max_response_length": to("data.max_response_length"),
    "data.filter_overlong_prompts": to("data.filter_overlong_prompts"),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("data.seed"),
    **_model("actor_rollout_ref.model", "actor_rollout_ref.model"),
    **_optim(f"{_ACTOR}.optim", f"{_ACTOR}.optim"),
    f"{_ACTOR}.grad_clip": to(f"{_ACTOR}.optim.grad_clip"),
    # verl's reference policy has the strategy of the actor, unless it is given.
    f"{_ACTOR}.strategy": to(f"{_ACTOR}.engine.name", f"{_REF}.engine.name", convert=STRATEGY),
    **_engine(f"{_ACTOR}.fsdp_config", f"{_ACTOR}.engine"),
    **_megatron(f"{_ACTOR}.megatron", f"{_ACTOR}.engine"),
    f"{_ACTOR}.use_dynamic_bsz": to(f"{_ACTOR}.engine.use_dynamic_bsz"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": to(f"{_ACTOR}.engine.max_tokens_per_micro_batch"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": to(f"{_ACTOR}.engine.sequence_parallel_size"),
    f"{_ACTOR}.ppo_mini_batch_size": to(f"{_ACTOR}.ppo_mini_batch_size"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": to(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    f"{_ACTOR}.ppo_epochs": to(f"{_ACTOR}.ppo_epochs"),
    f"{_ACTOR}.shuffle": to(f"{_ACTOR}.shuffle"),
    f"{_ACTOR}.loss_agg_mode": to(f"{_ACTOR}.loss_agg_mode"),
    f"{_ACTOR}.loss_scale_factor": to(f"{_ACTOR}.loss_scale_length"),
    f"{_ACTOR}.entropy_coeff": to(f"{_ACTOR}.entropy_coeff"),
    f"{_ACTOR}.use_kl_loss": to(f"{_ACTOR}.use_kl_loss"),
    f"{_ACTOR}.kl_loss_coef": to(f"{_ACTOR}.kl_loss_coef"),
    f"{_ACTOR}.kl_loss_type": to(f"{_ACTOR}.kl_loss_type", convert=KL),
    # `clip_ratio` holds for a side whose own value is null, so the sides come after it.
    f"{_ACTOR}.clip_ratio": to(
        f"{_ACTOR}.policy_loss.clip_ratio_low", f"{_ACTOR}.policy_loss.clip_ratio_high"
    ),
    f"{_ACTOR}.clip_ratio_low": to(f"{_ACTOR}.policy_loss.clip_ratio_low"),
    f"{_ACTOR}.clip_ratio_high": to(f"{_ACTOR}.policy_loss.clip_ratio_high"),
    f"{_ACTOR}.clip_ratio_c": to(f"{_ACTOR}.policy_loss.clip_ratio_c"),
    f"{_ACTOR}.policy_loss.loss_mode": to(f"{_ACTOR}.policy_loss.name", convert=LOSS),
    f"{_ROLLOUT}.name": to(f"{_ROLLOUT}.name", convert=hugging_face),
    f"{_ROLLOUT}.n": to(f"{_ROLLOUT}.n"),
    f"{_ROLLOUT}.temperature": to(f"{_ROLLOUT}.sampling.temperature"),
    f"{_ROLLOUT}.top_p": to(f"{_ROLLOUT}.sampling.top_p"),
    f"{_ROLLOUT}.top_k": to(f"{_ROLLOUT}.sampling.top_k"),
    # verl ignores end tokens in validation too.
    f"{_ROLLOUT}.ignore_eos": to(
        f"{_ROLLOUT}.sampling.ignore_eos", f"{_ROLLOUT}.val_sampling.ignore_eos"
    ),
    f"{_ROLLOUT}.dtype": to(f"{_ROLLOUT}.dtype", convert=DTYPE),
    f"{_ROLLOUT}.val_kwargs.n": to(f"{_ROLLOUT}.val_n"),
    f"{_ROLLOUT}.val_kwargs.temperature": to(f"{_ROLLOUT}.val_sampling.temperature"),
    f"{_ROLLOUT}.val_kwargs.top_p": to(f"{_ROLLOUT}.val_sampling.top_p"),
    f"{_ROLLOUT}.val_kwargs.top_k": to(f"{_ROLLOUT}.val_sampling.top_k"),
    f"{_REF}.strategy": to(f"{_REF}.engine.name", convert=STRATEGY),
    **_engine(f"{_REF}.fsdp_config", f"{_REF}.engine"),
    **_megatron(f"{_REF}.megatron", f"{_REF}.engine"),
    f"{_REF}.log_prob_use_dynamic_bsz": to(f"{_REF}.engine.use_dynamic_bsz"),
    f"{_REF}.log_prob_max_token_len_per_gpu": to(f"{_REF}.engine.max_tokens_per_micro_batch"),
    f"{_REF}.ulysses_sequence_parallel_size": to(f"{_REF}.engine.sequence_parallel_size"),
    **_model("critic.model", "critic.model"),
    **_optim("critic.optim", "critic.optim"),
    "critic.grad_clip": to("critic.optim.grad_clip"),
    "critic.strategy": to("critic.engine.name", convert=STRATEGY),
    **_megatron("critic.megatron", "critic.engine"),
    **_engine("critic.fsdp", "critic.engine"),
    **_engine("critic.model.fsdp_config", "critic.engine"),
    "critic.use_dynamic_bsz": to("critic.engine.use_dynamic_bsz"),
    "critic.ppo_max_token_len_per_gpu": to("critic.engine.max_tokens_per_micro_batch"),
    "critic.ulysses_sequence_parallel_size": to("critic.engine.sequence_parallel_size"),
    "critic.ppo_mini_batch_size": to("critic.ppo_mini_batch_size"),
    "critic.ppo_micro_batch_size_per_gpu": to("critic.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_epochs": to("critic.ppo_epochs"),
    "critic.cliprange_value": to("critic.cliprange_value"),
    "critic.loss_agg_mode": to("critic.loss_agg_mode"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "algorithm.adv_estimator": to("algorithm.adv_estimator", convert=ESTIMATOR),
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": to("algorithm.lam"),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std"),
    "algorithm.use_kl_in_reward": to("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": to("algorithm.kl_penalty", convert=KL),
    "algorithm.kl_ctrl.type": to("algorithm.kl_ctrl.type"),
    "algorithm.kl_ctrl.kl_coef": to("algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_ctrl.horizon"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_ctrl.target_kl"),
    "algorithm.filter_groups.enable": to("algorithm.filter_groups.enable"),
    "algorithm.filter_groups.max_num_gen_batches": to(
        "algorithm.filter_groups.max_num_gen_batches", convert=positive
    ),
    "algorithm.rollout_correction.rollout_is": to("algorithm.rollout_correction.level"),
    "algorithm.rollout_correction.rollout_is_threshold": to("algorithm.rollout_correction.upper"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": to(
        "algorithm.rollout_correction.normalise"
    ),
    "custom_reward_function.path": to("reward.path"),
    "custom_reward_function.name": to("reward.name"),
    "reward.custom_reward_function.path": to("reward.path"),
    "reward.custom_reward_function.name": to("reward.name"),
    **_TRAINER,
    "trainer.save_freq": to("trainer.save_freq", convert=frequency),
    "trainer.val_before_train": to("trainer.val_before_train"),
    "trainer.resume_mode": to("trainer.resume_mode", convert=RESUME),
    "trainer.resume_from_path": to("trainer.resume_mode"),
    "trainer.max_actor_ckpt_to_keep": to("trainer.max_ckpt_to_keep"),
    "trainer.balance_batch": to("trainer.balance_batch"),
}
"""verl's `ppo_trainer.yaml` → `quadriga train`."""

SFT: dict[str, Row] = {
    "data.train_files": to("data.train_files", convert=files),
    "data.val_files": to("data.val_files", convert=files),
    "data.prompt_key": to("data.prompt_key"),
    "data.response_key": to("data.response_key"),
    "data.train_batch_size": to("data.train_batch_size"),
    "data.micro_batch_size_per_gpu": to("data.micro_batch_size_per_gpu"),
    "data.max_length": to("data.max_length"),
    "data.max_token_len_per_gpu": to("engine.max_tokens_per_micro_batch"),
    "data.use_dynamic_bsz": to("engine.use_dynamic_bsz"),
    "model.partial_pretrain": to("model.path"),
    **_lora("model", "model.lora"),
    **_model("model", "model"),
    **_optim("optim", "optim"),
    **_engine("engine", "engine"),
    **_engine("model.fsdp_config", "engine"),
    **_TRAINER,
    "trainer.seed": to("trainer.seed"),
}
"""verl's settings of fine-tuning → `quadriga sft`."""

GENERATE: dict[str, Row] = {
    "model.path": to("model.path"),
    "data.path": to("data_files", convert=files),
    "data.train_files": to("data_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.n_samples": to("n"),
    "data.output_path": to("output"),
    "data.batch_size": to("batch_size"),
    "rollout.temperature": to("sampling.temperature"),
    "rollout.top_p": to("sampling.top_p"),
    "rollout.top_k": to("sampling.top_k"),
    "rollout.ignore_eos": to("sampling.ignore_eos"),
    "rollout.prompt_length": to("max_prompt_length"),
    "rollout.response_length": to("max_response_length"),
    "rollout.name": to("rollout.name", convert=hugging_face),
    "rollout.dtype": to("rollout.dtype", convert=DTYPE),
    "trainer.nnodes": to("trainer.nnodes"),
    "trainer.n_gpus_per_node": to("trainer.n_gpus_per_node"),
    "trainer.device": to("trainer.device", convert=DEVICE),
    "ray_kwargs.ray_init.num_cpus": to("trainer.num_cpus"),
}
"""verl's settings of generation → `quadriga generate`."""

EVAL: dict[str, Row] = {
    "data.path": to("response_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.response_key": to("response_key"),
    # These columns have fixed names in Quadriga.
    "data.data_source_key": to(convert=only("data_source")),
    "data.reward_model_key": to(convert=only("reward_model")),
    "custom_reward_function.path": to("reward.path"),
    "custom_reward_function.name": to("reward.name"),
}
"""verl's settings of an evaluation → `quadriga eval`."""
