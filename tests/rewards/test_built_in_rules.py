"""The built-in rules for mathematics and multiple choice, and several rewards with weights."""

import importlib.util
from pathlib import Path

import pytest
import torch

from quadriga.config.commands import EvalConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import RewardConfig
from quadriga.errors import ConfigError, InputError
from quadriga.observability.jsonl import read_jsonl
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager
from quadriga.rewards.manager import parts_of
from quadriga.rewards.multiple_choice import chosen_letter

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs the extra `math`"
)
EXPRESSIONS, CHOICES = (
    list(read_jsonl(Path(__file__).with_name(name)))
    for name in ("expressions.jsonl", "choices.jsonl")
)
MATHS, CHOICE, ARITHMETIC = "quadriga/mathematics", "quadriga/multiple_choice", "openai/gsm8k"


def manager(**settings) -> RewardManager:
    return RewardManager.from_settings(RewardConfig(**{"num_processes": 0, **settings}), None)


def rows_of(source: str, *truths: object) -> list[dict[str, object]]:
    return [{"data_source": source, "reward_model": {"ground_truth": truth}} for truth in truths]


def scores(found) -> list[float]:
    return [outcome.score for outcome in found]


# Mathematics.

EQUAL = [
    (r"\frac{1}{2}", r"The answer is $\boxed{0.5}$."),
    ("1/2", r"so \boxed{\frac12}"),
    ("(1, 2]", r"\boxed{(1,2]}"),
    ("x^2+1", "Thus $1 + x^2$"),
    ("34", "first 3, then\n#### 34"),
    (r"\{1,2\}", r"\boxed{\{2, 1\}}"),
    (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}"),
    ("1,000", "It is 1000."),
    (r"\$18.90", r"\boxed{\$18.90}"),
    (r"\$18.90", "#### 18.9"),
    ("4", r"I first had \boxed{3}, so finally \boxed{4}"),
    ("3", r"\boxed{\boxed{3}}"),
    (r"\{1,2\}", r"$\boxed{1}$ and $\boxed{2}$"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}} and no more"),
    ("42", r"It costs \$42."),
    ("42", r"<think>\boxed{43}</think> \boxed{42}"),
    ("42", r"\fbox{42}"),
]
DIFFERENT = [
    ("7", r"\boxed{8}"), ("7", "no number"), ("7", ""), ("(1,2)", r"\boxed{(1,2]}"),
    ("3", r"I first had \boxed{3}, so finally \boxed{4}"), ("7", r"\boxed{7"),
    ("42", r"<think>so \boxed{42}</think>"), ("42", "<think>so it is 42"),
    ("5", r"\fbox{4}, \boxed{5}"),
]  # fmt: skip


@needs_math_verify
def test_answers_of_mathematics_are_compared_as_expressions() -> None:
    rule = manager()
    texts = [text for _, text in (*EQUAL, *DIFFERENT)]
    rows = rows_of(MATHS, *(truth for truth, _ in (*EQUAL, *DIFFERENT)))
    assert scores(rule.score_texts(texts, rows)) == [1.0] * len(EQUAL) + [0.0] * len(DIFFERENT)
    half, same = rule.answers[:2]
    assert half == same == "1/2"
    assert rule.answers[len(EQUAL) + 1 : len(EQUAL) + 3] == [None, None]


@needs_math_verify
def test_of_labelled_expressions_none_is_accepted_wrongly_and_few_are_refused() -> None:
    """Forms of answers that models write. Refused are 1/2 for sin 30° and the root of -1 for i."""
    from quadriga.rewards.mathematics import compute_score

    assert len(EXPRESSIONS) > 500
    found = [
        bool(compute_score("", f"so \\boxed{{{row['answer']}}}.", row["truth"])["score"])  # type: ignore[arg-type]
        for row in EXPRESSIONS
    ]
    pairs = list(zip(EXPRESSIONS, found, strict=True))
    assert [row for row, equal in pairs if equal and not row["equal"]] == []
    assert len([row for row, equal in pairs if row["equal"] and not equal]) <= 2


@needs_math_verify
def test_a_ground_truth_that_is_no_expression_fails_the_sample_with_its_text() -> None:
    rule = manager()
    (outcome,) = rule.score_texts([r"\boxed{7}"], rows_of(MATHS, "no $expression"))
    assert outcome.status == "raised" and "no $expression" in outcome.detail


@needs_math_verify
def test_an_expression_that_takes_too_long_exceeds_the_deadline_of_its_sample_alone() -> None:
    rule = manager(num_processes=1, timeout_s=6.0)
    texts = [r"\boxed{7}", r"\boxed{9^{9^{9}}}"]
    try:
        good, slow = rule.score_texts(texts, rows_of(MATHS, "7", "7"))
    finally:
        rule.close()
    assert (good.status, good.score) == ("scored", 1.0)
    assert (slow.status, slow.score) == ("timed_out", 0.0)


def test_a_missing_package_is_named_before_a_run_starts(monkeypatch) -> None:
    import sys

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else find(name)
    )
    monkeypatch.delitem(sys.modules, "quadriga.rewards.mathematics", raising=False)
    with pytest.raises(InputError, match=r"pip install 'quadriga\[math\]'"):
        manager().check(rows_of(MATHS, "7"))
    sys.modules.pop("quadriga.rewards.mathematics", None)


@needs_math_verify
def test_a_response_of_megabytes_of_boxes_is_searched() -> None:
    """With a cost that is quadratic in the length, this takes hours."""
    from quadriga.rewards.mathematics import _last_boxes

    open_boxes = r"\boxed{" * (1 << 20)
    assert _last_boxes(open_boxes) == r"$\boxed{$"
    assert _last_boxes(r"\boxed{1}" * (1 << 18)).count("boxed") == 1 << 18


# Multiple choice.


def test_a_stated_letter_is_read_and_free_text_is_not() -> None:
    """Of responses that people labelled, those that state a letter in one of the forms are read.

    Another letter than the label is read only where a statement is taken back, or is one of two.
    """
    read = [(row["letter"], chosen_letter(row["text"]), row["text"]) for row in CHOICES]
    assert sum(letter is not None for _, letter, _ in read) > 230
    assert len([row for row in read if row[1] not in (row[0], None)]) <= 7
    assert chosen_letter(r"The answer is A. Wait. So $\boxed{C}$ holds") == "C"
    assert chosen_letter("answer" + "\n" * 100_000) is chosen_letter("answer: " * 100_000) is None


# Several rewards with weights.

RULES = """
def is_short(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "boom":
        raise ValueError("planted")
    return {"score": float(len(solution_str) < 8), "length": len(solution_str)}
"""


@pytest.fixture
def parts(tmp_path) -> str:
    (tmp_path / "rules.py").write_text(RULES)
    return (
        f"reward.parts={{correct: {{weight: 2}}, short: {{path: '{tmp_path / 'rules.py'}', "
        "name: is_short, weight: 0.5}}"
    )


@pytest.mark.parametrize("processes", [0, 1])
def test_the_score_is_the_weighted_sum_and_the_parts_are_logged(parts, processes) -> None:
    """Scores 1 and 1, 1 and 0, 0 and 1 with the weights 2 and 0.5; the last one fails."""
    config = load_config(EvalConfig, [parts, f"reward.num_processes={processes}"])
    rule = RewardManager.from_settings(config.reward, None)
    texts = ["#### 7", "so it is #### 7", "#### 8", "boom"]
    try:
        found = rule.score_texts(texts, rows_of(ARITHMETIC, *["7"] * 4))
    finally:
        rule.close()
    assert scores(found) == [2.5, 2.0, 0.5, 0.0]
    assert found[1].extra == {"correct": 1.0, "short": 0.0, "short/length": 15.0}
    assert rule.answers == ["7.0", "7.0", "8.0", None]
    assert rule.metrics["reward/extra/correct"] == pytest.approx(2 / 3)
    assert rule.metrics["reward/extra/short"] == pytest.approx(2 / 3)
    assert rule.metrics["reward/failed"] == 0.25
    (failure,) = rule.failures
    assert failure.row == 3 and "short: " in failure.detail and "planted" in failure.detail


def test_the_parts_can_be_components_of_an_estimator(parts) -> None:
    class Words:
        def batch_decode(self, sequences, /, *, skip_special_tokens):
            return ["#### 7" if ids == [7] else "so it is #### 7" for ids in sequences]

    config = load_config(EvalConfig, [parts, "reward.num_processes=0"])
    rule = RewardManager.from_settings(config.reward, Words(), ["correct", "short"])
    batch = DataProto.from_dict(
        {"responses": torch.tensor([[7], [8]]), "response_mask": torch.ones(2, 1)},
        {key: [row[key] for row in rows_of(ARITHMETIC, "7", "7")]
         for key in ("data_source", "reward_model")},
    )  # fmt: skip
    out = rule(batch).batch
    assert out["reward_components"].tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert out["token_level_scores"].tolist() == [[2.5], [2.0]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"parts": {"a": 3}}, "reward.parts.a must be a section of settings, got 3"),
        ({"parts": {"a": {"wieght": 1}}}, "no setting reward.parts.a.wieght; did you mean weight"),
        ({"parts": {"a": {"weight": "much"}}}, "reward.parts.a.weight must be a number"),
        ({"parts": {"a": {"weight": float("nan")}}}, "reward.parts.a.weight must be a finite"),
        ({"parts": {"a": {"name": "f"}}}, "reward.parts.a.name selects a function"),
        ({"parts": {"a": {}}, "path": "x.py"}, "reward.path and reward.parts both say"),
    ],
)
def test_wrong_parts_are_refused(given, words) -> None:
    with pytest.raises(ConfigError, match=words):
        parts_of(RewardConfig(**given))
