"""The table of advantage estimators, and the one way to call them.

Legend of shapes: B samples, T response tokens, K reward components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quadriga.algorithms import group_advantages as by_group
from quadriga.algorithms import registry
from quadriga.algorithms import return_advantages as by_return
from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.groups import GroupIds, Groups, has_tokens, make_groups
from quadriga.algorithms.masked import keep
from quadriga.errors import AlgorithmError, GroupError

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

# What an estimator may ask for by parameter name; every other parameter is a setting.
INPUTS = (
    "token_level_rewards_BT",
    "response_mask_BT",
    "groups",
    "values_BT",
    "reward_baselines_B",
    "reward_components_BK",
    "old_log_prob_BT",
)
# Settings that a run hands to whichever estimator it uses; others pass them by in silence.
SHARED_SETTINGS = ("gamma", "lam", "norm_adv_by_std", "whiten_advantages")


@dataclass(frozen=True)
class AdvantageEntry:
    """One estimator.

    Attributes:
        fn: takes the `needs` and the `settings` by keyword, gives (advantages_BT, returns_BT).
        formula, paper: for the reader; `paper` is an arXiv id.
        needs: which of `INPUTS` it takes.
        settings: which settings it reads.
        origin: "built-in" or the user's file.
    """

    fn: AdvantageFn
    formula: str
    paper: str
    needs: tuple[str, ...]
    settings: tuple[str, ...]
    origin: str

    @property
    def needs_values(self) -> bool:
        """True if a critic must have judged the tokens."""
        return "values_BT" in self.needs

    @property
    def needs_groups(self) -> bool:
        """True if several responses a prompt are compared."""
        return "groups" in self.needs

    @property
    def needs_baseline_scores(self) -> bool:
        """True if the greedy response of each prompt must have been scored."""
        return "reward_baselines_B" in self.needs

    @property
    def needs_components(self) -> bool:
        """True if the reward's components are wanted one by one."""
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
    """The estimator of that name. Raises `UnknownNameError` with the nearest name."""
    return registry.look_up(ADVANTAGES, name, "advantage estimator")


def register_advantage(
    name: str, *, formula: str = "", paper: str = ""
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator that adds an estimator to the table.

    The function's parameters say what it takes: any of `INPUTS` by name, and settings with
    defaults (from `algorithm.options` and the shared settings).

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
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a whole batch by the estimator `name`.

    The batch must hold complete groups: statistics are those of the rows given here.

    Args:
        token_level_rewards_BT: float, reward of each token; read under the mask only.
        response_mask_BT: bool, int or float 0/1; 1 on the policy's own tokens.
        group_ids: B ids, equal for samples of one prompt.
        values_BT: the critic's values. reward_baselines_B: the greedy responses' rewards.
        reward_components_BK: the reward's components one by one.
        settings: by name; shared ones (`SHARED_SETTINGS`) may be given to any estimator.

    Returns:
        (advantages_BT, returns_BT), float32 (float64 for float64 rewards), 0 outside the mask,
        without gradient.

    Raises:
        UnknownNameError, UnknownSettingError, ShapeError, MaskError, NonFiniteError, GroupError;
        AlgorithmError: an input that this estimator needs is missing.
    """
    entry = get_advantage(name)
    chosen = registry.choose_settings(settings, entry.settings, SHARED_SETTINGS, name)
    require_matrix("response_mask", response_mask_BT)
    require_same_shape(
        "response_mask", response_mask_BT, token_level_rewards=token_level_rewards_BT
    )
    if response_mask_BT.shape[0] == 0:
        raise GroupError(
            f"The batch for `{name}` holds no samples.", tensor="response_mask", estimator=name
        )
    mask_BT = to_bool_mask(response_mask_BT)
    groups: Groups | None = None
    if entry.needs_groups and group_ids is not None:
        groups = make_groups(group_ids, has_tokens(mask_BT))
    given = {
        "token_level_rewards_BT": token_level_rewards_BT,
        "response_mask_BT": mask_BT,
        "groups": groups,
        "values_BT": values_BT,
        "reward_baselines_B": reward_baselines_B,
        "reward_components_BK": reward_components_BK,
        "old_log_prob_BT": old_log_prob_BT,
    }
    _require_inputs(name, entry, given)
    inputs = {need: given[need] for need in entry.needs}
    if entry.origin == "built-in":
        return entry.fn(**inputs, **chosen)
    return _guarded(name, entry, inputs, chosen, mask_BT)


def _guarded(
    name: str,
    entry: AdvantageEntry,
    inputs: dict[str, Any],
    settings: Mapping[str, Any],
    mask_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """A user's estimator: 0 outside the mask on its way in and out, finite and of one shape."""
    for need, value in inputs.items():
        if need.endswith("_BT") and need != "response_mask_BT":
            require_same_shape("response_mask", mask_BT, **{need.removesuffix("_BT"): value})
            inputs[need] = keep(as_float(value.detach()), mask_BT)
            require_finite(**{need.removesuffix("_BT"): inputs[need]})
    advantages_BT, returns_BT = entry.fn(**inputs, **settings)
    results = {f"advantages of {name}": advantages_BT, f"returns of {name}": returns_BT}
    require_same_shape("response_mask", mask_BT, **results)
    require_finite(mask_BT, **results)
    return keep(advantages_BT.detach(), mask_BT), keep(returns_BT.detach(), mask_BT)


def _require_inputs(name: str, entry: AdvantageEntry, given: Mapping[str, Any]) -> None:
    missing = [need for need in entry.needs if given[need] is None]
    if missing:
        wanted = ["group_ids" if need == "groups" else need for need in missing]
        raise AlgorithmError(
            f"The estimator `{name}` needs {', '.join(f'`{w}`' for w in wanted)}, "
            f"which the batch does not give.",
            tensor=wanted[0],
            estimator=name,
        )
