"""Laws of rollout engines: their weights, and the states released and closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quadriga.errors import ModelError, RolloutAbilityError, RolloutError
from quadriga.rollout.base import tensor_digest
from quadriga.testing.laws import Law, LawBroken, expect, expect_raises, law
from quadriga.testing.rollout_reference import SQUARE_WEIGHT
from quadriga.testing.rollout_subject import PROMPTS, SAMPLING, RolloutUnderTest, left_padded

LEAST_CHANGE = 0.01
"""Nats by which a wrong weight must change a score, so that a comparison of scores finds it."""


@law("update", "after an update, responses and scores are those of the new weights")
def update(subject: RolloutUnderTest) -> None:
    _compare(subject)  # fills the prefix cache, if there is one
    for version in (5, 6):
        with _changed(subject, _noise(subject, version)) as weights:
            subject.engine.update_weights(iter(weights.items()), version)
            expect(subject.engine.version, version, "version")
            _compare(subject)


@law("partial update", "an update of one weight leaves the others as they are")
def partial_update(subject: RolloutUnderTest) -> None:
    for name in (SQUARE_WEIGHT, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        with _changed(subject, {name: _noise(subject, 1)[name]}) as weights:
            subject.engine.update_weights(weights.items(), 7)
            _compare(subject)
    # One version in two parts, as buckets arrive.
    with _changed(subject, _noise(subject, 2)) as weights:
        entries = list(weights.items())
        for part in (entries[:9], entries[9:]):
            subject.engine.update_weights(part, 8)
        _compare(subject)
        expect(subject.engine.version, 8, "version")


@law("wrong weights", "an unknown name and a wrong shape are refused, and the version stays")
def wrong_weights(subject: RolloutUnderTest) -> None:
    before = subject.engine.version
    wrong = {
        "an unknown name": ("model.no_such.weight", torch.zeros(3)),
        "a wrong shape": ("model.norm.weight", torch.zeros(3)),
        "a transposed weight": (
            "model.layers.0.mlp.up_proj.weight",
            subject.original["model.layers.0.mlp.up_proj.weight"].t(),
        ),
        "a part of a fused projection": (SQUARE_WEIGHT, subject.original[SQUARE_WEIGHT][:32]),
    }
    for what, (name, tensor) in wrong.items():
        error = expect_raises(
            partial(subject.engine.update_weights, [(name, tensor)], before + 1),
            ModelError,
            what,
        )
        expect(name in str(error), True, f"{what}: the message names the weight")
        expect(subject.engine.version, before, f"{what}: version")
    _compare(subject)


@law("verification", "digests or scores show a weight that is transposed or was left out")
def verification(subject: RolloutUnderTest) -> None:
    right = _noise(subject, 3)
    faults = {
        "transposed": {**right, SQUARE_WEIGHT: right[SQUARE_WEIGHT].t().contiguous()},
        "left out": {name: t for name, t in right.items() if name != SQUARE_WEIGHT},
    }
    for fault, sent in faults.items():
        with _changed(subject, right):
            subject.engine.update_weights(sent.items(), 9)
            if subject.engine.abilities.exposes_weights:
                digest = tensor_digest(right[SQUARE_WEIGHT])
                different = subject.engine.weights_digest()[SQUARE_WEIGHT] != digest
                expect(different, True, f"{fault}: the digest differs")
            change = max(
                abs(a - b)
                for found, expected in _scores(subject)
                for a, b in zip(found, expected, strict=True)
            )
            if change < LEAST_CHANGE:
                raise LawBroken(f"{fault}: scores differ by {change:.2g} nats only")
        _compare(subject)


@law("digests", "digests and dtypes are of every weight, or digests are refused")
def digests(subject: RolloutUnderTest) -> None:
    dtypes = subject.engine.weight_dtypes()
    unknown = set(dtypes) - set(subject.original)
    expect(unknown, set(), "names of dtypes that the model does not have")
    if not subject.engine.abilities.exposes_weights:
        error = expect_raises(subject.engine.weights_digest, RolloutAbilityError, "weights_digest")
        expect(vars(error).get("engine"), subject.engine.name, "attribute engine")
        return
    expected = {
        name: tensor_digest(t.to(dtypes.get(name, t.dtype))) for name, t in subject.original.items()
    }
    expect(subject.engine.weights_digest(), expected, "weights_digest()")


@law("release", "a released engine refuses to generate; `resume` gives the same engine back")
def release(subject: RolloutUnderTest) -> None:
    engine, sampling = subject.engine, subject.possible(SAMPLING)
    before = engine.version
    engine.release()
    expect_raises(lambda: subject.generate(sampling), RolloutError, "generate while released")
    ids, mask = left_padded(PROMPTS)
    expect_raises(lambda: engine.score(ids, mask), RolloutError, "score while released")
    engine.resume()
    expect(engine.version, before, "version after resume")
    _compare(subject)
    engine.resume()  # a second one does nothing
    _compare(subject)
    engine.release()
    with _changed(subject, _noise(subject, 4)) as weights:
        engine.update_weights(weights.items(), 11)
        engine.resume()
        expect(engine.version, 11, "version of an update while released")
        _compare(subject)


@law("close", "`close` may be called twice, and then every use is refused")
def close(subject: RolloutUnderTest) -> None:
    engine, sampling = subject.engine, subject.possible(SAMPLING)
    ids, mask = left_padded(PROMPTS)
    numbers = torch.arange(len(PROMPTS))
    subject.close()
    engine.close()
    uses = {
        "generate": lambda: engine.generate(ids, mask, sampling, numbers),
        "score": lambda: engine.score(ids, mask),
        "update_weights": lambda: engine.update_weights(subject.original.items(), 12),
        "weights_digest": engine.weights_digest,
        "release": engine.release,
        "resume": engine.resume,
    }
    for what, use in uses.items():
        expect_raises(use, RolloutError, f"{what} after close")


WEIGHT_LAWS: tuple[Law[RolloutUnderTest], ...] = (
    update,
    partial_update,
    wrong_weights,
    verification,
    digests,
    release,
    close,
)


def _noise(subject: RolloutUnderTest, seed: int) -> dict[str, Tensor]:
    """Return all weights with noise."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: t + 0.3 * t.std() * torch.randn(t.shape, generator=random)
        if t.ndim > 1
        else t + 0.2 * torch.rand(t.shape, generator=random)
        for name, t in subject.original.items()
    }


@contextmanager
def _changed(
    subject: RolloutUnderTest, weights: Mapping[str, Tensor]
) -> Iterator[Mapping[str, Tensor]]:
    """Give the reference some other weights, and in the end both the original ones."""
    subject.reference.load(weights)
    try:
        yield weights
    finally:
        subject.reference.load(subject.original)
        subject.engine.update_weights(subject.original.items(), 10)


def _scores(subject: RolloutUnderTest) -> list[tuple[list[float], list[float]]]:
    """Return for each prompt the scores of the engine and of the reference."""
    ids, mask = left_padded(PROMPTS)
    found = subject.engine.score(ids, mask)
    return [
        (found[row, mask[row].bool()].tolist(), subject.reference.scores(prompt).tolist())
        for row, prompt in enumerate(PROMPTS)
    ]


def _compare(subject: RolloutUnderTest) -> None:
    """Compare sampled responses and scores with the reference."""
    sampling = subject.possible(replace(SAMPLING, max_new_tokens=5))
    subject.check(sampling, subject.generate(sampling))
    for row, (found, expected) in enumerate(_scores(subject)):
        subject.close_to(found, expected, f"row {row}: scores")
