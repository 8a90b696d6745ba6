"""All tables as rows: what the command `quadriga algorithms` prints."""

from dataclasses import dataclass
from typing import Literal

from quadriga.algorithms.advantages import ADVANTAGES, AdvantageEntry
from quadriga.algorithms.aggregation import AGGREGATIONS
from quadriga.algorithms.importance import LEVELS
from quadriga.algorithms.kl import KL_ESTIMATORS
from quadriga.algorithms.policy_losses import POLICY_LOSSES, PolicyLossEntry

AlgorithmKind = Literal[
    "advantage", "policy loss", "aggregation", "KL estimator", "importance correction"
]


@dataclass(frozen=True)
class AlgorithmEntry:
    """One row.

    Attributes:
        name: the value of the setting that selects it.
        kind: the table that it is in.
        formula: the formula in the notation of `docs/notation.md`.
        paper: arXiv ids, or "" where there is none.
        settings: the settings that it reads.
        needs: inputs that not every batch has (advantages, policy losses and KL only).
        origin: "built-in", or the path of the user's file.
    """

    name: str
    kind: AlgorithmKind
    formula: str
    paper: str = ""
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    origin: str = "built-in"


_SCHULMAN = "joschu.net/blog/kl-approx.html"
# Inputs that every batch has; rows do not list them under `needs`.
_ALWAYS_PRESENT = {
    "token_level_rewards_BT", "response_mask_BT", "log_prob_BT", "old_log_prob_BT",
    "advantages_BT", "selected_BT",
}  # fmt: skip


def describe_algorithms() -> list[AlgorithmEntry]:
    """Return every entry of every table, a user's additions included, in the tables' order."""
    rows = [_row("advantage", name, entry) for name, entry in ADVANTAGES.items()]
    rows += [_row("policy loss", name, loss) for name, loss in POLICY_LOSSES.items()]
    for name, mode in AGGREGATIONS.items():
        rows.append(AlgorithmEntry(name, "aggregation", mode.formula, mode.paper, mode.settings))
    for name, estimator in KL_ESTIMATORS.items():
        needs, source = estimator.needs, "" if estimator.needs else _SCHULMAN
        rows.append(AlgorithmEntry(name, "KL estimator", estimator.formula, source, needs=needs))
    settings = ("level", "mode", "upper", "lower")
    for level, formula in LEVELS.items():
        rows.append(AlgorithmEntry(level, "importance correction", formula, settings=settings))
    return rows


def _row(kind: AlgorithmKind, name: str, entry: AdvantageEntry | PolicyLossEntry) -> AlgorithmEntry:
    needs = tuple(need for need in entry.needs if need not in _ALWAYS_PRESENT)
    return AlgorithmEntry(
        name, kind, entry.formula, entry.paper, entry.settings, needs, entry.origin
    )
