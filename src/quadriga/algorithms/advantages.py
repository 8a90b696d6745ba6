"""The table of advantage estimators, and the function that calls them.

Shapes: B samples (responses), T response tokens, K reward components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quadriga.algorithms import (
    group_advantages as by_group,
    registry,
    return_advantages as by_return,
)
from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.groups import GroupIds, Groups, has_tokens, make_groups
from quadriga.algorithms.masked import masked_copy
from quadriga.errors import AlgorithmError, GroupError

AdvantagesAndReturns = tuple[Tensor, Tensor]
AdvantageFn = Callable[..., AdvantagesAndReturns]
EstimatorInput = Tensor | Groups

# Parameter names by which an estimator receives tensors. Every other parameter is a setting.
INPUTS = (
    "token_level_rewards_BT",
    "response_mask_BT",
    "groups",
    "values_BT",
    "reward_baselines_B",
    "reward_components_BK",
    "old_log_prob_BT",
)
# Settings of the run that may be passed to any estimator. An estimator that does not read one of
# them ignores it, so that the trainer can pass the same settings whichever estimator is chosen.
SHARED_SETTINGS = ("gamma", "lam", "norm_adv_by_std", "whiten_advantages")


@dataclass(frozen=True)
class AdvantageEntry:
    """One advantage estimator.

    Attributes:
        fn: the estimator. It takes `needs` and `settings` by keyword and returns
            (advantages_BT, returns_BT).
        formula: the formula in the notation of `docs/notation.md`.
        paper: the arXiv id.
        needs: the names from `INPUTS` that `fn` takes.
        settings: the names of the settings that `fn` reads.
        origin: "built-in", or the path of the user's file.
    """

    fn: AdvantageFn
    formula: str
    paper: str
    needs: tuple[str, ...]
    settings: tuple[str, ...]
    origin: str

    @property
    def needs_values(self) -> bool:
        """Whether the estimator reads the critic's values."""
        return "values_BT" in self.needs

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares the responses of one prompt."""
        return "groups" in self.needs

    @property
    def needs_baseline_scores(self) -> bool:
        """Whether the estimator reads the reward of each prompt's greedy response."""
        return "reward_baselines_B" in self.needs

    @property
    def needs_components(self) -> bool:
        """Whether the estimator reads the components of the reward separately."""
        return "reward_components_BK" in self.needs


def _entry(fn: AdvantageFn, formula: str, paper: str) -> AdvantageEntry:
    needs, settings = registry.split_parameters(fn, INPUTS)
    return AdvantageEntry(fn, formula, paper, needs, settings, registry.origin_of(fn))


ADVANTAGES: dict[str, AdvantageEntry] = {
    "gae": _entry(
        by_return.gae, "δ_t = r_t + γV_{t+1} − V_t;  A_t = δ_t + γλA_{t+1};  whitened", "1506.02438"
    ),
    "grpo": _entry(by_group.grpo, "A_i = (r_i − mean r) / (std r + 1e-6)", "2402.03300"),
    "dr_grpo": _entry(by_group.dr_grpo, "A_i = r_i − mean r", "2503.20783"),
    "grpo_passk": _entry(
        by_group.grpo_passk, "A_best = (r_best − r_second) / (std r + 1e-6), others 0", "2503.19595"
    ),
    "rloo": _entry(by_group.rloo, "A_i = r_i − mean of the other r", "2402.14740"),
    "remax": _entry(by_return.remax, "A_t = Σ_{s≥t} r_s − r(greedy)", "2310.10505"),
    "opo": _entry(by_group.opo, "A_i = r_i − Σ l_j r_j / Σ l_j", "2505.23585"),
    "gpg": _entry(by_group.gpg, "A_i = α (r_i − mean r) / F_norm;  α = B / (B − M)", "2504.02546"),
    "reinforce_plus_plus": _entry(
        by_return.reinforce_plus_plus, "R_t = r_t + γR_{t+1};  A = whiten(R)", "2501.03262"
    ),
    "reinforce_plus_plus_baseline": _entry(
        by_group.reinforce_plus_plus_baseline, "A = whiten(r_i − mean r)", "2501.03262"
    ),
    "gdpo": _entry(
        by_group.gdpo, "A_i = whiten(Σ_k w_k (r_ik − mean r_k) / (std r_k + 1e-6))", "2601.05242"
    ),
}


def get_advantage(name: str) -> AdvantageEntry:
    """Return the estimator `name`. Raises `UnknownNameError`, with the nearest name, if none."""
    return registry.look_up(ADVANTAGES, name, "advantage estimator")


def register_advantage(
    name: str, *, formula: str = "", paper: str = ""
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Return a decorator that adds an estimator to the table.

    The parameters of the decorated function state what it takes: any name of `INPUTS`, and
    settings with defaults (read from `algorithm.options` and from the shared settings).

    Raises:
        InputError: the name is taken, or a parameter is neither an input nor has a default.
    """

    def add(fn: AdvantageFn) -> AdvantageFn:
        entry = _entry(fn, formula, paper)
        registry.refuse_second(ADVANTAGES, name, entry.origin, "advantage estimator")
        ADVANTAGES[name] = entry
        return fn

    return add


def compute_advantages(
    name: str,
    *,
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    group_ids: GroupIds | None = None,
    values_BT: Tensor | None = None,
    reward_baselines_B: Tensor | None = None,
    reward_components_BK: Tensor | None = None,
    old_log_prob_BT: Tensor | None = None,
    **settings: object,
) -> AdvantagesAndReturns:
    """Compute advantages and returns of a whole batch with the estimator `name`.

    The batch must contain complete prompt groups: means and standard deviations are those of the
    given rows.

    Args:
        token_level_rewards_BT: reward of each token, any float dtype; ignored outside the mask.
        response_mask_BT: bool, int or float 0/1; 1 on the tokens that the policy generated.
        group_ids: B ids; samples of one prompt have equal ids.
        values_BT: the critic's values.
        reward_baselines_B: reward of the greedy response to each sample's prompt.
        reward_components_BK: the components of the reward.
        old_log_prob_BT: log π_old; no built-in estimator reads it.
        settings: settings of the estimator; `SHARED_SETTINGS` may be passed to any estimator.

    Returns:
        (advantages_BT, returns_BT): float32 (float64 for float64 rewards), 0 outside the mask,
        detached.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError, GroupError.
        AlgorithmError: an input that the estimator needs is missing.
    """
    entry = get_advantage(name)
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    mask_BT = _checked_mask(name, response_mask_BT, token_level_rewards_BT)
    groups: Groups | None = None
    if entry.needs_groups and group_ids is not None:
        groups = make_groups(group_ids, has_tokens(mask_BT))
    given: dict[str, EstimatorInput | None] = {
        "token_level_rewards_BT": token_level_rewards_BT,
        "response_mask_BT": mask_BT,
        "groups": groups,
        "values_BT": values_BT,
        "reward_baselines_B": reward_baselines_B,
        "reward_components_BK": reward_components_BK,
        "old_log_prob_BT": old_log_prob_BT,
    }
    inputs = _needed_inputs(name, entry, given)
    if entry.origin == "built-in":
        return entry.fn(**inputs, **chosen)
    return _call_user_estimator(name, entry, inputs, chosen, mask_BT)


def _checked_mask(name: str, response_mask_BT: Tensor, rewards_BT: Tensor) -> Tensor:
    """Return the mask as bool after checking its shape, its values and that it has a row."""
    require_matrix("response_mask", response_mask_BT)
    require_same_shape("response_mask", response_mask_BT, token_level_rewards=rewards_BT)
    if response_mask_BT.shape[0] == 0:
        raise GroupError(
            f"The advantage estimator `{name}` received a batch with no samples; "
            f"`response_mask` must have at least one row.",
            tensor="response_mask",
            estimator=name,
        )
    return to_bool_mask(response_mask_BT)


def _needed_inputs(
    name: str, entry: AdvantageEntry, given: Mapping[str, EstimatorInput | None]
) -> dict[str, EstimatorInput]:
    """Return the inputs that the estimator takes. Raises `AlgorithmError` if one is missing."""
    inputs = {need: value for need in entry.needs if (value := given[need]) is not None}
    missing = [
        "group_ids" if need == "groups" else need for need in entry.needs if need not in inputs
    ]
    if missing:
        raise AlgorithmError(
            f"The advantage estimator `{name}` needs {', '.join(f'`{m}`' for m in missing)}, but "
            f"received None. Pass it, or choose an estimator that does not need it.",
            tensor=missing[0],
            estimator=name,
        )
    return inputs


def _call_user_estimator(
    name: str,
    entry: AdvantageEntry,
    inputs: dict[str, EstimatorInput],
    settings: Mapping[str, object],
    mask_BT: Tensor,
) -> AdvantagesAndReturns:
    """Call a user's estimator with masked inputs, and check and mask its results.

    Built-in estimators mask and check by themselves. A user's function may multiply by the mask,
    which would turn NaN padding into NaN sums, so it receives 0 outside the mask.
    """
    for need, value in inputs.items():
        if isinstance(value, Tensor) and need.endswith("_BT") and need != "response_mask_BT":
            tensor = need.removesuffix("_BT")
            require_same_shape("response_mask", mask_BT, **{tensor: value})
            kept = masked_copy(as_float(value.detach()), mask_BT)
            require_finite(**{tensor: kept})
            inputs[need] = kept
    advantages_BT, returns_BT = entry.fn(**inputs, **settings)
    results = {f"advantages of {name}": advantages_BT, f"returns of {name}": returns_BT}
    require_same_shape("response_mask", mask_BT, **results)
    require_finite(mask_BT, **results)
    return masked_copy(advantages_BT.detach(), mask_BT), masked_copy(returns_BT.detach(), mask_BT)
