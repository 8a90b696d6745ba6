"""verl's algorithm functions under verl's names, computed by `quadriga.algorithms`.

`outcome_advantages` has the estimators that compare the responses of one prompt.

Shapes: B samples, T response tokens. Rewards, values, log-probabilities and masks are [B, T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from typing import TypeAlias, TypeVar

from torch import Tensor

from quadriga.algorithms import kl
from quadriga.algorithms.advantages import ADVANTAGES, compute_advantages, register_advantage
from quadriga.algorithms.aggregation import aggregate, count_mask
from quadriga.algorithms.groups import Groups
from quadriga.algorithms.value_loss import value_loss
from quadriga.compat.verl.algorithms import outcome_advantages as outcome
from quadriga.compat.verl.algorithms.lookups import (
    MissingNameError,
    TakenNameError,
    UnsupportedKLError,
    UnsupportedNameError,
)
from quadriga.compat.verl.algorithms.outcome_advantages import Advantages
from quadriga.compat.verl.config import VerlConfig, number, setting
from quadriga.compat.verl.config_classes import AlgoConfig
from quadriga.errors import AlgorithmError, UnknownNameError

EntryT = TypeVar("EntryT")
EstimatorFn: TypeAlias = Callable[..., Advantages]


class AdvantageEstimator(StrEnum):
    """The advantage estimators of Quadriga that verl has too, under verl's names."""

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
    """Compute GAE advantages, whitened over the batch, and their returns."""
    return compute_advantages(
        "gae",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        values_BT=values,
        gamma=float(gamma),
        lam=float(lam),
    )


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: VerlConfig = None, **_: object
) -> Advantages:
    """Compute REINFORCE++ advantages. `config.gamma` is the discount factor, 1 by default."""
    return compute_advantages(
        "reinforce_plus_plus",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        gamma=number(config, "gamma", 1.0),
    )


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute ReMax advantages. `reward_baselines` [B]: rewards of the greedy responses."""
    return compute_advantages(
        "remax",
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=response_mask,
        reward_baselines_B=reward_baselines,
    )


ADV_ESTIMATOR_REGISTRY: dict[str, EstimatorFn] = {
    "gae": compute_gae_advantage_return,
    "grpo": outcome.compute_grpo_outcome_advantage,
    "grpo_vectorized": outcome.compute_grpo_vectorized_outcome_advantage,
    "grpo_passk": outcome.compute_grpo_passk_outcome_advantage,
    "rloo": outcome.compute_rloo_outcome_advantage,
    "rloo_vectorized": outcome.compute_rloo_vectorized_outcome_advantage,
    "opo": outcome.compute_opo_outcome_advantage,
    "gpg": outcome.compute_gpg_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "reinforce_plus_plus_baseline": outcome.compute_reinforce_plus_plus_baseline_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "gdpo": outcome.compute_gdpo_outcome_advantage,
}


def register_adv_est(
    name_or_enum: str | AdvantageEstimator,
) -> Callable[[EstimatorFn], EstimatorFn]:
    """Return a decorator that adds an estimator with verl's signature under a name.

    Quadriga's trainer can use the estimator too (`algorithm.adv_estimator=<name>`). It passes
    `token_level_rewards`, `response_mask`, `index` (int array [B], the prompt group of each
    sample) and `config`, an `AlgoConfig` with the settings `gamma`, `lam`, `adv_estimator` and
    `norm_adv_by_std_in_grpo` of the run. The decorator raises TakenNameError if the name is taken.
    """
    name = _name(name_or_enum)

    def add(function: EstimatorFn) -> EstimatorFn:
        known = ADV_ESTIMATOR_REGISTRY.get(name)
        if known not in (None, function):
            raise TakenNameError(
                f"The advantage estimator {name!r} is registered already. Choose another name.",
                name=name,
            )
        ADV_ESTIMATOR_REGISTRY[name] = function

        # `register_advantage` reads the names of the parameters to find the inputs of an estimator.
        def adapter(
            token_level_rewards_BT: Tensor,
            response_mask_BT: Tensor,
            groups: Groups,
            *,
            gamma: float = 1.0,
            lam: float = 1.0,
            norm_adv_by_std: bool = True,
        ) -> Advantages:
            return function(
                token_level_rewards=token_level_rewards_BT,
                response_mask=response_mask_BT,
                index=groups.index_B.cpu().numpy(),
                config=AlgoConfig(
                    gamma=gamma,
                    lam=lam,
                    adv_estimator=name,
                    norm_adv_by_std_in_grpo=norm_adv_by_std,
                ),
            )

        # Registering the same function again is allowed, but the trainer accepts a name only once.
        if name not in ADVANTAGES:
            register_advantage(name, formula=(function.__doc__ or "").partition("\n")[0])(adapter)
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> EstimatorFn:
    """Return the estimator of that name. Raises `UnknownNameError` if there is none."""
    return registered(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), "advantage estimator")


def registered(registry: Mapping[str, EntryT], name: str, kind: str) -> EntryT:
    """Return `registry[name]`. Raises `UnknownNameError`, which lists the known names."""
    if name not in registry:
        raise MissingNameError(
            f"No {kind} {name!r}. Known: {', '.join(registry)}.",
            name=name,
            known=list(registry),
            nearest=None,
        )
    return registry[name]


class AdaptiveKLController(kl.AdaptiveKLController):
    """Adapt the KL coefficient so that KL approaches `target_kl` (arXiv 1909.08593)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)


FixedKLController = kl.FixedKLController


def get_kl_controller(kl_ctrl: VerlConfig) -> kl.KLController:
    """Make a KL controller from the settings `type`, `kl_coef`, `target_kl` and `horizon`.

    Raises `UnsupportedNameError` for another type.
    """
    given = {key: number(kl_ctrl, key) for key in ("target_kl", "horizon")}
    try:
        return kl.make_kl_controller(
            setting(kl_ctrl, "type", "fixed"),
            kl_coef=number(kl_ctrl, "kl_coef", 0.0),
            **{key: value for key, value in given.items() if value is not None},
        )
    except UnknownNameError as error:
        raise UnsupportedNameError(str(error), **vars(error)) from None


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate KL(π ‖ π_ref) for each token; [B, T].

    `kl_penalty` names the estimator: "kl", "abs", "mse", "low_var_kl", "k3+" and so on.

    Raises:
        UnsupportedNameError: no estimator has this name.
        UnsupportedKLError: the estimator is "full", which needs the logits of both models.
        ShapeError: the tensors differ in shape.
    """
    try:
        return kl.kl_estimate(logprob, ref_logprob, kl_penalty)
    except UnknownNameError as error:
        raise UnsupportedNameError(str(error), **vars(error)) from None
    except AlgorithmError as error:
        if kl_penalty != kl.FULL:
            raise
        raise UnsupportedKLError(str(error), **vars(error)) from None


kl_penalty_forward = kl_penalty


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Return `token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)`; [B, T]."""
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
    """Aggregate the token losses of a micro-batch to its share of the global loss, times `dp_size`.

    `batch_num_tokens` and `global_batch_size` count the tokens and sequences of the global batch;
    None: those of `loss_mask`, if `dp_size` is 1.

    Raises:
        MissingNameError: no aggregation has this name.
        AlgorithmError: `dp_size` is above 1, and the count that the mode divides by is missing.
    """
    # Token losses 1 3 | 5 of two sequences, "token-mean": (1 + 3 + 5) / 3 = 3. With dp_size=2 and
    # batch_num_tokens=6, this rank holds half of the tokens: 2 · 9 / 6 = 3, and the mean over both
    # ranks, which data-parallel training takes of the gradients, is the loss of the whole batch.
    tokens, sequences = count_mask(loss_mask)
    try:
        total = aggregate(
            loss_mat,
            loss_mask,
            loss_agg_mode,
            global_tokens=tokens if batch_num_tokens is None else batch_num_tokens,
            global_sequences=sequences if global_batch_size is None else global_batch_size,
            loss_scale_length=loss_scale_factor or loss_mask.shape[-1],
        )
    except UnknownNameError as error:
        raise MissingNameError(str(error), **vars(error)) from None
    _check_counts(loss_agg_mode, dp_size, batch_num_tokens, global_batch_size)
    return total * dp_size


def _check_counts(mode: str, dp_size: int, tokens: int | None, sequences: int | None) -> None:
    """Raise `AlgorithmError` if the counts of one rank would stand for those of all ranks."""
    name = "global_batch_size" if mode.startswith("seq-") else "batch_num_tokens"
    given = sequences if mode.startswith("seq-") else tokens
    if dp_size > 1 and given is None and mode != "token-sum":
        raise AlgorithmError(
            f"agg_loss: {mode!r} on {dp_size} data-parallel ranks divides by {name} of the global "
            "batch, got None. Pass the count over all ranks.",
            tensor=name,
        )


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss and the fraction of tokens whose loss is the clipped one.

    The last five arguments are those of `agg_loss`.
    """
    result = value_loss(vpreds, values, returns, response_mask, cliprange_value=cliprange_value)
    loss = agg_loss(
        result.loss_BT,
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    clipped = result.metrics["vf_clipfrac"]
    return loss, clipped.total / clipped.weight.clamp(min=1)


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)
