"""The documentation contains every entry of the tables, with its paper and its settings."""

import ast
import re
from pathlib import Path

import pytest

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.catalog import AlgorithmEntry, describe_algorithms
from quadriga.algorithms.importance import MODES as IMPORTANCE_MODES
from quadriga.algorithms.kl import ALIASES as KL_ALIASES
from quadriga.algorithms.policy_losses import ALIASES as LOSS_ALIASES

CONCEPTS = Path(__file__).resolve().parents[2] / "docs" / "concepts"
PAGES = {
    "advantage": "advantages.md",
    "policy loss": "policy_losses.md",
    "aggregation": "aggregation.md",
    "KL estimator": "kl.md",
    "importance correction": "off_policy.md",
}
BUILT_IN = [row for row in describe_algorithms() if row.origin == "built-in"]


@pytest.mark.parametrize("row", BUILT_IN, ids=lambda row: f"{row.kind} {row.name}")
def test_every_entry_is_documented(row: AlgorithmEntry) -> None:
    page = (CONCEPTS / PAGES[row.kind]).read_text()
    assert f"`{row.name}`" in page
    for identifier in re.findall(r"\d{4}\.\d{5}", row.paper):
        assert identifier in page
    for setting in row.settings:
        assert f"`{setting}`" in page


def test_aliases_and_modes_are_documented() -> None:
    for name in LOSS_ALIASES:
        assert f"`{name}`" in (CONCEPTS / "policy_losses.md").read_text()
    for name in ("kl", "mse"):
        assert name in KL_ALIASES and f"`{name}`" in (CONCEPTS / "kl.md").read_text()
    for name in IMPORTANCE_MODES:
        assert f"`{name}`" in (CONCEPTS / "off_policy.md").read_text()


def test_the_table_of_estimators_lists_their_settings() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \|(.*)$", (CONCEPTS / "advantages.md").read_text(), re.MULTILINE)
    )
    assert set(rows) == set(ADVANTAGES)
    for name, entry in ADVANTAGES.items():
        read = rows[name].split("|")[2]
        assert tuple(re.findall(r"`(\w+)`", read)) == entry.settings


def test_every_known_difference_to_verl_is_documented() -> None:
    """`EXPLAINED` in the benchmark and the table in the documentation have the same cases."""
    tree = ast.parse((CONCEPTS.parents[1] / "benchmarks" / "compare_algorithms.py").read_text())
    explained = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPLAINED"
    )
    cases = {key.value for key in explained.keys}
    page = (CONCEPTS.parent / "measurements/differences.md").read_text().partition("\n## TRL")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    assert cases == {name for row in rows for name in re.findall(r"`([^`]*)`", row)}
