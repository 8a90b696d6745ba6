"""Laws of rollout engines: prompts in, sampled responses and their log-probabilities out."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from quadriga.errors import QuadrigaError, RolloutAbilityError, RolloutInputError, ShapeError
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import LogProbKind, RolloutEngine, SamplingParams
from quadriga.testing.laws import Law, LawBroken, check_all, expect, expect_raises, law
from quadriga.testing.rollout_reference import chi_square_p_value, write_reference_model
from quadriga.testing.rollout_subject import (
    PROMPTS,
    SAMPLING,
    BuildRollout,
    Prompts,
    RolloutUnderTest,
    left_padded,
)
from quadriga.testing.rollout_weight_laws import WEIGHT_LAWS

DRAWS = 1500
"""Tokens that are drawn from one distribution for a chi-square test."""
LEAST_P_VALUE = 1e-5
"""A correct engine without seeds fails once in so many chi-square tests."""

GREEDY = replace(SAMPLING, temperature=0.0)


@law("protocol", "the object implements `RolloutEngine` and declares what it can do")
def protocol(subject: RolloutUnderTest) -> None:
    engine = subject.engine
    expect(isinstance(engine, RolloutEngine), True, "isinstance(engine, RolloutEngine)")
    expect(isinstance(engine.abilities, RolloutAbilities), True, "type of abilities")
    expect(bool(engine.name), True, "a name")
    expect(engine.abilities.vocabulary, subject.reference.vocabulary, "abilities.vocabulary")
    expect(engine.version, -1, "version of the folder's weights")


@law("prompts", "prompt ids are used as they are, and padding changes nothing")
def prompts(subject: RolloutUnderTest) -> None:
    sampling = subject.possible(_supported(subject, GREEDY))
    responses = subject.check(sampling, subject.generate(sampling))
    ids, mask = left_padded(PROMPTS)
    before = ids.clone(), mask.clone()
    narrow = ids[1:2, -1:], mask[1:2, -1:]  # the row of one token, without padding
    out = subject.engine.generate(*narrow, sampling, torch.tensor([101]))
    if sampling.greedy:
        expect(subject.check(sampling, out, PROMPTS[1:2]), responses[1:2], "without padding")
    expect([torch.equal(a, b) for a, b in zip(before, (ids, mask), strict=True)], [True] * 2, "ids")


@law("greedy", "temperature 0 gives the most likely token, in the order of the rows")
def greedy(subject: RolloutUnderTest) -> None:
    _applied_or_refused(subject, GREEDY)
    if not subject.refuses(subject.possible(GREEDY)):
        order = [3, 0, 4, 1]
        rows = [PROMPTS[i] for i in order]
        sampling = subject.possible(GREEDY)
        subject.check(sampling, subject.generate(sampling, rows), rows)


@law("log-probabilities", "each kind is of its own distribution, or is refused")
def log_probabilities(subject: RolloutUnderTest) -> None:
    variants = (
        SAMPLING,
        replace(SAMPLING, temperature=0.6),
        replace(SAMPLING, top_k=7),
        replace(SAMPLING, temperature=1.7, top_p=0.8),
        GREEDY,
        replace(GREEDY, min_new_tokens=4),
    )
    for kind in get_args(LogProbKind):
        for variant in variants:
            sampling = replace(variant, log_probs=kind)
            if subject.refuses(sampling):
                _refused(subject, sampling)
            else:
                subject.check(sampling, subject.generate(sampling))


@law("temperature", "tokens are drawn from the distribution at the temperature, or it is refused")
def temperature(subject: RolloutUnderTest) -> None:
    _drawn_or_refused(subject, SAMPLING)
    for value in (0.5, 1.6):
        _drawn_or_refused(subject, replace(SAMPLING, temperature=value))


@law("top-k", "only the k most likely tokens are drawn, by their probability, or it is refused")
def top_k(subject: RolloutUnderTest) -> None:
    for value in (1, 4, 40, subject.reference.vocabulary + 1):
        _drawn_or_refused(subject, replace(SAMPLING, top_k=value))


@law("top-p", "only the most likely tokens that hold the share are drawn, or it is refused")
def top_p(subject: RolloutUnderTest) -> None:
    for value in (1e-6, 0.35, 0.9):
        _drawn_or_refused(subject, replace(SAMPLING, top_p=value))


@law("min-p", "tokens far below the most likely one are not drawn, or it is refused")
def min_p(subject: RolloutUnderTest) -> None:
    for value in (0.03, 0.4, 1.0):
        _drawn_or_refused(subject, replace(SAMPLING, min_p=value))


@law("filter order", "several filters act together in the declared order")
def filter_order(subject: RolloutUnderTest) -> None:
    combinations = (
        replace(SAMPLING, top_k=5, top_p=0.6),
        replace(SAMPLING, top_p=0.8, min_p=0.3),
        replace(SAMPLING, temperature=1.4, top_k=20, top_p=0.7, min_p=0.1),
    )
    for sampling in combinations:
        _drawn_or_refused(subject, sampling)


@law("length", "a response without an end has max_new_tokens tokens and ends by length")
def length(subject: RolloutUnderTest) -> None:
    for count in (1, 5, 30):
        sampling = subject.possible(replace(SAMPLING, max_new_tokens=count, eos_token_ids=()))
        out = subject.generate(sampling)
        subject.check(sampling, out)
        expect(set(out.finish_reason), {"length"}, "finish reasons without an end token")


@law("end tokens", "a response includes its end token and nothing behind it")
def end_tokens(subject: RolloutUnderTest) -> None:
    sampling = subject.possible(SAMPLING)
    rows = PROMPTS * 4
    out = subject.generate(sampling, rows)
    subject.check(sampling, out, rows)
    expect(set(out.finish_reason), {"stop", "length"}, "finish reasons of 24 rows")
    everything = tuple(range(subject.reference.vocabulary))
    one = subject.possible(replace(SAMPLING, eos_token_ids=everything))
    out = subject.generate(one)
    subject.check(one, out)
    expect(out.response_mask.sum(1).tolist(), [1] * len(PROMPTS), "an end token at once")


@law("end of the model", "an end token of the model's files ends a response only if it is given")
def end_of_the_model(subject: RolloutUnderTest) -> None:
    end = int(subject.tokenizer.eos_token_id)
    weights = {"lm_head.weight": subject.original["lm_head.weight"].clone()}
    # The end token gets the row of the token that is most likely behind the first prompt.
    best = subject.greedy_response(PROMPTS[0], replace(GREEDY, max_new_tokens=1))[0]
    weights["lm_head.weight"][end] = 1.5 * weights["lm_head.weight"][best]
    try:
        subject.reference.load(weights)
        subject.engine.update_weights(weights.items(), 1)
        sampling = subject.possible(replace(SAMPLING, eos_token_ids=(), max_new_tokens=8))
        rows = PROMPTS[:1] * 20
        responses = subject.check(sampling, subject.generate(sampling, rows), rows)
        expect(any(end in response[:-1] for response in responses), True, "the token was drawn")
    finally:
        subject.reference.load(subject.original)
        subject.engine.update_weights(subject.original.items(), 2)


@law("stop tokens", "stop_token_ids end a response, also with ignore_eos, or are refused")
def stop_tokens(subject: RolloutUnderTest) -> None:
    stops = tuple(range(100, 140))
    _applied_or_refused(subject, replace(SAMPLING, stop_token_ids=stops))
    _applied_or_refused(subject, replace(SAMPLING, ignore_eos=True))
    _applied_or_refused(subject, replace(SAMPLING, stop_token_ids=stops, ignore_eos=True))
    if "stop_token_ids" in subject.engine.abilities.settings:
        outside = replace(SAMPLING, stop_token_ids=(subject.reference.vocabulary,))
        sampling = subject.possible(outside)
        expect_raises(lambda: subject.generate(sampling), RolloutInputError, "a stop id outside")


@law("min tokens", "no end token and no stop string ends a response too early, or it is refused")
def min_tokens(subject: RolloutUnderTest) -> None:
    _drawn_or_refused(subject, replace(SAMPLING, min_new_tokens=1))
    _drawn_or_refused(subject, replace(SAMPLING, min_new_tokens=1, top_p=0.7))
    for count in (3, SAMPLING.max_new_tokens):
        _applied_or_refused(subject, replace(SAMPLING, min_new_tokens=count))
        _applied_or_refused(subject, replace(GREEDY, min_new_tokens=count))


@law("stop strings", "the token that completes a stop string ends the response, or it is refused")
def stop_strings(subject: RolloutUnderTest) -> None:
    base = replace(GREEDY, eos_token_ids=(), max_new_tokens=40)
    if "temperature" not in subject.engine.abilities.settings:
        base = replace(base, temperature=1.0)
    rows, string, count = _string_over_two_tokens(subject, replace(base, temperature=0.0))
    sampling = replace(base, stop_strings=("\ue000 never", string))
    _applied_or_refused(subject, sampling, rows)
    _applied_or_refused(subject, replace(sampling, min_new_tokens=count + 1), rows)
    _applied_or_refused(subject, replace(sampling, min_new_tokens=count), rows)
    sampled = replace(SAMPLING, stop_strings=("a", "e", " ", "t"))
    _applied_or_refused(subject, sampled, PROMPTS * 2)


@law("seeds", "a seed reproduces its response if this is declared; other seeds give others")
def seeds(subject: RolloutUnderTest) -> None:
    sampling = subject.possible(replace(SAMPLING, eos_token_ids=(), max_new_tokens=6))
    rows = PROMPTS[:1] * 8
    numbers = [0, 1, 2, -1, 2**62, -(2**63), 2**63 - 1, 2**32]
    first = subject.check(sampling, subject.generate(sampling, rows, numbers), rows)
    expect(len({tuple(response) for response in first}) > 5, True, "8 seeds give over 5 responses")
    if subject.engine.abilities.seeded:
        again = subject.check(sampling, subject.generate(sampling, rows, numbers), rows)
        expect(again, first, "the same seeds again")
    other = subject.check(sampling, subject.generate(sampling, rows, range(50, 58)), rows)
    expect(other != first, True, "other seeds give other responses")


@law("batching", "the response of a row does not depend on the other rows if this is declared")
def batching(subject: RolloutUnderTest) -> None:
    abilities = subject.engine.abilities
    if not (abilities.batch_invariant and abilities.seeded):
        return
    for settings in (SAMPLING, replace(SAMPLING, temperature=1.3)):
        if "temperature" not in abilities.settings and settings.temperature != 1:
            continue
        sampling = subject.possible(settings)
        rows = PROMPTS * 3
        together = subject.check(sampling, subject.generate(sampling, rows), rows)
        for order in ([5, 0, 16, 3], [9], [2, 11, 4]):
            prompts, numbers = [rows[i] for i in order], [100 + i for i in order]
            part = subject.check(sampling, subject.generate(sampling, prompts, numbers), prompts)
            expect(part, [together[i] for i in order], f"rows {order} by themselves")


@law("empty batch", "a batch without rows gives a result without rows")
def empty_batch(subject: RolloutUnderTest) -> None:
    sampling = subject.possible(SAMPLING)
    none = torch.zeros(0, 4, dtype=torch.int64)
    out = subject.engine.generate(none, none, sampling, torch.zeros(0, dtype=torch.int64))
    subject.check(sampling, out, ())
    expect(tuple(subject.engine.score(none, none).shape), (0, 4), "shape of no scores")


@law("bad input", "a prompt that cannot be used is refused by a typed error, and nothing is broken")
def bad_input(subject: RolloutUnderTest) -> None:
    sampling = subject.possible(SAMPLING)
    generate = subject.engine.generate
    good_ids, good_mask = left_padded(PROMPTS[:2])
    numbers = torch.tensor([1, 2])

    def refused(prompts: Prompts, what: str) -> None:
        error = expect_raises(lambda: subject.generate(sampling, prompts), RolloutInputError, what)
        expect(vars(error).get("row"), 1, f"{what}: attribute row")

    refused([(70,), ()], "an empty prompt")
    refused([(70,), (70, subject.reference.vocabulary)], "an id outside the vocabulary")
    refused([(70,), (-1, 70)], "a negative id")
    window = subject.engine.abilities.window
    if window is not None:
        refused([(70,), (70,) * (window + 1)], "a prompt longer than the window")
        refused(
            [(70,), (70,) * (window - SAMPLING.max_new_tokens + 1)], "no space for the response"
        )
    flipped = good_ids.flip(1), good_mask.flip(1)
    cases: tuple[tuple[Tensor, Tensor, Tensor, type[QuadrigaError], str], ...] = (
        (good_ids, good_mask[:, 1:], numbers, ShapeError, "a mask of another shape"),
        (good_ids, good_mask, numbers[:1], ShapeError, "too few seeds"),
        (good_ids[0], good_mask[0], numbers, ShapeError, "one dimension"),
        (*flipped, numbers, RolloutInputError, "padding on the right"),
    )
    for ids, mask, given, kind, what in cases:
        expect_raises(partial(generate, ids, mask, sampling, given), kind, what)
    subject.check(sampling, subject.generate(sampling))


@law("scores", "`score` gives the log-probability at temperature 1 of every token but the first")
def scores(subject: RolloutUnderTest) -> None:
    ids, mask = left_padded(PROMPTS)
    ids, mask = (torch.nn.functional.pad(x, (0, 3)) for x in (ids, mask))
    found = subject.engine.score(ids, mask)
    expect((tuple(found.shape), found.dtype), (tuple(ids.shape), torch.float32), "shape, dtype")
    for row, prompt in enumerate(PROMPTS):
        valid = mask[row].bool()
        expect(found[row, ~valid].any().item(), False, f"row {row}: 0 at padding")
        expected = subject.reference.scores(prompt).tolist()
        subject.close_to(found[row, valid].tolist(), expected, f"row {row}: scores")
    outside = torch.tensor([[70, subject.reference.vocabulary]])
    expect_raises(
        lambda: subject.engine.score(outside, torch.ones_like(outside)),
        RolloutInputError,
        "score of an id outside the vocabulary",
    )


def _supported(subject: RolloutUnderTest, sampling: SamplingParams) -> SamplingParams:
    """Return `sampling` at temperature 1 if the engine cannot apply another one."""
    able = "temperature" in subject.engine.abilities.settings
    return sampling if able else replace(sampling, temperature=1.0)


def _refused(subject: RolloutUnderTest, sampling: SamplingParams) -> None:
    error = expect_raises(
        lambda: subject.generate(sampling), RolloutAbilityError, f"undeclared: {sampling}"
    )
    expect(vars(error).get("engine"), subject.engine.name, "attribute engine")
    expect(bool(vars(error).get("setting")), True, "attribute setting")


def _applied_or_refused(
    subject: RolloutUnderTest,
    sampling: SamplingParams,
    prompts: Prompts = PROMPTS,
) -> None:
    """Check the responses of each row, or that the engine refuses what it does not declare."""
    sampling = subject.possible(sampling)
    if subject.refuses(sampling):
        _refused(subject, sampling)
    else:
        subject.check(sampling, subject.generate(sampling, prompts), prompts)


def _drawn_or_refused(subject: RolloutUnderTest, sampling: SamplingParams) -> None:
    """Compare the first tokens of many rows with the distribution, or expect a refusal."""
    _applied_or_refused(subject, sampling)
    sampling = subject.possible(replace(sampling, max_new_tokens=1))
    if subject.refuses(sampling):
        return
    prompt = PROMPTS[0]
    out = subject.generate(sampling, [prompt] * DRAWS, range(DRAWS))
    counts = torch.bincount(out.response_ids[:, 0], minlength=subject.reference.vocabulary)
    (probs,) = subject.token_probs(sampling, prompt, [0])
    p_value = chi_square_p_value(counts.tolist(), probs)
    if p_value < LEAST_P_VALUE:
        raise LawBroken(
            f"{DRAWS} tokens are not drawn from the distribution of {sampling}: the chi-square "
            f"test gives {p_value:.2g}, expected at least {LEAST_P_VALUE}"
        )


def _string_over_two_tokens(
    subject: RolloutUnderTest, sampling: SamplingParams
) -> tuple[tuple[tuple[int, ...], ...], str, int]:
    """Find a prompt whose greedy response has a stop string that two tokens make up.

    Returns:
        Prompts (the one that was found is the first), the string, and after how many tokens it is
        complete.
    """
    for first in range(70, 290):
        prompt = (first, 83)
        response = subject.greedy_response(prompt, sampling)
        for count in range(3, len(response)):
            string = subject.text(response[count - 2 : count])
            found = subject.end_of(replace(sampling, stop_strings=(string,)), response)
            if string.isascii() and string.isprintable() and found == count:
                return (prompt, (84, 83, 74), (200,)), string, count
    raise LawBroken("no greedy response of the reference has two printable tokens in a row")


GENERATION_LAWS: tuple[Law[RolloutUnderTest], ...] = (
    protocol,
    prompts,
    greedy,
    log_probabilities,
    temperature,
    top_k,
    top_p,
    min_p,
    filter_order,
    length,
    end_tokens,
    end_of_the_model,
    stop_tokens,
    min_tokens,
    stop_strings,
    seeds,
    batching,
    empty_batch,
    bad_input,
    scores,
)

ROLLOUT_LAWS: tuple[Law[RolloutUnderTest], ...] = (*GENERATION_LAWS, *WEIGHT_LAWS)
"""All laws. The last one closes the engine."""


def check_rollout(build: BuildRollout, *, tolerance: float = 1e-4) -> None:
    """Build an engine on a small model and check every law.

    Args:
        build: receives a model folder and returns the engine, in float32.
        tolerance: the largest difference of a log-probability, nats.

    Raises:
        LawBroken: one does not hold.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        write_reference_model(folder)
        with RolloutUnderTest(build, folder, tolerance=tolerance) as subject:
            check_all(ROLLOUT_LAWS, subject, f"The rollout engine {subject.engine.name!r}")
