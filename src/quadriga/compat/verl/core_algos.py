"""verl's algorithm functions under verl's names, computed by `quadriga.algorithms`.

Estimators, KL, value loss, aggregation of losses, and the functions of verl's trainer that work on
one batch. `policy_losses` has the policy losses.

Two results differ from verl, as everywhere in `quadriga.algorithms`: a sample without response
tokens is not a member of its prompt group, and a prompt group with equal rewards gets advantages of
exactly 0.

Shapes: B samples, T response tokens. Rewards, values, log-probabilities and masks are [B, T].
`index` holds for each sample the id of its prompt. `epsilon` is added to a standard deviation.
Estimators that divide by none take it and do not use it, as in verl. `_`: what `compute_advantage`
passes to every estimator and this one does not read, such as `reward_baselines`.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from quadriga.algorithms import kl
from quadriga.algorithms.advantages import (
    ADVANTAGES,
    STD_EPSILON,
    compute_advantages,
    register_advantage,
    sequence_scores,
)
from quadriga.algorithms.aggregation import aggregate, count_mask
from quadriga.algorithms.tensors import Groups, has_tokens, make_groups, to_bool_mask
from quadriga.algorithms.value_loss import value_loss
from quadriga.compat.verl.config import AlgoConfig, VerlConfig, number, setting
from quadriga.errors import AlgorithmError, ConfigError, FieldError, InputError, UnknownNameError
from quadriga.protocol import DataProto, fields


class TakenNameError(InputError, ValueError):
    """A name is registered already. verl raises ValueError. Attribute: `name`."""


class MissingNameError(UnknownNameError, ValueError):
    """A registry has no such name. verl raises ValueError."""


class UnsupportedNameError(UnknownNameError, NotImplementedError):
    """No KL estimator or controller has this name. verl raises NotImplementedError."""


class UnsupportedKLError(AlgorithmError, NotImplementedError):
    """A KL estimator needs more than the given tensors. verl raises NotImplementedError."""


Advantages: TypeAlias = tuple[Tensor, Tensor]
"""(advantages, returns), each [B, T]."""
EstimatorFn: TypeAlias = Callable[..., Advantages]
PromptIds: TypeAlias = Sequence[object] | NDArray[np.generic] | Tensor


def _estimate(
    name: str, rewards: Tensor, mask: Tensor, index: PromptIds | None = None, /, **given: Any
) -> Advantages:
    """Compute an estimator. `given`: its other inputs and settings, which it checks."""
    ids = None if index is None else np.asarray(index)
    return compute_advantages(
        name, token_level_rewards_BT=rewards, response_mask_BT=mask, group_ids=ids, **given
    )


def _over_std(name: str, settings_first: bool = False) -> EstimatorFn:
    """Return an estimator whose advantages are divided by the std of the prompt group + epsilon.

    A prompt group of equal rewards has std 0 and advantages of exactly 0, also with `epsilon=0`.
    `settings_first`: `config.norm_adv_by_std_in_grpo` takes precedence over the argument.
    """

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: PromptIds,
        epsilon: float = STD_EPSILON,
        norm_adv_by_std_in_grpo: bool = True,
        config: VerlConfig = None,
        **_: object,
    ) -> Advantages:
        rewards, mask, by_std = token_level_rewards, response_mask, norm_adv_by_std_in_grpo
        if settings_first:
            by_std = setting(config, "norm_adv_by_std_in_grpo", by_std)
        if not by_std or epsilon == STD_EPSILON:  # what Quadriga's estimators use
            return _estimate(name, rewards, mask, index, norm_adv_by_std=by_std)
        undivided_BT = _estimate(name, rewards, mask, index, norm_adv_by_std=False)[0]
        groups = make_groups(np.asarray(index), has_tokens(to_bool_mask(mask)))
        std_B = groups.std_G(sequence_scores(rewards, mask))[groups.index_B]
        divisor_B = torch.where(std_B == 0, 1.0, std_B + epsilon)
        advantages = (undivided_BT / divisor_B[:, None]).to(undivided_BT.dtype)
        return advantages, advantages

    estimate.__doc__ = f"Compute the advantages of `{name}`."
    return estimate


compute_grpo_outcome_advantage = _over_std("grpo")
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_grpo_passk_outcome_advantage = _over_std("grpo_passk", settings_first=True)


def _named(name: str) -> EstimatorFn:
    """Return an estimator that reads the rewards and the prompt groups only."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: PromptIds,
        epsilon: float = STD_EPSILON,
        config: VerlConfig = None,
        **_: object,
    ) -> Advantages:
        return _estimate(name, token_level_rewards, response_mask, index)

    estimate.__doc__ = f"Compute the advantages of `{name}`."
    return estimate


compute_rloo_outcome_advantage = _named("rloo")
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_opo_outcome_advantage = _named("opo")
compute_reinforce_plus_plus_baseline_outcome_advantage = _named("reinforce_plus_plus_baseline")


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute GPG advantages. `alpha` is ignored and computed from the batch, as in verl."""
    return _estimate("gpg", token_level_rewards, response_mask, index, f_norm=f_norm)


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: PromptIds,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: VerlConfig = None,
    non_tensor_batch: Mapping[str, ArrayLike] | None = None,
    batch: object = None,
    **_: object,
) -> Advantages:
    """Compute GDPO advantages.

    The reward components are the columns of `non_tensor_batch` that `config.gdpo_reward_keys`
    lists, weighted by `config.gdpo_reward_weights`.

    Raises:
        InputError: the keys are missing, or `epsilon` is not the one of Quadriga.
        FieldError: a column is missing.
    """
    keys: Sequence[str] | None = setting(config, "gdpo_reward_keys")
    if not keys or non_tensor_batch is None:
        held = "None" if non_tensor_batch is None else "given"
        raise InputError(
            "GDPO reads its reward components from the columns of non_tensor_batch that config."
            f"gdpo_reward_keys lists; got keys={keys!r} and non_tensor_batch={held}. Pass both."
        )
    if norm_adv_by_std_in_grpo and epsilon != STD_EPSILON:
        raise InputError(
            f"compute_gdpo_outcome_advantage: got epsilon={epsilon}, but GDPO always adds "
            f"{STD_EPSILON} to the standard deviations. Leave epsilon out."
        )
    if missing := [key for key in keys if key not in non_tensor_batch]:
        raise FieldError(
            f"compute_gdpo_outcome_advantage: config.gdpo_reward_keys names {missing[0]!r}, but "
            f"non_tensor_batch has {', '.join(non_tensor_batch) or 'no column'}. Return this "
            "component from the reward function, or remove the key.",
            field=missing[0],
        )
    columns = [np.asarray(non_tensor_batch[key], dtype=np.float64) for key in keys]
    given = {
        "reward_components_BK": torch.from_numpy(np.stack(columns, axis=1)),
        "norm_adv_by_std": norm_adv_by_std_in_grpo,
        "reward_weights": setting(config, "gdpo_reward_weights"),
    }
    return _estimate("gdpo", token_level_rewards, response_mask, index, **given)


EntryT = TypeVar("EntryT")


AdvantageEstimator = StrEnum(
    "AdvantageEstimator",
    "GAE GRPO REINFORCE_PLUS_PLUS REINFORCE_PLUS_PLUS_BASELINE REMAX RLOO OPO GRPO_PASSK GPG "
    "RLOO_VECTORIZED GRPO_VECTORIZED GDPO",
)
"""The advantage estimators of Quadriga that verl has too; a value is the name in lower case."""


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """Compute GAE advantages, whitened over the batch, and their returns."""
    given = {"values_BT": values, "gamma": float(gamma), "lam": float(lam)}
    return _estimate("gae", token_level_rewards, response_mask, **given)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: VerlConfig = None, **_: object
) -> Advantages:
    """Compute REINFORCE++ advantages. `config.gamma` is the discount factor, 1 by default."""
    gamma = number(config, "gamma", 1.0)
    return _estimate("reinforce_plus_plus", token_level_rewards, response_mask, gamma=gamma)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: VerlConfig = None,
    **_: object,
) -> Advantages:
    """Compute ReMax advantages. `reward_baselines` [B]: rewards of the greedy responses."""
    given = {"reward_baselines_B": reward_baselines}
    return _estimate("remax", token_level_rewards, response_mask, **given)


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


def register_adv_est(name_or_enum: str | Enum) -> Callable[[EstimatorFn], EstimatorFn]:
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
            text = f"The advantage estimator {name!r} is registered already. Choose another name."
            raise TakenNameError(text, name=name)
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
            settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std}
            return function(
                token_level_rewards=token_level_rewards_BT,
                response_mask=response_mask_BT,
                index=groups.index_B.cpu().numpy(),
                config=AlgoConfig(adv_estimator=name, **settings),
            )

        # Registering the same function again is allowed, but the trainer accepts a name only once.
        if name not in ADVANTAGES:
            register_advantage(name, formula=(function.__doc__ or "").partition("\n")[0])(adapter)
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> EstimatorFn:
    """Return the estimator of that name. Raises `UnknownNameError` if there is none."""
    return registered(ADV_ESTIMATOR_REGISTRY, _name(name_or_enum), "advantage estimator")


def registered(registry: Mapping[str, EntryT], name: str, kind: str) -> EntryT:
    """Return `registry[name]`. Raises `UnknownNameError`, which lists the known names."""
    if name not in registry:
        text = f"No {kind} {name!r}. Known: {', '.join(registry)}."
        raise MissingNameError(text, name=name, known=list(registry), nearest=None)
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
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    loss = agg_loss(result.loss_BT, response_mask, loss_agg_mode, *counts)
    clipped = result.metrics["vf_clipfrac"]
    return loss, clipped.total / clipped.weight.clamp(min=1)


def _name(name_or_enum: str | Enum) -> str:
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)


Metrics: TypeAlias = dict[str, float]


def compute_response_mask(data: DataProto) -> Tensor:
    """Return the columns of `attention_mask` that belong to the responses; [B, R]."""
    length = data.batch[fields.RESPONSES].shape[1]
    return cast(Tensor, data.batch[fields.ATTENTION_MASK][:, -length:].clamp(max=1))


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, Metrics]:
    """Write `token_level_rewards` = scores − β·KL(policy ‖ reference), then adapt β.

    Reads `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask`. Returns the
    batch, and the mean KL of the sequences with the β that was used.
    """
    mask, beta = data.batch[fields.RESPONSE_MASK], kl_ctrl.value
    old, reference = data.batch[fields.OLD_LOG_PROBS], data.batch[fields.REF_LOG_PROB]
    kl_BT = kl_penalty_forward(old, reference, kl_penalty) * mask
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
    name = _name(adv_estimator)
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
    estimate = get_adv_estimator_fn(name)
    data.batch[fields.ADVANTAGES], data.batch[fields.RETURNS] = estimate(**given)
    return data
