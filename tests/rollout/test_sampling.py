"""Sampling is a function of seed, position and logits; numbers by hand and by a naive loop."""

import pytest
import torch

from quadriga.errors import ConfigError
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf import generation as sampling

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
BITS = (1 << 64) - 1


def params(**changes) -> SamplingParams:
    settings = {"max_new_tokens": 4, "eos_token_ids": (1,), "pad_token_id": 0}
    return SamplingParams(**(settings | changes))


def naive_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 1000])
def test_uniform_is_splitmix_of_seed_and_position(seed, position):
    state = naive_mix((seed + 0x9E3779B97F4A7C15) & BITS)
    expected = naive_mix((state + (position + 1) * 0x9E3779B97F4A7C15) & BITS) >> 11
    found = sampling.uniform(torch.tensor([5, seed]), torch.tensor([3, position]))
    assert found[1, 1].item() == expected * 2.0**-53


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.4999, 0), (0.5001, 1), (0.7999, 1), (0.8001, 2), (0.9999, 3)]
)
def test_inverse_cdf(u, token):
    drawn = torch.tensor([u], dtype=torch.float64)
    found, log_prob = sampling.draw(LOGITS, params(), drawn, torch.tensor([0]))
    assert found.tolist() == [token]
    assert log_prob.item() == pytest.approx(LOGITS[0, token].item(), abs=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"max_new_tokens": 0}]
)
def test_sampling_params_out_of_range_are_rejected(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        params(**wrong)
