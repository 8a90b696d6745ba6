"""Everything the tables hold, as rows to print: `quadriga algorithms`."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.aggregation import AGGREGATIONS
from quadriga.algorithms.importance import LEVELS
from quadriga.algorithms.kl import KL_ESTIMATORS
from quadriga.algorithms.policy_losses import POLICY_LOSSES


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row.

    Attributes:
        name: what the setting takes.
        kind: advantage, policy loss, aggregation, KL estimator or importance correction.
        formula: in the notation of `docs/notation.md`.
        paper: arXiv ids, or "" where there is none.
        settings: the settings it reads.
        needs: what the batch must hold beyond the usual (advantages and losses only).
        origin: "built-in" or the user's file.
    """

    name: str
    kind: str
    formula: str
    paper: str = ""
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    origin: str = "built-in"


_SCHULMAN = "joschu.net/blog/kl-approx.html"
_USUAL = {
    "token_level_rewards_BT",
    "response_mask_BT",
    "log_prob_BT",
    "old_log_prob_BT",
    "advantages_BT",
    "selected_BT",
}


def describe_algorithms() -> list[AlgorithmEntry]:
    """Every entry of every table, a user's additions included, in the tables' order."""
    rows = []
    for kind, table in (("advantage", ADVANTAGES), ("policy loss", POLICY_LOSSES)):
        for name, entry in table.items():
            needs = tuple(need for need in entry.needs if need not in _USUAL)
            rows.append(
                AlgorithmEntry(
                    name, kind, entry.formula, entry.paper, entry.settings, needs, entry.origin
                )
            )
    for name, mode in AGGREGATIONS.items():
        rows.append(AlgorithmEntry(name, "aggregation", mode.formula, mode.paper, mode.settings))
    for name, estimator in KL_ESTIMATORS.items():
        needs, source = estimator.needs, "" if estimator.needs else _SCHULMAN
        rows.append(AlgorithmEntry(name, "KL estimator", estimator.formula, source, needs=needs))
    for name, formula in LEVELS.items():
        rows.append(
            AlgorithmEntry(
                name,
                "importance correction",
                formula,
                settings=("level", "mode", "upper", "lower"),
            )
        )
    return rows
