"""Every estimator against the reference implementation, over random masks, groups and lengths."""

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import Case, advantages_of, cases, make_case
from hypothesis import given, settings
from torch import Tensor

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.errors import GroupError


def assert_same(got: Tensor, want: ref.Rows) -> None:
    assert not got.requires_grad
    torch.testing.assert_close(
        got, torch.tensor(want, dtype=torch.float64).view(got.shape), rtol=1e-6, atol=1e-7
    )


@settings(max_examples=60, deadline=None)
@given(cases)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.5), (0.97, 0.0), (0.0, 0.95)])
@pytest.mark.parametrize(
    ("name", "time_steps"), [("gae", ref.tokens_of), ("turn_gae", ref.turns_of)]
)
def test_gae(name: str, time_steps, gamma: float, lam: float, case: Case) -> None:
    want, returns = ref.gae(case.rewards, case.values, case.mask, gamma, lam, time_steps)
    got = advantages_of(name, case, gamma=gamma, lam=lam, whiten_advantages=False)
    assert_same(got[0], want)
    assert_same(got[1], returns)
    whitened = advantages_of(name, case, gamma=gamma, lam=lam)[0]
    assert_same(whitened, ref.whiten(want, case.mask))


@settings(max_examples=60, deadline=None)
@given(cases)
@pytest.mark.parametrize(("gamma", "weight"), [(1.0, 1.0), (0.9, 0.5), (0.0, 0.0)])
def test_gigpo(gamma: float, weight: float, case: Case) -> None:
    want = ref.gigpo(case.rewards, case.responses, case.groups, case.mask, gamma, weight)
    got, _ = advantages_of("gigpo", case, gamma=gamma, turn_weight=weight)
    assert_same(got, want)


@settings(max_examples=60, deadline=None)
@given(cases)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus(gamma: float, case: Case) -> None:
    want = ref.discounted(case.rewards, case.mask, gamma)
    advantages, returns = advantages_of("reinforce_plus_plus", case, gamma=gamma)
    assert_same(returns, want)
    assert_same(advantages, ref.whiten(want, case.mask))
    unwhitened, _ = advantages_of("reinforce_plus_plus", case, gamma=gamma, whiten_advantages=False)
    assert_same(unwhitened, want)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_remax(case: Case) -> None:
    returns = ref.discounted(case.rewards, case.mask, 1.0)
    got = advantages_of("remax", case)
    assert_same(got[1], returns)
    want = [
        [x - base if m else 0.0 for x, m in zip(row, ms, strict=True)]
        for row, base, ms in zip(returns, case.baselines.tolist(), case.mask.tolist(), strict=True)
    ]
    assert_same(got[0], want)


@settings(max_examples=60, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg"])
def test_group_estimators(name: str, case: Case) -> None:
    scores = ref.scores_of(case.rewards, case.mask)
    lengths = [len(positions) for positions in ref.token_positions(case.mask)]
    rules = {
        "grpo": ref.grpo_rule,
        "dr_grpo": ref.dr_grpo_rule,
        "rloo": ref.rloo_rule,
        "opo": ref.opo_rule(lengths),
    }
    if name == "gpg":
        scalars = ref.gpg(scores, case.groups, case.mask)
    else:
        scalars = ref.per_group(scores, case.groups, case.mask, rules[name])
    got = advantages_of(name, case)
    assert_same(got[0], ref.to_tokens(scalars, case.mask))
    assert_same(got[1], ref.to_tokens(scalars, case.mask))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_settings_of_group_estimators(case: Case) -> None:
    scores = ref.scores_of(case.rewards, case.mask)
    centred = ref.to_tokens(
        ref.per_group(scores, case.groups, case.mask, ref.dr_grpo_rule), case.mask
    )
    assert_same(advantages_of("grpo", case, norm_adv_by_std=False)[0], centred)
    name = "reinforce_plus_plus_baseline"
    assert_same(advantages_of(name, case)[0], ref.whiten(centred, case.mask))
    assert_same(advantages_of(name, case, whiten_advantages=False)[0], centred)
    halved = ref.to_tokens([x / 2 for x in ref.gpg(scores, case.groups, case.mask)], case.mask)
    assert_same(advantages_of("gpg", case, f_norm=2.0)[0], halved)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_passk(case: Case) -> None:
    sizes = {len(m) for m in ref.members_of(case.groups, case.mask).values()}
    if 1 in sizes:
        with pytest.raises(GroupError, match="needs at least 2 samples per prompt"):
            advantages_of("grpo_passk", case)
        return
    scores = ref.scores_of(case.rewards, case.mask)
    want = ref.per_group(scores, case.groups, case.mask, ref.passk_rule)
    assert_same(advantages_of("grpo_passk", case)[0], ref.to_tokens(want, case.mask))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_gdpo(case: Case) -> None:
    weights = [1.0, 0.5, 2.0]
    want = ref.gdpo(case.components, case.groups, case.mask, weights)
    assert_same(advantages_of("gdpo", case, reward_weights=weights)[0], want)


def test_every_entry_has_a_reference() -> None:
    """A new estimator must be added to these tests."""
    assert set(ADVANTAGES) == {
        *("gae", "reinforce_plus_plus", "remax", "grpo", "dr_grpo", "rloo", "opo", "gpg"),
        *("reinforce_plus_plus_baseline", "grpo_passk", "gdpo", "turn_gae", "gigpo"),
    }


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.float32])
def test_float32_rewards_and_every_mask_dtype(name: str, mask_dtype: torch.dtype) -> None:
    case = make_case(5)
    if name == "grpo_passk":
        case = case.rows(torch.tensor([i for i, g in enumerate(case.groups) if g == "prompt-0"]))
    exact, _ = advantages_of(name, case)
    narrow = {
        key: value.float()
        for key, value in vars(case).items()
        if isinstance(value, Tensor) and key != "mask"
    }
    short = Case(**{**vars(case), **narrow, "mask": case.mask.to(mask_dtype)})
    got, _ = advantages_of(name, short)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
