"""What each step of the loop does on the controller. Every stage takes a batch and gives one back.

Batches here are by reference: a stage that reads a field fetches that field, and the comments of
each function say which. `metrics` are plain floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quadriga.algorithms.advantages import compute_advantages, get_advantage
from quadriga.algorithms.importance import importance_correction, mismatch_metrics
from quadriga.algorithms.kl import KLController, penalise_rewards
from quadriga.algorithms.policy_losses import get_policy_loss, select_tokens
from quadriga.algorithms.shaping import (
    add_to_last_token,
    dead_group_metrics,
    drop_truncated,
    informative_groups,
    overlong_penalty,
    shape_rewards,
)
from quadriga.config.schema import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig
from quadriga.parallel.balancing import get_seqlen_balanced_partitions
from quadriga.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto


def expand_prompts(prompts: DataProto, *, n: int, step: int, seed: int, turn: int = 0) -> DataProto:
    """`n` rows a prompt, neighbours, with the group's `uid` and a `sample_seed` for each row.

    The seed of a row depends on the run's seed, the step, the turn (a step may draw several
    times), the prompt's place and the sample's number, and on nothing else: not on ranks, not on
    how a batch is cut.
    """
    import torch

    count = len(prompts)
    batch = prompts.repeat(repeat_times=n, interleave=True)
    batch.non_tensor_batch["uid"] = np.repeat(
        np.array([f"{step}-{turn}-{i}" for i in range(count)], dtype=object), n
    )
    streams = np.random.SeedSequence([seed, step, turn]).generate_state(count * n, dtype=np.uint64)
    batch.batch["sample_seed"] = torch.from_numpy((streams >> np.uint64(1)).astype(np.int64))
    return batch


def balance_over_ranks(batch: DataProto, dp_size: int) -> tuple[DataProto, dict[str, float]]:
    """Reorder rows so that each of `dp_size` equal parts holds about equally many tokens.

    Reads `sequence_length` [B] only.
    """
    lengths = batch.batch["sequence_length"]
    if dp_size == 1 or len(batch) % dp_size:
        return batch, {}
    partitions = get_seqlen_balanced_partitions(lengths.tolist(), dp_size, equal_size=True)
    tokens = [int(lengths[part].sum()) for part in partitions]
    order = np.concatenate([np.asarray(part) for part in partitions])
    spread = (max(tokens) - min(tokens)) / max(1, max(tokens))
    return batch.select_idxs(order), {"batch/token_spread": spread}


def shape_scores(batch: DataProto, config: AlgorithmConfig) -> dict[str, float]:
    """Over-long penalty, clipping and whitening: `token_level_scores` → `token_level_rewards`."""
    scores = batch.batch["token_level_scores"]
    mask = batch.batch["response_mask"]
    metrics: dict[str, float] = {}
    if config.overlong.enable:
        penalty = overlong_penalty(
            mask.sum(-1),
            max_length=mask.shape[1],
            buffer_length=config.overlong.buffer_length,
            penalty_factor=config.overlong.penalty_factor,
        )
        scores = add_to_last_token(scores, mask, penalty)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
    batch.batch["token_level_rewards"] = shape_rewards(
        scores, mask, clip=config.reward_clip, whiten=config.whiten_rewards
    )
    return metrics


def penalise_kl(batch: DataProto, controller: KLController, estimator: str) -> dict[str, float]:
    """Subtract β·KL(policy ‖ reference) from each token's reward, and let β adapt.

    Reads `old_log_probs`, `ref_log_prob`, `response_mask`; changes `token_level_rewards`.
    """
    beta = controller.value
    batch.batch["token_level_rewards"], kl = penalise_rewards(
        batch.batch["token_level_rewards"],
        batch.batch["old_log_probs"],
        batch.batch["ref_log_prob"],
        batch.batch["response_mask"],
        kl_coef=beta,
        kl_penalty=estimator,
    )
    controller.update(kl, n_steps=len(batch))
    return {"reward/kl_penalty": kl, "reward/kl_coef": beta}


def correct_mismatch(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """How far rollout and training log-probabilities lie apart, and weights that make up for it.

    Reads `old_log_probs`, `rollout_log_probs`, `response_mask`; writes `rollout_is_weights` where
    the correction is on.
    """
    old = batch.batch["old_log_probs"]
    rollout = batch.batch["rollout_log_probs"]
    mask = batch.batch["response_mask"]
    metrics = mismatch_metrics(old, rollout, mask)
    if config.level != "none":
        correction = importance_correction(
            old,
            rollout,
            mask,
            level=config.level,
            mode=config.mode,
            upper=config.upper,
            lower=config.lower,
            normalise=config.normalise,
        )
        batch.batch["rollout_is_weights"] = correction.weights_BT
        metrics.update(correction.metrics)
    return {f"mismatch/{name.removeprefix('mismatch_')}": v for name, v in metrics.items()}


def drop_cut_off(batch: DataProto, config: AlgorithmConfig) -> None:
    """Take responses that ran into the length limit out of update and groups, where asked to.

    Reads `finished`; changes `response_mask`.
    """
    if config.overlong.drop_truncated:
        mask = batch.batch["response_mask"]
        kept = drop_truncated(mask, batch.batch["finished"] == 0)
        batch.batch["response_mask"] = kept.to(mask.dtype)


def drop_dead_groups(batch: DataProto, config: AlgorithmConfig) -> dict[str, float]:
    """Measure groups whose scores are all equal; give them weight zero where asked to.

    By the reward function's scores, before penalties: length and KL alone are no signal. Responses
    without tokens are no members. Reads `token_level_scores`; changes `response_mask`.
    """
    mask = batch.batch["response_mask"]
    present_B = mask.any(-1)
    if not present_B.any():
        return {}
    scores = batch.batch["token_level_scores"].sum(-1)[present_B]
    uid = batch.non_tensor_batch["uid"][present_B.numpy()]
    metrics = {f"group/{k}": v for k, v in dead_group_metrics(scores, uid).items()}
    if config.filter_groups.enable:
        alive_B = present_B.clone()
        alive_B[present_B] = informative_groups(scores, uid)
        batch.batch["response_mask"] = mask * alive_B.to(mask.dtype)[:, None]
    return metrics


_INPUT_FIELDS = {
    "values_BT": "values",
    "reward_baselines_B": "reward_baselines",
    "reward_components_BK": "reward_components",
    "old_log_prob_BT": "old_log_probs",
}


def estimate_advantages(batch: DataProto, config: AlgorithmConfig) -> dict[str, float]:
    """`advantages` and `returns` by the estimator that the settings name.

    Reads `token_level_rewards`, `response_mask`, and whichever of `_INPUT_FIELDS` the estimator
    needs.
    """
    entry = get_advantage(config.adv_estimator)
    mask = batch.batch["response_mask"]
    advantages, returns = compute_advantages(
        config.adv_estimator,
        token_level_rewards_BT=batch.batch["token_level_rewards"],
        response_mask_BT=mask,
        group_ids=batch.non_tensor_batch["uid"],
        **{name: batch.batch[key] for name, key in _INPUT_FIELDS.items() if name in entry.needs},
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std=config.norm_adv_by_std,
        whiten_advantages=config.whiten_advantages,
        **config.options,
    )
    batch.batch["advantages"] = advantages
    batch.batch["returns"] = returns
    kept = mask.bool()
    chosen = advantages[kept]
    if not chosen.numel():
        return {"critic/advantages/mean": 0.0, "critic/advantages/max_abs": 0.0}
    return {
        "critic/advantages/mean": float(chosen.mean()),
        "critic/advantages/max_abs": float(chosen.abs().max()),
    }


def select_update_tokens(batch: DataProto, config: ActorConfig) -> None:
    """`selected_tokens` for losses that choose tokens over the whole batch (Clip-Cov, KL-Cov)."""
    if get_policy_loss(config.policy_loss.name).select is None:
        return
    selected = select_tokens(
        config.policy_loss.name,
        old_log_prob_BT=batch.batch["old_log_probs"],
        advantages_BT=batch.batch["advantages"],
        response_mask_BT=batch.batch["response_mask"],
        **config.policy_loss.options,
    )
    if selected is not None:
        batch.batch["selected_tokens"] = selected


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """Lengths, rewards and how many responses were cut off. Reads `response_mask` and scores."""
    mask = batch.batch["response_mask"]
    length_B = mask.sum(-1).float()
    score_B = batch.batch["token_level_scores"].sum(-1)
    return {
        "reward/mean": float(score_B.mean()),
        "reward/max": float(score_B.max()),
        "reward/min": float(score_B.min()),
        "response_length/mean": float(length_B.mean()),
        "response_length/max": float(length_B.max()),
        "response_length/clip_ratio": float((batch.batch["finished"] == 0).float().mean()),
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.batch["sequence_length"].sum()),
    }


GENERATION_FIELDS = ["input_ids", "attention_mask", "sample_seed"]


def answer(rollout: Any, rows: DataProto, sampling: str) -> DataProto:
    """One response a row, any number of rows. `sampling`: "train", "val" or "greedy"."""
    inputs, extra = pad_dataproto_to_divisor(generation_inputs(rows, sampling), rollout.world_size)
    generated = unpad_dataproto(rollout.generate_sequences(inputs), extra)
    return rows.select(batch_keys=[], meta_info_keys=[]).union(generated)


def generation_inputs(rows: DataProto, sampling: str = "train") -> DataProto:
    """Just what `generate_sequences` reads."""
    inputs = rows.select(batch_keys=GENERATION_FIELDS, non_tensor_batch_keys=[], meta_info_keys=[])
    inputs.meta_info["sampling"] = sampling
    return inputs


def one_row_each(rows: DataProto, n: int) -> DataProto:
    """The first of each prompt's `n` rows."""
    return rows.select_idxs(np.arange(0, len(rows), n))
