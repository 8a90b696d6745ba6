"""The engine `hf` satisfies every law of rollout engines; engines that break one are found."""

from dataclasses import replace

import pytest
import torch

from fake_rollout import FakeRollout, full_abilities
from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.testing import LawBroken
from rollout_laws import ROLLOUT_LAWS, RolloutUnderTest

# An engine that applies some filters only, has no seeds and does not show its weights.
LIMITED = replace(
    full_abilities(293), log_probs=frozenset({"policy"}),
    settings=frozenset({"temperature", "top_k", "top_p", "ignore_eos"}), seeded=False,
    batch_invariant=False, exposes_weights=False,
)  # fmt: skip
BUILT = {
    "hf": lambda folder: build_rollout("hf", ModelConfig(path=folder), dtype="float32"),
    "limited": lambda folder: FakeRollout(folder, abilities=LIMITED),
}


@pytest.fixture(scope="module", params=BUILT)
def subject(folder, request):
    with RolloutUnderTest(BUILT[request.param], folder) as subject:
        yield subject


@pytest.mark.parametrize("law", ROLLOUT_LAWS, ids=lambda law: law.__name__)
def test_the_engine_satisfies_the_law(subject, law):
    law(subject)


class Liar(FakeRollout):
    """An engine that does one thing wrong: it changes a request, an output or an update."""

    def __init__(self, folder, lie):
        super().__init__(folder)
        self.lie = lie

    def generate(self, ids, mask, sampling, seeds):
        request = {"ids": ids, "sampling": sampling, "seeds": seeds}
        changed = request | self.lie.get("request", dict)(request)
        out = super().generate(changed["ids"], mask, changed["sampling"], changed["seeds"])
        return self.lie.get("output", lambda out: out)(out)

    def update_weights(self, stream, version):
        weights = dict(stream)
        if self.lie.get("leaves out"):
            weights.pop(max(weights))
        super().update_weights(weights.items(), version)


def settings(**changes):
    """A request with other settings."""
    return {"request": lambda r: {"sampling": replace(r["sampling"], **changes)}}


def with_end_of_the_model(r):
    ends = (*r["sampling"].eos_token_ids, 1)
    return {"sampling": replace(r["sampling"], eos_token_ids=ends)}


LIES = [
    ("prompts", {"request": lambda r: {"ids": r["ids"].where(r["ids"] != 83, 82)}}),
    ("temperature", settings(temperature=1.0)),
    ("log_probabilities", settings(log_probs="policy")),
    ("filters", settings(top_k=-1)),
    ("ends", settings(ignore_eos=True)),
    ("ends", settings(min_new_tokens=0)),
    ("end_of_the_model", {"request": with_end_of_the_model}),
    ("stop_strings", settings(stop_strings=())),
    ("seeds", {"request": lambda r: {"seeds": torch.zeros_like(r["seeds"])}}),
    ("update", {"leaves out": True}),
]


@pytest.mark.parametrize(("name", "lie"), LIES, ids=[name for name, _ in LIES])
def test_a_broken_law_is_reported(folder, name, lie):
    (law,) = [law for law in ROLLOUT_LAWS if law.__name__ == name]
    with RolloutUnderTest(lambda f: Liar(f, lie), folder) as subject, pytest.raises(LawBroken):
        law(subject)
