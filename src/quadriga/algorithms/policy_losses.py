"""The table of policy losses, and the function that calls them. Shapes: B samples, T tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quadriga.algorithms import clipped_losses as clipped, covariance_losses as covariance, registry
from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.tensors import (
    as_float,
    checked_mask,
    masked_mean,
    require_same_shape,
    to_bool_mask,
)

PolicyLossFn = Callable[..., PolicyLoss]

# Parameter names by which a loss receives tensors. Every other parameter is a setting.
INPUTS = (
    "log_prob_BT", "old_log_prob_BT", "advantages_BT", "response_mask_BT", "rollout_log_prob_BT",
    "entropy_BT", "selected_BT",
)  # fmt: skip
# Settings of the run that may be passed to any loss. A loss that does not read one of them ignores
# it, so that the actor can pass the same settings whichever loss is chosen.
SHARED_SETTINGS = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass(frozen=True)
class PolicyLossEntry(registry.Entry[PolicyLossFn]):
    """One policy loss. `settings` are those that `fn` and `select` read.

    Attributes:
        aggregation: the aggregation mode of the paper.
        one_per_sequence: whether the loss is one number per response. Importance weights are then
            averaged over the response.
        select: chooses `selected_BT` over the whole batch before the update; None for losses that
            do not select tokens.
        select_settings: the names of the settings that `select` reads.
    """

    aggregation: str = "token-mean"
    one_per_sequence: bool = False
    select: Callable[..., Tensor] | None = None
    select_settings: tuple[str, ...] = ()

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether rows whose advantages are all 0 have loss 0 and gradient 0, and change nothing
        for other rows. Nothing is known of a user's loss."""
        return self.origin == "built-in" and self.select is None


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
    entry = fn, formula, paper, needs, settings + selecting, registry.origin_of(fn)
    return PolicyLossEntry(*entry, aggregation, one_per_sequence, select, selecting)


POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "ppo_clip": _entry(
        clipped.ppo_clip,
        "max(−A r, −A clip(r, 1−ε_low, 1+ε_high)), at most −A c where A < 0",
        "1707.06347, 2503.14476, 1912.09729",
    ),
    "gspo": _entry(
        clipped.gspo,
        "max(−A s_i, −A clip(s_i));  s_i = exp(mean_t log r_t)",
        "2507.18071",
        aggregation="seq-mean-token-mean",
    ),
    "gspo_token": _entry(
        clipped.gspo_token,
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
        clipped.geo_mean,
        "−A exp(mean_t clipped log r_t);  log r_t ≤ ε_high where A > 0, ≥ −ε_low where A < 0",
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

SELECT_FIRST = (
    "Call `select_tokens` once over the whole batch: the selection depends on means over all "
    "rows, which a micro-batch does not contain."
)
# Names of the same losses in other frameworks and papers.
ALIASES = {"vanilla": "ppo_clip", "ppo": "ppo_clip", "gmpo": "geo_mean"}


def get_policy_loss(name: str) -> PolicyLossEntry:
    """Return the loss `name`, or the loss with that alias.

    Raises:
        UnknownNameError: no loss has this name. The message contains the nearest name.
    """
    return registry.look_up(POLICY_LOSSES, ALIASES.get(name, name), "policy loss")


def register_policy_loss(
    name: str, *, formula: str = "", paper: str = "", aggregation: str = "token-mean"
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that adds a loss to the table.

    The parameters of the decorated function state what it takes: any name of `INPUTS` (masks are
    bool), and settings with defaults (read from `policy_loss.options` and the shared settings).
    The function returns a `PolicyLoss`, or only the loss of each token [B, T].

    Raises:
        InputError: the name is taken, or a parameter is neither an input nor has a default.
    """

    def add(fn: PolicyLossFn) -> PolicyLossFn:
        entry = _entry(fn, formula, paper, aggregation=aggregation)
        taken = POLICY_LOSSES | {alias: POLICY_LOSSES[known] for alias, known in ALIASES.items()}
        registry.refuse_second(taken, name, entry.origin, "policy loss")
        POLICY_LOSSES[name] = entry
        return fn

    return add


def select_tokens(
    name: str,
    *,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    **settings: object,
) -> Tensor | None:
    """Select the tokens that a loss treats differently, over the whole batch.

    Call this function once, before the batch is split, and keep the result as a field of the
    batch, so that it is split with the rows.

    Args:
        old_log_prob_BT: log π at the start of the step.
        advantages_BT, response_mask_BT: as in `compute_policy_loss`.
        settings: settings of the loss; `SHARED_SETTINGS` may be passed to any loss.

    Returns:
        `selected_BT`, bool; None if the loss does not select tokens.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError.
        AlgorithmError: a setting is out of range.
    """
    entry = get_policy_loss(name)
    if entry.select is None:
        return None
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    tensors = {"old_log_prob_BT": old_log_prob_BT, "advantages_BT": advantages_BT}
    return entry.select(
        **tensors,
        response_mask_BT=_checked_mask(response_mask_BT, tensors),
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
    **settings: object,
) -> PolicyLoss:
    """Compute the loss of each token with the policy loss `name`, for any rows of the batch.

    Args:
        log_prob_BT: log π of the response tokens under the current policy, with gradient.
        old_log_prob_BT: log π at the start of the step.
        advantages_BT, response_mask_BT: as in `compute_advantages`.
        rollout_log_prob_BT: log π_rollout, for losses that need it.
        entropy_BT: entropy in nats, for losses that need it.
        selected_BT: from `select_tokens` over the whole batch, for losses that need it.
        importance_weights_BT: constant weight of each token (`importance.py`).
        settings: settings of the loss; `SHARED_SETTINGS` may be passed to any loss.

    Returns:
        `PolicyLoss` with `loss_BT` in float32 or float64, 0 outside the mask.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError.
        AlgorithmError: an input that the loss needs is missing.
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
    unselected = selected_BT is None and "selected_BT" in entry.needs
    remedies = (SELECT_FIRST,) if unselected else ()
    inputs = registry.needed_inputs(f"The policy loss `{name}`", entry.needs, given, *remedies)
    inputs.pop("selected_BT", None)
    mask = _checked_mask(response_mask_BT, {**inputs, "log_prob_BT": log_prob_BT})
    # 0 outside the mask, so that a loss may multiply by the mask: 0 · NaN would be NaN.
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
        result = _check_user_result(name, result, mask)
    if importance_weights_BT is None:
        return result
    checked_mask(mask, importance_weights=importance_weights_BT)
    weights = as_float(importance_weights_BT.detach()).masked_fill(~mask, 0)
    # GMPO has the same loss −1 at both tokens of a response. With weights 0.5 and 1.5, both tokens
    # get the mean weight 1 and keep the loss −1, so it remains one number per response.
    if entry.one_per_sequence:
        weights = masked_mean(weights, mask, dim=-1)[:, None] * mask
    metrics = {**result.metrics, "importance_weight": Partial.mean(weights, mask)}
    return PolicyLoss(result.loss_BT * weights, metrics)


def _checked_mask(response_mask_BT: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    named = {key.removesuffix("_BT"): tensor for key, tensor in tensors.items()}
    return checked_mask(response_mask_BT, **named)


def _check_user_result(name: str, result: PolicyLoss | Tensor, mask: Tensor) -> PolicyLoss:
    """Return the result of a user's loss with 0 outside the mask, after checking it."""
    loss = PolicyLoss(result) if isinstance(result, Tensor) else result
    checked_mask(mask, **{f"loss of {name}": loss.loss_BT})
    return PolicyLoss(loss.loss_BT.masked_fill(~mask, 0), loss.metrics)
