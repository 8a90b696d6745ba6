"""Rules of verl's settings that depend on several settings, and the settings that must be off.

REFUSED          patterns of keys → the values that Quadriga computes as verl does
is_of_verl       whether a version of verl has a key, though not every file of it
check_together   settings that contradict each other
without_effect   settings that verl itself does not read beside the others
converted        values whose unit depends on other settings
implied          settings of ours that follow from several of verl's
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final

from quadriga.errors import ConfigError

Given = Mapping[str, object]
"""Dotted key of verl → value other than null."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REF, _RM = "actor_rollout_ref.ref", "reward_model"
_OFF: Final[tuple[object, ...]] = (False, 0, -1, "", "disabled", {}, [])
_AGAIN = "Quadriga computes the log-probabilities again"
_ONE = "Quadriga generates one response per prompt; leave it off"
_FUNCTION = "reward.path names a file with a function of yours, which scores one response"
_CLASS = "write the class in Quadriga's form (docs/concepts/prompts.md), and set data."
_SYNC = "leave it at sync; trainer.max_staleness of Quadriga lets generation go on in an update"
_MANAGERS = (("naive", "dapo", "prime"), _FUNCTION)

_OFF_BY_REMEDY = {
    _ONE: "*.multi_turn.enable *.agent_loop_config_path data.*tool*_path",
    _AGAIN: "*.rollout_correction.bypass_mode *.use_rollout_log_probs",
    "the reference computes with experts of its own": f"{_REF}.router_replay.mode",
    "it is for Megatron, whose engine has no adapters; set model.lora_rank and strategy=fsdp2":
        "*model.lora.rank",
    "algorithm.user_files=[FILE.py] runs a file of yours in every process":
        "*.external_lib *.custom_async_server.path",
    "Quadriga has no distillation loss; remove it": "distillation.enabled",
    "Quadriga has no reweighting of samples; remove it": "algorithm.use_pf_ppo",
    "set rollout_is, and beside it algorithm.rollout_correction.mode=mask of Quadriga":
        "*.rollout_correction.rollout_rs algorithm.rollout_is_veto_threshold",
    "set algorithm.rollout_correction.rollout_is=token and rollout_is_threshold":
        "algorithm.rollout_is algorithm.rollout_is_threshold *.tis_imp_ratio_cap",
    "validate a model with `quadriga eval`": "trainer.val_only",
    "checkpoints are written to trainer.default_local_dir; copy them from there":
        "trainer.checkpoint_callback_class",
    "set trainer.max_actor_ckpt_to_keep, after which old checkpoints are deleted":
        "trainer.del_local_ckpt_after_load",
    f"{_CLASS}dataset.path and name": "data.datagen.path",
    f"{_CLASS}sampler.path and name": "data.sampler.class_path *.custom_sampler.path",
    "write a file with the rows that the run is to have":
        "data.train_max_samples data.val_max_samples",
    "Quadriga generates the responses of each step, and waits for all of them":
        "*skip*.enable *.skip_rollout *.over_sample_rate",
    "remove it: the rollout computes with the weights of the actor, which are not quantised":
        f"{_ROLLOUT}.quantization *.qat.enable *.disaggregation.enabled *.mtp.enable",
    "write it into the model's folder: chat_template.jinja, config.json, preprocessor_config.json":
        "*.custom_chat_template *.hf_config_path *.override_config.* data.mm_processor_kwargs*",
    "Quadriga adds no loss of the router": "*.override_transformer_config.*_loss_coeff",
    "set lr, betas and weight_decay, or optim.eps of Quadriga": "*.override_optimizer_config.*",
    "it counts sequences over all ranks; set the same key with _per_gpu at its end":
        "*.ppo_micro_batch_size *.log_prob_micro_batch_size *.forward_micro_batch_size "
        "reward_model.micro_batch_size data.micro_batch_size",
    "the reward model reads whole conversations": "reward_model.max_length",
    _FUNCTION: "*sandbox_fusion.url *custom_reward_function.reward_kwargs*",
}  # fmt: skip

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    **{key: (_OFF, why) for why, keys in _OFF_BY_REMEDY.items() for key in keys.split()},
    "*.agent.default_agent_loop": (("single_turn_agent",), _ONE),
    "trainer.v1.trainer_mode": (("sync",), _SYNC),
    "async_training.*": ((), _SYNC),
    f"{_ACTOR}.router_replay.mode": (("disabled", "R3"), "experts are those of the rollout: R3"),
    "actor_rollout_ref.hybrid_engine": (
        (True,),
        "remove it, and give the rollout ranks of its own: placement.actor, placement.rollout",
    ),
    f"{_ROLLOUT}.nnodes": (_OFF, "give the rollout ranks of its own with placement.rollout=[…]"),
    f"{_ROLLOUT}.do_sample": ((True,), "set the temperature"),
    "algorithm.filter_groups.metric": (
        ("acc", "score", "reward", "seq_reward"),
        "groups are compared by the scores of the reward function; set it to seq_reward",
    ),
    "*.optim.optimizer": (("AdamW", "adam"), "Quadriga trains with AdamW; remove it"),
    "data.reward_fn_key": (("data_source",), "the column is called data_source; rename it"),
    "reward_model.reward_manager": _MANAGERS,
    "reward.reward_manager.name": _MANAGERS,
    "reward.reward_manager.source": (("register",), _FUNCTION),
    "reward_model.reward_loop_source": (("register",), _FUNCTION),
}
"""Patterns of keys → (the values that change nothing, why others are refused and what to write)."""

_HARMLESS = (
    "*.override_config.max_position_embeddings",  # longer rows than the model's window are refused
    "*.override_config.attn_implementation",
    "*.override_optimizer_config.*offload*",
    "*.override_optimizer_config.overlap*",
    "*.override_optimizer_config.use_precision_aware_optimizer",
)
"""Keys that a pattern of `REFUSED` does not mean."""

_SECTIONS = """
    actor_rollout_ref actor_rollout_ref.actor actor_rollout_ref.ref critic reward_model reward
    data reward.reward_model algorithm trainer *.optim *.fsdp_config *.fsdp *.megatron *.rollout
    *.model *.policy_loss
    """
_NAMES = """
    *nsight_options* agent.* audio_key calculate_* calculate_log_probs chat_scheduler
    checkpoint.* checkpoint_engine.* clip_cov_* cudagraph_* data_loader_seed
    data_parallel_size datagen.* dataloader_num_workers disable_log_stats disaggregation.*
    dist_* distrib_* do_sample dro_beta dtype dynamic_context_parallel enable
    enable_activation_offload enable_chunked_prefill enable_prefix_caching enable_resource_pool
    enable_rollout_routing_replay enforce_eager engine_kwargs.* entropy_* esi_redundant_time
    exp_avg_* expert_parallel_size extra.* filter_groups.* filter_overlong_prompts_workers
    forward_max_token_len_per_gpu forward_micro_batch_size_per_gpu forward_only forward_prefetch
    free_cache_engine full_determinism fused_kernel_options.* gdpo_* gen_batch_size
    gpu_memory_utilization grad_offload image_patch_size input_tokenizer kl_cov_ratio
    launch_reward_fn_async layered_summon limit_images load_format load_weight log_prob_*
    log_val_generations logprobs_mode lora.* loss_scale_factor lr_decay_steps lr_warmup_init
    lr_wsd_* main_grads_dtype max_critic_ckpt_to_keep max_model_len max_num_* max_seqlen_*
    micro_batch_size mixed_precision.* mode model_dtype moe_* mtp mtp.* multi_* muon_*
    n_gpus_per_node name nccl_timeout need_tools_* nnodes npu_profile.* num_cycles num_workers
    optimizer_impl over_sample_rate override_* pad_* pf_ppo.* pipeline_model_parallel_size
    ppo_kl_coef profile.* profile_* profiler.* prometheus.* prompt_length qat* quantization*
    ray_* remove_previous_ckpt_in_save response_length return_* reward_kwargs.* reward_loop_*
    reward_manager.* rollout.* rollout_correction.* rollout_data_dir rollout_n
    router_config_path router_replay.* sampler.* sandbox_fusion.* scheduling_policy seed
    sglang_engine_mode shuffle skip_* strategy tau_* tensor_model_parallel_size tiled_mlp.*
    trace.* truncation trust_remote_code turbo_config.* use_checkpoint_* use_dist_*
    use_fire_sampling use_fused_kernels use_layer_* use_legacy_* use_liger use_mbridge
    use_megatron_fsdp use_no_sync_* use_orig_params use_precision_* use_prefix_grouper
    use_remove_padding use_reward_loop use_shm use_torch_compile use_v1 v1.*
    val_generations_to_log_* val_kwargs.do_sample validation_* vanilla_* video_key
    weight_decay_incr_style wrap_policy.* zero_indexed_step
    """
_WHOLE = "sandbox_fusion distillation transfer_queue global_profiler skip ray_kwargs"


def is_of_verl(key: str) -> bool:
    """Return whether some version of verl has a key, for which no "+" is asked then."""
    parts = key.split(".")
    return parts[0] in _WHOLE.split() or any(
        fnmatchcase(".".join(parts[:size]), section) and fnmatchcase(".".join(parts[size:]), name)
        for size in range(1, len(parts))
        for section in _SECTIONS.split()
        for name in _NAMES.split()
    )


def check_refused(given: Given) -> set[str]:
    """Return the keys of `REFUSED` with values that Quadriga computes.

    Raises:
        ConfigError: a setting changes what is computed and has no counterpart.
    """
    found = set()
    for key, value in given.items():
        for pattern, (allowed, remedy) in REFUSED.items():
            if not fnmatchcase(key, pattern) or any(fnmatchcase(key, name) for name in _HARMLESS):
                continue
            found.add(key)
            if value not in (*allowed, None, {}, []):
                text = f"{key}={value!r} of verl has no counterpart: {remedy}"
                raise ConfigError(text, key=key)
    return found


def check_together(given: Given) -> set[str]:
    """Return the keys that only have to agree with another one.

    Raises:
        ConfigError: settings contradict each other; the message has both keys and values.
    """
    equal = _equal_settings(given)
    for key, other, why in (*_contradictions(given, equal), *_of_reward(given)):
        raise ConfigError(
            f"{key}={given.get(key)!r} of verl, but {other} is {given.get(other)!r}: {why}", key=key
        )
    return {key for key in equal if key in given}


def _equal_settings(given: Given) -> dict[str, tuple[str, str]]:
    """Return key → another one that must have the same value, and why."""
    one, longest = "one length holds for both", "data.max_response_length"
    pairs = {
        f"{_ROLLOUT}.prompt_length": ("data.max_prompt_length", one),
        f"{_ROLLOUT}.response_length": (longest, one),
    }
    if reads_values(given):
        kept = "trainer.max_actor_ckpt_to_keep"
        pairs["trainer.max_critic_ckpt_to_keep"] = (kept, "a checkpoint holds actor and critic")
    if not given.get("algorithm.filter_groups.enable"):
        pairs["data.gen_batch_size"] = ("data.train_batch_size", "each prompt is trained on")
    if _punishes_length(given):
        for section in ("reward_model", "reward"):
            ends = "the penalty ends at the longest response"
            pairs[f"{section}.reward_kwargs.max_resp_len"] = (longest, ends)
    return pairs


def _contradictions(
    given: Given, equal: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str, str]]:
    for key, (other, why) in equal.items():
        absent = None if key.endswith("_ckpt_to_keep") else given.get(key)  # our default of data
        if key in given and given[key] != given.get(other, absent):
            yield key, other, f"{why}; set both equal"
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if given.get(mode) == "resume_path" and not isinstance(given.get(path), str):
        yield mode, path, f"set {path} to the folder of a checkpoint"
    if given.get("critic.enable") is False and reads_values(given):
        yield "critic.enable", "algorithm.adv_estimator", "the estimator gae needs the critic"


def _of_reward(given: Given) -> Iterator[tuple[str, str, str]]:
    for key in ("custom_reward_function.path", "reward.custom_reward_function.path"):
        if key in given and (model := _reward_model(given)):
            yield key, model, "verl scores with only one of them; remove the other"


def reads_values(given: Given) -> bool:
    """Return whether the advantage estimator needs a critic."""
    return given.get("algorithm.adv_estimator", "gae") == "gae"


def _reward_model(given: Given) -> str | None:
    """Return the key that switches the reward model on, or None."""
    old, new = "reward_model.enable", "reward.reward_model.enable"
    key = old if old in given else new
    return key if given.get(key) is True else None


def _punishes_length(given: Given) -> bool:
    return given.get("reward_model.reward_manager", given.get("reward.reward_manager.name")) == (
        "dapo"
    )


_OF_ADAPTER = "lora_rank|lora_alpha|target_modules|exclude_modules"


def without_effect(key: str, given: Given) -> str | None:
    """Return why verl does not read `key` beside the other settings `given`; None: it does."""
    section, _, name = key.rpartition(".")
    mode = given.get("trainer.resume_mode", "auto")
    reasons = {
        "the estimator reads no values": key.startswith("critic.") and not reads_values(given),
        "the reward model is not enabled": key.startswith("reward_model.")
        and not (name == "enable" or "overlong" in key or _reward_model(given)),
        "the reward manager is not dapo": "overlong_buffer" in key and not _punishes_length(given),
        f"trainer.resume_mode is {mode}": name == "resume_from_path" and mode != "resume_path",
        f"{section}.lr_warmup_steps is set": name == "lr_warmup_steps_ratio"
        and _count(given.get(f"{section}.lr_warmup_steps"), least=0) is not None,
        "the adapter in lora_adapter_path has its own": re.fullmatch(_OF_ADAPTER, name) is not None
        and given.get(f"{section}.lora_adapter_path") is not None,
        "SGLang keeps its memory where ranks divide a layer": name == "free_cache_engine"
        and given.get(f"{section}.name") == "sglang"
        and given.get(f"{section}.tensor_model_parallel_size", 1) != 1,
    }
    return next((why for why, holds in reasons.items() if holds), _of_other_engine(key, given))


def _of_other_engine(key: str, given: Given) -> str | None:
    for part in (".megatron.", ".fsdp_config.", ".fsdp."):
        role, found, name = key.rpartition(part)
        role = role.removesuffix(".model") or "engine"
        of_actor = given.get(f"{_ACTOR}.strategy", "fsdp")
        default = of_actor if role == "actor_rollout_ref.ref" else "fsdp"
        strategy = given.get(f"{role}.strategy", default)
        if found and (strategy == "megatron") != (part == ".megatron."):
            return f"the strategy is {strategy}"
        size = given.get(f"{role}.megatron.tensor_model_parallel_size", 1)
        if found and name == "sequence_parallel" and size == 1:
            return "tensor_model_parallel_size is 1"  # verl turns it off
    return None


def _count(value: object, least: int = 1) -> int | None:
    """Return a number of steps or ranks; None for anything else, and for -1: not given."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if value >= least else None


def converted(given: Given) -> dict[str, object]:
    """Return key of verl → value in our unit, where it depends on other settings.

    verl's schedule counts training steps, ours optimizer steps: 1024 prompts in mini-batches of 256
    are 4 optimizer steps, so 10 steps of warm-up become 40. verl's Megatron has an absolute
    `min_lr`, ours a part of `lr`.
    """
    found: dict[str, object] = {}
    for role in (_ACTOR, "critic"):
        size, epochs = (
            _count(given.get(f"{role}.{name}", given.get(f"{_ACTOR}.{name}")))
            for name in ("ppo_mini_batch_size", "ppo_epochs")
        )
        prompts = _count(given.get("data.train_batch_size"))
        updates = (prompts // size if prompts and size else 1) * (epochs or 1)
        for name in ("lr_warmup_steps", "total_training_steps"):
            if steps := _count(given.get(f"{role}.optim.{name}")):
                found[f"{role}.optim.{name}"] = steps * updates
    for section in (f"{_ACTOR}.optim", "critic.optim", "optim"):
        least, peak = given.get(f"{section}.min_lr"), given.get(f"{section}.lr")
        if isinstance(least, float | int) and isinstance(peak, float | int) and peak:
            found[f"{section}.min_lr"] = least / peak
    return found


_OPTIONS = {
    "sapo": "actor.tau_pos actor.tau_neg",
    "clip_cov": "actor.policy_loss.clip_cov_ratio actor.policy_loss.clip_cov_lb "
    "actor.policy_loss.clip_cov_ub",
    "kl_cov": "actor.policy_loss.kl_cov_ratio actor.policy_loss.ppo_kl_coef",
}


def implied(given: Given) -> Iterator[tuple[str, str, object]]:
    """Yield (key of verl, key of ours, value) of settings that follow from several of verl's."""
    loss = str(given.get(f"{_ACTOR}.policy_loss.loss_mode"))
    found = {
        f"actor_rollout_ref.{key}": f"{_ACTOR}.policy_loss.options.{key.rpartition('.')[2]}"
        for key in _OPTIONS.get(loss, "").split()
    }
    if given.get("algorithm.adv_estimator") == "gdpo":
        found["algorithm.gdpo_reward_keys"] = "algorithm.reward_components"
        found["algorithm.gdpo_reward_weights"] = "algorithm.options.reward_weights"
    yield from ((key, ours, given[key]) for key, ours in found.items() if key in given)
    groups = "algorithm.filter_groups.enable"
    if given.get(groups) is True:  # verl draws prompts until the batch is full
        yield groups, "algorithm.filter_groups.mode", "refill"
        yield groups, "algorithm.filter_groups.under_filled", "error"
    if key := _reward_model(given):  # the model scores in place of the rules
        yield key, "reward_model.rule_weight", 0.0
        yield from _pool_of_reward_model(given, key.removesuffix("enable"))


def _pool_of_reward_model(given: Given, section: str) -> Iterator[tuple[str, str, object]]:
    """Yield the ranks of a reward model with a pool of its own, which come after the others."""
    key, names = f"{section}enable_resource_pool", ("nnodes", "n_gpus_per_node")
    if given.get(key) is not True:
        return
    nodes, size = (_count(given.get(f"{section}{name}")) or 0 for name in names)
    of_policy, each = (_count(given.get(f"trainer.{name}")) or 1 for name in names)
    if not nodes * size or (size != each and (nodes, of_policy) != (1, 1)):
        raise ConfigError(
            f"{key}=true of verl needs {section}nnodes ≥ 1 and, on several nodes, {section}"
            f"n_gpus_per_node = trainer.n_gpus_per_node = {each}; got {nodes} and {size}",
            key=key,
        )
    first, last = of_policy * each, of_policy * each + nodes * size - 1
    more = ("trainer.nnodes", of_policy + nodes)
    yield f"{section}nnodes", *(more if size == each else ("trainer.n_gpus_per_node", each + size))
    yield key, "placement.actor", [f"0-{first - 1}"]
    yield f"{section}n_gpus_per_node", "placement.reward_model", [f"{first}-{last}"]
