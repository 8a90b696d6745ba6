"""The functions of verl's trainer that work on one batch, computed by Quadriga's algorithms."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from torch import Tensor

from quadriga.algorithms.kl import KLController
from quadriga.compat.verl.algorithms import core_algos
from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, fields

Metrics: TypeAlias = dict[str, float]


def compute_response_mask(data: DataProto) -> Tensor:
    """Return the columns of `attention_mask` that belong to the responses; [B, R]."""
    length = data.batch[fields.RESPONSES].shape[1]
    mask: Tensor = data.batch[fields.ATTENTION_MASK][:, -length:]
    return mask


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, Metrics]:
    """Write `token_level_rewards` = scores − β·KL(policy ‖ reference), then adapt β.

    Reads `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`. Returns the
    batch, and the mean KL of the sequences with the β that was used.
    """
    mask, beta = data.batch[fields.RESPONSE_MASK], kl_ctrl.value
    kl_BT = core_algos.kl_penalty(
        data.batch[fields.OLD_LOG_PROBS], data.batch[fields.REF_LOG_PROB], kl_penalty
    )
    kl_BT = kl_BT * mask
    data.batch[fields.TOKEN_LEVEL_REWARDS] = data.batch[fields.TOKEN_LEVEL_SCORES] - beta * kl_BT
    tokens_B = mask.sum(-1)
    mean = float((kl_BT.sum(-1) / tokens_B.clamp(min=1)).mean())
    kl_ctrl.update(mean, n_steps=len(data))
    return data, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: str | Enum,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: VerlConfig = None,
) -> DataProto:
    """Write `advantages` and `returns` by an estimator of `ADV_ESTIMATOR_REGISTRY`.

    Reads `token_level_rewards`, `response_mask` (made from `attention_mask` if it is missing), and
    what the estimator asks for: `values`, `uid`, `reward_baselines`. `num_repeat` is ignored: `uid`
    tells which responses belong to one prompt. Raises `ConfigError` for `config.use_pf_ppo`.
    """
    if setting(config, "use_pf_ppo", False):
        raise ConfigError(
            "compute_advantage: config.use_pf_ppo is set, but Quadriga does not select samples by "
            "their reward before the update (PF-PPO). Set it to False.",
            key="algorithm.use_pf_ppo",
        )
    if fields.RESPONSE_MASK not in data.batch:
        data.batch[fields.RESPONSE_MASK] = compute_response_mask(data)
    name = str(adv_estimator.value if isinstance(adv_estimator, Enum) else adv_estimator)
    given: dict[str, object] = {
        "token_level_rewards": data.batch[fields.TOKEN_LEVEL_REWARDS],
        "response_mask": data.batch[fields.RESPONSE_MASK],
    }
    if name == "gae":
        given |= {"values": data.batch[fields.VALUES], "gamma": gamma, "lam": lam}
    else:
        given["config"] = config
        if fields.UID in data.non_tensor_batch:
            given["index"] = data.non_tensor_batch[fields.UID]
        if fields.REWARD_BASELINES in data.batch:
            given["reward_baselines"] = data.batch[fields.REWARD_BASELINES]
    if name in ("grpo", "grpo_vectorized", "grpo_passk", "gdpo"):
        given["norm_adv_by_std_in_grpo"] = norm_adv_by_std_in_grpo
    if name == "gdpo":
        given |= {"non_tensor_batch": data.non_tensor_batch, "batch": data.batch}
    estimate = core_algos.get_adv_estimator_fn(name)
    data.batch[fields.ADVANTAGES], data.batch[fields.RETURNS] = estimate(**given)
    return data
