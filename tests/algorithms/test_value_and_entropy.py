"""The value loss and the entropy bonus."""

import pytest
import torch
from algorithm_cases import Case, cases
from hypothesis import given, settings

from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.kl import entropy_bonus
from quadriga.algorithms.value_loss import value_loss
from quadriga.errors import AlgorithmError, NonFiniteError


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("clip", [None, 0.0, 0.3])
def test_value_loss_against_the_reference(clip: float | None, case: Case) -> None:
    now, old, target = case.values + case.advantages, case.values, case.rewards
    values = now.clone().requires_grad_()
    got = value_loss(values, old, target, case.mask, cliprange_value=clip)
    got.loss_BT.sum().backward()
    clipped = total = 0
    for i, row in enumerate(case.mask.tolist()):
        for t, m in enumerate(row):
            if not m:
                assert got.loss_BT[i, t] == 0 and values.grad[i, t] == 0
                continue
            v, o, r = float(now[i, t]), float(old[i, t]), float(target[i, t])
            near = v if clip is None else min(max(v, o - clip), o + clip)
            plain, bound = (v - r) ** 2, (near - r) ** 2
            assert got.loss_BT[i, t].item() == pytest.approx(max(plain, bound) / 2)
            moving = plain >= bound or near == v
            assert values.grad[i, t].item() == pytest.approx(v - r if moving else 0.0)
            clipped, total = clipped + (bound > plain), total + 1
    if total and clip is not None:
        assert merge_partials([got.metrics])["vf_clipfrac"] == pytest.approx(clipped / total)


def test_value_loss_raises_for_invalid_arguments() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(AlgorithmError, match="`cliprange_value` must be at least 0"):
        value_loss(x, x, x, x + 1, cliprange_value=-1.0)
    with pytest.raises(NonFiniteError, match="`returns` is nan at row 0, token 1"):
        value_loss(x, x, torch.tensor([[0.0, float("nan")]]), x + 1)


def test_entropy_bonus_by_hand() -> None:
    entropy = torch.tensor([[1.0, 3.0, 9.0]], requires_grad=True)
    result = entropy_bonus(entropy, torch.tensor([[1, 1, 0]]), entropy_coeff=0.1)
    result.loss_BT.sum().backward()
    assert result.loss_BT.flatten().tolist() == pytest.approx([-0.1, -0.3, 0.0])
    assert entropy.grad.flatten().tolist() == pytest.approx([-0.1, -0.1, 0.0])
    assert merge_partials([result.metrics]) == {"entropy": 2.0}
