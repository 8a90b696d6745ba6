"""The answer that a response gives, for votes among the responses to one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quadriga.rewards.answers import marked_answer
from quadriga.rewards.functions import MARKED_ANSWER, FunctionRef
from quadriga.rewards.outcome import Outcome, Sample

EXTRACTORS: dict[FunctionRef, Callable[[str], str | None]] = {MARKED_ANSWER: marked_answer}
"""Rule function → function that returns the answer in a response, or None."""

KEYS = ("answer", "pred")
"""Keys under which a rule function can return the answer, the first one that it has."""


def first_answer(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> str | None:
    """Return the answer of the first part of a score that finds one; None if no part does."""
    found = (answer_of(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True))
    return next((answer for answer in found if answer is not None), None)


def answer_of(sample: Sample, outcome: Outcome) -> str | None:
    """Return the answer in a response; None if its function extracts none, or found none.

    Numbers are written in one form, so that "5", "5.0" and "1,000" are votes for 5 and 1000.
    """
    for key in KEYS:
        if key in outcome.extra:
            return canonical(str(outcome.extra[key]))
    extract = EXTRACTORS.get(sample.function)
    found = None if extract is None else extract(sample.solution_str)
    return None if found is None else canonical(found)


def canonical(answer: str) -> str | None:
    """Return an answer in the form in which answers are compared; None if it is empty."""
    text = answer.strip()
    try:
        return repr(float(text.replace(",", "")))
    except ValueError:
        return text or None
