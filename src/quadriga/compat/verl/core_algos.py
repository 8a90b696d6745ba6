"""verl's algorithm functions under their own names, over ours.

Deviations are those of `quadriga.algorithms`: a sample without any response token is not a member
of its group, and equal rewards give exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms import kl as kl_room
from quadriga.algorithms.advantages import (
    ADVANTAGES,
    compute_advantages,
    register_advantage,
)
from quadriga.algorithms.aggregation import aggregate, count_mask
from quadriga.algorithms.groups import Groups
from quadriga.algorithms.value_loss import value_loss
from quadriga.errors import InputError, UnknownNameError

Registered = TypeVar("Registered")
Advantages = tuple[Tensor, Tensor]
EstimatorFn = Callable[..., Advantages]


class AdvantageEstimator(StrEnum):
    """The estimators that Quadriga has, under verl's names."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    GDPO = "gdpo"


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """GAE, whitened."""
    return compute_advantages(
        "gae",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        values_BT=values,
        gamma=float(gamma),
        lam=float(lam),
    )


def _by_group(name: str, rewards: Tensor, mask: Tensor, index: Any, **settings: Any) -> Advantages:
    return compute_advantages(
        name,
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        group_ids=np.asarray(index),
        **settings,
    )


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """GRPO. `epsilon` is always 1e-6."""
    return _by_group(
        "grpo", token_level_rewards, response_mask, index, norm_adv_by_std=norm_adv_by_std_in_grpo
    )


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Pass@k: only the best sample of a group learns."""
    by_std = norm_adv_by_std_in_grpo
    return _by_group(
        "grpo_passk", token_level_rewards, response_mask, index, norm_adv_by_std=by_std
    )


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """RLOO."""
    return _by_group("rloo", token_level_rewards, response_mask, index)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """OPO."""
    return _by_group("opo", token_level_rewards, response_mask, index)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
) -> Advantages:
    """GPG. `alpha` is computed from the batch, as there."""
    return _by_group("gpg", token_level_rewards, response_mask, index, f_norm=f_norm)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
) -> Advantages:
    """REINFORCE++ with the group's mean as baseline."""
    return _by_group("reinforce_plus_plus_baseline", token_level_rewards, response_mask, index)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **_: Any
) -> Advantages:
    """REINFORCE++; `config.gamma` is the discount."""
    return compute_advantages(
        "reinforce_plus_plus",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        gamma=float(setting(config, "gamma", 1.0)),
    )


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **_: Any,
) -> Advantages:
    """ReMax."""
    return compute_advantages(
        "remax",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        reward_baselines_B=reward_baselines,
    )


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Any = None,
) -> Advantages:
    """GDPO; the components are the columns of `non_tensor_batch` that `config.gdpo_reward_keys`
    names. Raises InputError without them."""
    keys = setting(config, "gdpo_reward_keys", None)
    if not keys or non_tensor_batch is None:
        raise InputError("GDPO needs config.gdpo_reward_keys and the batch's columns of that name.")
    columns = [np.asarray(non_tensor_batch[key], dtype=np.float64) for key in keys]
    return compute_advantages(
        "gdpo",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        group_ids=np.asarray(index),
        reward_components_BK=torch.from_numpy(np.stack(columns, axis=1)),
        norm_adv_by_std=norm_adv_by_std_in_grpo,
        reward_weights=setting(config, "gdpo_reward_weights", None),
    )


ADV_ESTIMATOR_REGISTRY: dict[str, EstimatorFn] = {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
}


def register_adv_est(
    name_or_enum: str | AdvantageEstimator,
) -> Callable[[EstimatorFn], EstimatorFn]:
    """Add an estimator of verl's form; our trainer can use it under its name too.

    It is called with `token_level_rewards`, `response_mask`, `index` (the group of each sample)
    and `config=None`. Raises InputError if the name is taken.
    """
    name = _name(name_or_enum)

    def add(function: EstimatorFn) -> EstimatorFn:
        known = ADV_ESTIMATOR_REGISTRY.get(name)
        if known not in (None, function):
            raise InputError(f"The advantage estimator {name!r} is registered already.", name=name)
        ADV_ESTIMATOR_REGISTRY[name] = function

        def adapter(
            token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
        ) -> Advantages:
            return function(
                token_level_rewards=token_level_rewards_BT,
                response_mask=response_mask_BT,
                index=groups.index_B.cpu().numpy(),
                config=None,
            )

        if name not in ADVANTAGES:
            register_advantage(name, formula=(function.__doc__ or "").partition("\n")[0])(adapter)
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> EstimatorFn:
    """The estimator of that name. Raises UnknownNameError."""
    return registered(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), "advantage estimator")


def registered(registry: dict[str, Registered], name: str, kind: str) -> Registered:
    """`registry[name]`. Raises UnknownNameError that names what is known."""
    if name not in registry:
        raise UnknownNameError(
            f"No {kind} {name!r}. Known: {', '.join(registry)}.",
            name=name,
            known=list(registry),
            nearest=None,
        )
    return registry[name]


# KL and losses


class AdaptiveKLController(kl_room.AdaptiveKLController):
    """A coefficient that steers KL towards a target."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)


FixedKLController = kl_room.FixedKLController


def get_kl_controller(kl_ctrl: Any) -> kl_room.KLController:
    """The controller that a config with `type`, `kl_coef`, `target_kl`, `horizon` asks for."""
    settings = {
        key: float(setting(kl_ctrl, key, None))
        for key in ("target_kl", "horizon")
        if setting(kl_ctrl, key, None) is not None
    }
    return kl_room.make_kl_controller(
        setting(kl_ctrl, "type", "fixed"), kl_coef=setting(kl_ctrl, "kl_coef", 0.0), **settings
    )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """KL of each token by an estimator's name ("kl", "abs", "mse", "low_var_kl", "k3+", …)."""
    return kl_room.kl_estimate(logprob, ref_logprob, kl_penalty)


kl_penalty_forward = kl_penalty


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Scores minus the log ratio to the reference, scaled."""
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """The loss of a micro-batch as its part of the whole batch's, times `dp_size`."""
    tokens, sequences = count_mask(loss_mask)
    total = aggregate(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        global_tokens=tokens if batch_num_tokens is None else batch_num_tokens,
        global_sequences=sequences if global_batch_size is None else global_batch_size,
        loss_scale_length=loss_scale_factor or loss_mask.shape[-1],
    )
    return total * dp_size


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **scale: Any,
) -> tuple[Tensor, Tensor]:
    """(clipped value loss, share of tokens where the clip decided)."""
    result = value_loss(vpreds, values, returns, response_mask, cliprange_value=cliprange_value)
    loss = agg_loss(result.loss_BT, response_mask, loss_agg_mode, **scale)
    clipped = result.metrics["vf_clipfrac"]
    return loss, clipped.total / clipped.weight.clamp(min=1)


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)


def setting(config: Any, key: str, default: Any) -> Any:
    """A setting of a mapping or an object; `default` where it is missing or None."""
    if config is None:
        return default
    found = config.get(key, default) if hasattr(config, "get") else getattr(config, key, default)
    return default if found is None else found
