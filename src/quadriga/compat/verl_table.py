"""What each setting of verl becomes. `verl_settings` applies the table.

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

LEAVE: Final = object()
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


def _section(
    verl: str, ours: str, *names: str, convert: Convert = same, **renamed: str
) -> dict[str, Row]:
    """Return the rows of a section: `names` are the same in both, `renamed` is verl's name=ours."""
    both = {name: name for name in names} | renamed
    return {f"{verl}.{name}": to(f"{ours}.{own}", convert=convert) for name, own in both.items()}


def _optim(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, convert=OPTIMIZER, optimizer="name"),
        **_section(verl, ours, "lr", "betas", "weight_decay", "min_lr_ratio"),
        **_section(verl, ours, "lr_warmup_steps", convert=positive),
        **_section(verl, ours, convert=positive, total_training_steps="total_steps"),
        **_section(verl, ours, lr_scheduler_type="lr_scheduler"),
        **_section(verl, ours, "lr_scheduler", warmup_style="lr_scheduler"),
        **_section(verl, ours, clip_grad="grad_clip"),
    }


def _engine(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "param_offload", "optimizer_offload", "offload_policy"),
        **_section(verl, ours, "reshard_after_forward", "fsdp_size"),
        **_section(verl, ours, "dtype", convert=DTYPE),
    }


def _megatron(verl: str, ours: str) -> dict[str, Row]:
    """Settings of verl's Megatron engine, which `strategy=megatron` reads only."""
    return {
        **_section(verl, ours, "param_offload", "optimizer_offload", "sequence_parallel"),
        **_section(
            verl,
            ours,
            tensor_model_parallel_size="tensor_parallel_size",
            pipeline_model_parallel_size="pipeline_parallel_size",
            virtual_pipeline_model_parallel_size="virtual_pipeline_parallel_size",
            context_parallel_size="context_parallel_size",
            expert_model_parallel_size="expert_parallel_size",
            expert_tensor_parallel_size="expert_tensor_parallel_size",
            use_distributed_optimizer="distributed_optimizer",
        ),
        **_section(verl, ours, "dtype", convert=DTYPE),
    }


def _model(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "path", "tokenizer_path", "trust_remote_code", "use_shm"),
        **_section(verl, ours, enable_gradient_checkpointing="gradient_checkpointing"),
        **_lora(verl, f"{ours}.lora"),
    }


def _lora(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, convert=positive, lora_rank="rank"),
        **_section(verl, ours, lora_alpha="alpha", lora_adapter_path="path"),
        **_section(verl, ours, "target_modules", "exclude_modules", convert=files),
    }


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REF, _ALGORITHM = "actor_rollout_ref.ref", "algorithm"
_LOSS = f"{_ACTOR}.policy_loss"
_CORRECTION = f"{_ALGORITHM}.rollout_correction"

_TRAINER = {
    **_section("trainer", "trainer", "nnodes", "n_gpus_per_node", "total_epochs"),
    **_section("trainer", "trainer", "total_training_steps", convert=positive),
    **_section("trainer", "trainer", "project_name", "experiment_name", "default_local_dir"),
    "trainer.logger": to("trainer.loggers", convert=trackers, left_out=other_loggers),
    **_section("trainer", "trainer", "test_freq", convert=frequency),
    **_section("trainer", "trainer", "device", convert=DEVICE),
    **_section("ray_kwargs.ray_init", "trainer", "num_cpus"),
    **_section("ray_init", "trainer", "num_cpus"),
}

TRAIN: dict[str, Row] = {
    **_section("data", "data", "train_files", "val_files", convert=files),
    **_section("data", "data", "prompt_key", "image_key", "train_batch_size", "val_batch_size"),
    **_section("data", "data", "max_prompt_length", "max_response_length", "shuffle", "seed"),
    **_section("data", "data", "filter_overlong_prompts"),
    **_model("actor_rollout_ref.model", "actor_rollout_ref.model"),
    **_optim(f"{_ACTOR}.optim", f"{_ACTOR}.optim"),
    **_section(_ACTOR, f"{_ACTOR}.optim", "grad_clip"),
    # verl's reference policy has the strategy of the actor, unless it is given.
    f"{_ACTOR}.strategy": to(f"{_ACTOR}.engine.name", f"{_REF}.engine.name", convert=STRATEGY),
    **_engine(f"{_ACTOR}.fsdp_config", f"{_ACTOR}.engine"),
    **_megatron(f"{_ACTOR}.megatron", f"{_ACTOR}.engine"),
    **_section(
        _ACTOR,
        f"{_ACTOR}.engine",
        "use_dynamic_bsz",
        ppo_max_token_len_per_gpu="max_tokens_per_micro_batch",
        ulysses_sequence_parallel_size="sequence_parallel_size",
    ),
    **_section(_ACTOR, _ACTOR, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"),
    **_section(_ACTOR, _ACTOR, "shuffle", "loss_agg_mode", "entropy_coeff", "use_kl_loss"),
    **_section(_ACTOR, _ACTOR, "kl_loss_coef", loss_scale_factor="loss_scale_length"),
    **_section(_ACTOR, _ACTOR, "kl_loss_type", convert=KL),
    # `clip_ratio` holds for a side whose own value is null, so the sides come after it.
    f"{_ACTOR}.clip_ratio": to(f"{_LOSS}.clip_ratio_low", f"{_LOSS}.clip_ratio_high"),
    **_section(_ACTOR, _LOSS, "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    **_section(_LOSS, _LOSS, convert=LOSS, loss_mode="name"),
    **_section(_ROLLOUT, _ROLLOUT, "name", convert=hugging_face),
    **_section(_ROLLOUT, _ROLLOUT, "n"),
    **_section(_ROLLOUT, f"{_ROLLOUT}.sampling", "temperature", "top_p", "top_k"),
    # verl ignores end tokens in validation too.
    f"{_ROLLOUT}.ignore_eos": to(
        f"{_ROLLOUT}.sampling.ignore_eos", f"{_ROLLOUT}.val_sampling.ignore_eos"
    ),
    **_section(_ROLLOUT, _ROLLOUT, "dtype", convert=DTYPE),
    **_section(f"{_ROLLOUT}.val_kwargs", _ROLLOUT, n="val_n"),
    **_section(
        f"{_ROLLOUT}.val_kwargs", f"{_ROLLOUT}.val_sampling", "temperature", "top_p", "top_k"
    ),
    **_section(_REF, f"{_REF}.engine", convert=STRATEGY, strategy="name"),
    **_engine(f"{_REF}.fsdp_config", f"{_REF}.engine"),
    **_megatron(f"{_REF}.megatron", f"{_REF}.engine"),
    **_section(
        _REF,
        f"{_REF}.engine",
        log_prob_use_dynamic_bsz="use_dynamic_bsz",
        log_prob_max_token_len_per_gpu="max_tokens_per_micro_batch",
        ulysses_sequence_parallel_size="sequence_parallel_size",
    ),
    **_model("critic.model", "critic.model"),
    **_optim("critic.optim", "critic.optim"),
    **_section("critic", "critic.optim", "grad_clip"),
    **_section("critic", "critic.engine", convert=STRATEGY, strategy="name"),
    **_megatron("critic.megatron", "critic.engine"),
    **_engine("critic.fsdp", "critic.engine"),
    **_engine("critic.model.fsdp_config", "critic.engine"),
    **_section(
        "critic",
        "critic.engine",
        "use_dynamic_bsz",
        ppo_max_token_len_per_gpu="max_tokens_per_micro_batch",
        ulysses_sequence_parallel_size="sequence_parallel_size",
    ),
    **_section("critic", "critic", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"),
    **_section("critic", "critic", "ppo_epochs", "cliprange_value", "loss_agg_mode"),
    **_section("trainer", "critic", critic_warmup="warmup_steps"),
    **_section(_ALGORITHM, _ALGORITHM, "adv_estimator", convert=ESTIMATOR),
    **_section(_ALGORITHM, _ALGORITHM, "gamma", "lam", "use_kl_in_reward"),
    **_section(_ALGORITHM, _ALGORITHM, norm_adv_by_std_in_grpo="norm_adv_by_std"),
    **_section(_ALGORITHM, _ALGORITHM, "kl_penalty", convert=KL),
    **_section("algorithm.kl_ctrl", "algorithm.kl_ctrl", "type", "kl_coef", "horizon", "target_kl"),
    **_section("algorithm.filter_groups", "algorithm.filter_groups", "enable"),
    **_section(
        "algorithm.filter_groups",
        "algorithm.filter_groups",
        "max_num_gen_batches",
        convert=positive,
    ),
    **_section(
        _CORRECTION,
        _CORRECTION,
        rollout_is="level",
        rollout_is_threshold="upper",
        rollout_is_batch_normalize="normalise",
    ),
    **_section("custom_reward_function", "reward", "path", "name"),
    **_section("reward.custom_reward_function", "reward", "path", "name"),
    **_TRAINER,
    **_section("trainer", "trainer", "save_freq", convert=frequency),
    **_section("trainer", "trainer", "val_before_train", "balance_batch"),
    **_section("trainer", "trainer", "resume_mode", convert=RESUME),
    **_section(
        "trainer",
        "trainer",
        resume_from_path="resume_mode",
        max_actor_ckpt_to_keep="max_ckpt_to_keep",
    ),
}
"""verl's `ppo_trainer.yaml` → `quadriga train`."""

SFT: dict[str, Row] = {
    **_section("data", "data", "train_files", "val_files", convert=files),
    **_section("data", "data", "prompt_key", "response_key", "train_batch_size", "max_length"),
    **_section("data", "data", "micro_batch_size_per_gpu"),
    **_section("data", "engine", "use_dynamic_bsz"),
    **_section("data", "engine", max_token_len_per_gpu="max_tokens_per_micro_batch"),
    **_section("model", "model", partial_pretrain="path"),
    **_model("model", "model"),
    **_optim("optim", "optim"),
    **_engine("engine", "engine"),
    **_engine("model.fsdp_config", "engine"),
    **_TRAINER,
    **_section("trainer", "trainer", "seed"),
}
"""verl's settings of fine-tuning → `quadriga sft`."""

GENERATE: dict[str, Row] = {
    **_section("model", "model", "path"),
    "data.path": to("data_files", convert=files),
    "data.train_files": to("data_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.n_samples": to("n"),
    "data.output_path": to("output"),
    "data.batch_size": to("batch_size"),
    **_section("rollout", "sampling", "temperature", "top_p", "top_k", "ignore_eos"),
    "rollout.prompt_length": to("max_prompt_length"),
    "rollout.response_length": to("max_response_length"),
    **_section("rollout", "rollout", "name", convert=hugging_face),
    **_section("rollout", "rollout", "dtype", convert=DTYPE),
    **_section("trainer", "trainer", "nnodes", "n_gpus_per_node"),
    **_section("trainer", "trainer", "device", convert=DEVICE),
    **_section("ray_kwargs.ray_init", "trainer", "num_cpus"),
}
"""verl's settings of generation → `quadriga generate`."""

EVAL: dict[str, Row] = {
    "data.path": to("response_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.response_key": to("response_key"),
    # These columns have fixed names in Quadriga.
    "data.data_source_key": to(convert=only("data_source")),
    "data.reward_model_key": to(convert=only("reward_model")),
    **_section("custom_reward_function", "reward", "path", "name"),
}
"""verl's settings of an evaluation → `quadriga eval`."""
