"""The table of policy losses, and the one way to call them. Shapes: B samples, T tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quadriga.algorithms import clipped_losses as clipped
from quadriga.algorithms import covariance_losses as covariance
from quadriga.algorithms import registry
from quadriga.algorithms import sequence_losses as sequence
from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.masked import masked_mean
from quadriga.algorithms.partial import Partial
from quadriga.errors import AlgorithmError

PolicyLossFn = Callable[..., PolicyLoss]

# What a loss may ask for by parameter name; every other parameter is a setting.
INPUTS = (
    "log_prob_BT",
    "old_log_prob_BT",
    "advantages_BT",
    "response_mask_BT",
    "rollout_log_prob_BT",
    "entropy_BT",
    "selected_BT",
)
# Settings that a run hands to whichever loss it uses; others pass them by in silence.
SHARED_SETTINGS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass(frozen=True)
class PolicyLossEntry:
    """One policy loss.

    Attributes:
        fn: takes the `needs` and the `settings` by keyword, gives a `PolicyLoss`.
        formula, paper: for the reader; `paper` is an arXiv id.
        needs: which of `INPUTS` it takes.
        settings: which settings it and its `select` read; `select_settings` those of `select`.
        origin: "built-in" or the user's file.
        aggregation: the mode its paper uses.
        one_per_sequence: True if the loss is one number a response (a weight a token would then
            bend it, so weights are averaged first).
        select: chooses `selected_BT` over the whole batch, from what is known before the update.
    """

    fn: PolicyLossFn
    formula: str
    paper: str
    needs: tuple[str, ...]
    settings: tuple[str, ...]
    origin: str
    aggregation: str = "token-mean"
    one_per_sequence: bool = False
    select: Callable[..., Tensor] | None = None
    select_settings: tuple[str, ...] = ()

    @property
    def needs_rollout_log_probs(self) -> bool:
        """True if the log-probabilities of the sampling engine are wanted."""
        return "rollout_log_prob_BT" in self.needs

    @property
    def needs_entropy(self) -> bool:
        """True if the entropy of each token's distribution is wanted."""
        return "entropy_BT" in self.needs


def _entry(
    fn: PolicyLossFn,
    formula: str,
    paper: str,
    *,
    aggregation: str = "token-mean",
    one_per_sequence: bool = False,
    select: Callable[..., Tensor] | None = None,
) -> PolicyLossEntry:
    needs, settings = registry.split_parameters(fn, INPUTS)
    selecting = () if select is None else registry.split_parameters(select, INPUTS)[1]
    return PolicyLossEntry(
        fn,
        formula,
        paper,
        needs,
        settings + selecting,
        registry.origin_of(fn),
        aggregation,
        one_per_sequence,
        select,
        selecting,
    )


POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "ppo_clip": _entry(
        clipped.ppo_clip,
        "max(−A r, −A clip(r, 1−ε_low, 1+ε_high)), at most −A c where A < 0",
        "1707.06347, 2503.14476, 1912.09729",
    ),
    "gspo": _entry(
        sequence.gspo,
        "max(−A s_i, −A clip(s_i));  s_i = exp(mean_t log r_t)",
        "2507.18071",
        aggregation="seq-mean-token-mean",
    ),
    "gspo_token": _entry(
        sequence.gspo_token,
        "as gspo with s_it = sg[s_i] π/sg[π]",
        "2507.18071",
        aggregation="seq-mean-token-mean",
    ),
    "cispo": _entry(clipped.cispo, "−sg[clip(r, 1−ε_low, 1+ε_high)] A log π", "2506.13585"),
    "sapo": _entry(
        clipped.sapo,
        "−A (4/τ) σ(τ (r − 1)), τ by the sign of A",
        "2511.20347",
        aggregation="seq-mean-token-mean",
    ),
    "geo_mean": _entry(
        sequence.geo_mean,
        "−A exp(mean_t of log r_t, clipped to (−ε_low, ε_high) on the side that A pushes)",
        "2507.20673",
        aggregation="seq-mean-token-mean",
        one_per_sequence=True,
    ),
    "clip_cov": _entry(
        covariance.clip_cov,
        "ppo_clip, 0 at some tokens of high cov(log π, A)",
        "2505.22617",
        select=covariance.select_clip_cov,
    ),
    "kl_cov": _entry(
        covariance.kl_cov,
        "−A r, plus β |log r| at the tokens of highest cov(log π, A)",
        "2505.22617",
        select=covariance.select_kl_cov,
    ),
    "gpg": _entry(clipped.policy_gradient, "−A log π", "2504.02546"),
    "policy_gradient": _entry(
        clipped.policy_gradient, "−A log π", "Williams 1992", aggregation="seq-mean-token-sum"
    ),
    "decoupled_ppo": _entry(
        clipped.decoupled_ppo, "(π_old/π_rollout) · ppo_clip(π/π_old)", "2110.00641, 2505.24298"
    ),
}

SELECT_FIRST = " Call `select_tokens` once over the whole batch; a part of it cannot know."
# Names by which people who come from elsewhere know the same loss.
ALIASES = {"vanilla": "ppo_clip", "ppo": "ppo_clip", "gmpo": "geo_mean"}


def get_policy_loss(name: str) -> PolicyLossEntry:
    """The loss of that name or alias. Raises `UnknownNameError` with the nearest name."""
    return registry.look_up(POLICY_LOSSES, ALIASES.get(name, name), "policy loss")


def register_policy_loss(
    name: str, *, formula: str = "", paper: str = "", aggregation: str = "token-mean"
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that adds a loss to the table.

    The function's parameters say what it takes: any of `INPUTS` by name (masks arrive as bool),
    and settings with defaults (from `policy_loss.options` and the shared settings). It returns a
    `PolicyLoss`, or only the loss of each token [B, T].

    Raises:
        InputError: the name is taken, or a parameter is neither an input nor has a default.
    """

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        entry = _entry(fn, formula, paper, aggregation=aggregation)
        registry.refuse_second(
            {**POLICY_LOSSES, **{a: POLICY_LOSSES[n] for a, n in ALIASES.items()}},
            name,
            entry.origin,
            "policy loss",
        )
        POLICY_LOSSES[name] = entry
        return fn

    return add


def select_tokens(
    name: str,
    *,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    **settings: Any,
) -> Tensor | None:
    """`selected_BT` for the whole batch (bool), or None if the loss does not select tokens.

    Call it once, before the batch is split, and pass the rows on with the batch.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError;
        AlgorithmError: a setting out of range.
    """
    entry = get_policy_loss(name)
    if entry.select is None:
        return None
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    tensors = {"old_log_prob_BT": old_log_prob_BT, "advantages_BT": advantages_BT}
    return entry.select(
        **tensors,
        response_mask_BT=_check(response_mask_BT, tensors, validate=True),
        **{key: value for key, value in chosen.items() if key in entry.select_settings},
    )


def compute_policy_loss(
    name: str,
    *,
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    rollout_log_prob_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    selected_BT: Tensor | None = None,
    importance_weights_BT: Tensor | None = None,
    validate: bool = True,
    **settings: Any,
) -> PolicyLoss:
    """The loss of each token by the policy loss `name`; any rows of the batch may be given.

    Args:
        log_prob_BT: log π of the response tokens now, with gradient.
        old_log_prob_BT: the same at the start of the step.
        advantages_BT, response_mask_BT: as from `compute_advantages`.
        selected_BT: from `select_tokens` over the whole batch, for the losses that need it.
        importance_weights_BT: fixed weight of each token (`importance.py`).
        validate: look for NaN and infinity (one reduction a tensor).
        settings: by name; shared ones (`SHARED_SETTINGS`) may be given to any loss.

    Returns:
        `PolicyLoss`: loss_BT at least float32, 0 outside the mask.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError;
        AlgorithmError: an input that this loss needs is missing.
    """
    entry = get_policy_loss(name)
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    given = {
        "log_prob_BT": log_prob_BT,
        "old_log_prob_BT": old_log_prob_BT,
        "advantages_BT": advantages_BT,
        "rollout_log_prob_BT": rollout_log_prob_BT,
        "entropy_BT": entropy_BT,
        "selected_BT": selected_BT,
    }
    _require_inputs(name, entry, given)
    needed = {need: given.get(need) for need in entry.needs if need != "selected_BT"}
    inputs = {need: tensor for need, tensor in needed.items() if tensor is not None}
    mask = _check(response_mask_BT, {**inputs, "log_prob_BT": log_prob_BT}, validate)
    inputs = {key: as_float(tensor).masked_fill(~mask, 0) for key, tensor in inputs.items()}
    if selected_BT is not None and "selected_BT" in entry.needs:
        require_same_shape("response_mask", mask, selected=selected_BT)
        inputs["selected_BT"] = to_bool_mask(selected_BT, "selected")
    result = entry.fn(
        **inputs,
        **({"response_mask_BT": mask} if "response_mask_BT" in entry.needs else {}),
        **{key: value for key, value in chosen.items() if key not in entry.select_settings},
    )
    if entry.origin != "built-in":
        result = _guarded(name, result, mask, validate)
    if importance_weights_BT is None:
        return result
    return _weighted(result, importance_weights_BT, mask, entry.one_per_sequence, validate)


def _require_inputs(name: str, entry: PolicyLossEntry, given: Mapping[str, Tensor | None]) -> None:
    missing = [need for need in entry.needs if need in given and given[need] is None]
    if missing:
        raise AlgorithmError(
            f"The policy loss `{name}` needs {', '.join(f'`{m}`' for m in missing)}, "
            f"which the batch does not give." + (SELECT_FIRST if "selected_BT" in missing else ""),
            tensor=missing[0],
        )


def _check(response_mask_BT: Tensor, tensors: dict[str, Tensor], validate: bool) -> Tensor:
    require_matrix("response_mask", response_mask_BT)
    named = {key.removesuffix("_BT"): tensor for key, tensor in tensors.items()}
    require_same_shape("response_mask", response_mask_BT, **named)
    mask = to_bool_mask(response_mask_BT)
    if validate:
        require_finite(mask, **named)
    return mask


def _guarded(name: str, result: PolicyLoss | Tensor, mask: Tensor, validate: bool) -> PolicyLoss:
    """A user's result: of the mask's shape, finite under it, 0 outside."""
    loss = PolicyLoss(result) if isinstance(result, Tensor) else result
    named = {f"loss of {name}": loss.loss_BT}
    require_same_shape("response_mask", mask, **named)
    if validate:
        require_finite(mask, **named)
    return PolicyLoss(loss.loss_BT.masked_fill(~mask, 0), loss.metrics)


def _weighted(
    loss: PolicyLoss, weights_BT: Tensor, mask: Tensor, one_per_sequence: bool, validate: bool
) -> PolicyLoss:
    require_same_shape("response_mask", mask, importance_weights=weights_BT)
    if validate:
        require_finite(mask, importance_weights=weights_BT)
    weights = as_float(weights_BT.detach()).masked_fill(~mask, 0)
    if one_per_sequence:
        weights = masked_mean(weights, mask, dim=-1)[:, None] * mask
    metrics = {**loss.metrics, "importance_weight": Partial.mean(weights, mask)}
    return PolicyLoss(loss.loss_BT * weights, metrics)
