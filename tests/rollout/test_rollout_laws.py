"""The engine `hf` satisfies every law of rollout engines; engines that break one are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.testing import ROLLOUT_LAWS, LawBroken, RolloutUnderTest, write_reference_model
from quadriga.testing.fake_rollout import FakeRollout, full_abilities


def hf(folder):
    return build_rollout("hf", ModelConfig(path=folder), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(path)
    return path


@pytest.fixture(scope="module")
def subject(folder):
    with RolloutUnderTest(hf, folder) as subject:
        yield subject


@pytest.fixture(scope="module")
def fake(folder):
    with RolloutUnderTest(FakeRollout, folder) as subject:
        yield subject


# An engine that applies no filter but one, has no seeds and does not show its weights.
LIMITED = replace(
    full_abilities(293),
    log_probs={"policy": "unfiltered or at temperature 1", "temperature_1": "at temperature 1"},
    settings=frozenset({"temperature", "top_k", "top_p", "ignore_eos"}),
    filter_order="joint",
    seeded=False,
    batch_invariant=False,
    exposes_weights=False,
)


@pytest.fixture(scope="module")
def limited(folder):
    with RolloutUnderTest(lambda f: FakeRollout(f, abilities=LIMITED), folder) as subject:
        yield subject


@pytest.mark.parametrize("law", ROLLOUT_LAWS, ids=str)
@pytest.mark.parametrize("engine", ["subject", "fake", "limited"])
def test_the_engine_satisfies_the_law(engine, law, request):
    law.check(request.getfixturevalue(engine))


class Liar(FakeRollout):
    """An engine that does one thing wrong: `lie` changes a request or an output."""

    def __init__(self, folder, lie):
        super().__init__(folder)
        self.lie = lie

    def generate(self, ids, mask, sampling, seeds):
        ids, mask, sampling, seeds = self.lie.get("request", same)(ids, mask, sampling, seeds)
        out = super().generate(ids, mask, sampling, seeds)
        return self.lie.get("output", lambda out: out)(out)

    def update_weights(self, stream, version):
        super().update_weights(self.lie.get("weights", dict)(stream).items(), version)


def same(*request):
    return request


def settings(**changes):
    """A request with other settings."""
    return {"request": lambda i, m, s, seeds: (i, m, replace(s, **changes), seeds)}


def reversed_rows(out):
    names = ("response_ids", "response_mask", "rollout_log_probs")
    tensors = {name: getattr(out, name).flip(0) for name in names}
    return replace(out, finish_reason=out.finish_reason[::-1], **tensors)


def without_last(stream):
    weights = dict(stream)
    weights.pop(max(weights))
    return weights


LIES = [
    ("prompts", {"request": lambda i, m, s, seeds: (i.where(i != 83, 82), m, s, seeds)}),
    ("greedy", settings(temperature=1.0)),
    ("temperature", settings(temperature=1.0)),
    ("log-probabilities", settings(log_probs="policy")),
    ("top-k", settings(top_k=-1)),
    ("top-p", settings(top_p=1.0)),
    ("min-p", settings(min_p=0.0)),
    ("length", settings(eos_token_ids=(7, 83, 210))),
    ("end tokens", settings(ignore_eos=True)),
    ("end of the model", {"request": lambda i, m, s, seeds: (
        i, m, replace(s, eos_token_ids=(*s.eos_token_ids, 1)), seeds)}),
    ("stop tokens", settings(stop_token_ids=())),
    ("stop tokens", settings(ignore_eos=False)),
    ("min tokens", settings(min_new_tokens=0)),
    ("stop strings", settings(stop_strings=())),
    ("seeds", {"request": lambda i, m, s, seeds: (i, m, s, torch.zeros_like(seeds))}),
    ("greedy", {"output": reversed_rows}),
    ("batching", {"request": lambda i, m, s, seeds: (i, m, s, torch.arange(len(seeds)))}),
    ("update", {"weights": without_last}),
    ("partial update", {"weights": without_last}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "lie"), LIES, ids=[name for name, _ in LIES])
def test_a_broken_law_is_reported(folder, name, lie):
    (law,) = [law for law in ROLLOUT_LAWS if law.name == name]
    with RolloutUnderTest(lambda f: Liar(f, lie), folder) as subject, pytest.raises(LawBroken):
        law.check(subject)


def joint(folder):
    """An engine that lies about the order of its filters."""
    engine = FakeRollout(folder, abilities=replace(full_abilities(293), filter_order="joint"))
    return Declares(engine, full_abilities(293))


def unseeded(folder):
    """An engine that lies about its seeds."""
    engine = FakeRollout(folder, abilities=replace(full_abilities(293), seeded=False))
    return Declares(engine, full_abilities(293))


def unfiltered(folder):
    """An engine that says that it cannot do what it then does."""
    return Declares(FakeRollout(folder), LIMITED)


class Declares:
    """An engine with the abilities of another declaration."""

    def __init__(self, engine, abilities):
        self.engine, self.abilities = engine, abilities

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize(
    ("name", "build"),
    [("filter order", joint), ("seeds", unseeded), ("min-p", unfiltered), ("digests", unfiltered)],
)
def test_a_wrong_declaration_is_reported(folder, name, build):
    (law,) = [law for law in ROLLOUT_LAWS if law.name == name]
    with RolloutUnderTest(build, folder) as subject, pytest.raises(LawBroken):
        law.check(subject)
