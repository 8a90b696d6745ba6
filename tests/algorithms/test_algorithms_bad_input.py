"""Invalid tensors, names and settings raise typed errors that name the tensor and the row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quadriga.algorithms import policy_losses
from quadriga.algorithms.advantages import ADVANTAGES, compute_advantages
from quadriga.algorithms.tensors import require_finite
from quadriga.errors import (
    AlgorithmError,
    GroupError,
    MaskError,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnknownSettingError,
)

NAN, INF = float("nan"), float("inf")


def advantages(name: str, **changes: Any) -> tuple[Tensor, Tensor]:
    """Compute advantages of four samples of three tokens in two groups, with `changes` applied."""
    inputs: dict[str, Any] = {
        "token_level_rewards_BT": torch.arange(12.0).view(4, 3),
        "response_mask_BT": torch.ones(4, 3, dtype=torch.int64),
        "group_ids": ["a", "a", "b", "b"],
        "values_BT": torch.zeros(4, 3),
        "reward_baselines_B": torch.zeros(4),
        "reward_components_BK": torch.arange(8.0).view(4, 2),
        "responses_BT": torch.zeros(4, 3, dtype=torch.int64),
    }
    return compute_advantages(name, **{**inputs, **changes})


def losses(name: str, **changes: Any) -> Tensor:
    inputs: dict[str, Any] = {
        "log_prob_BT": torch.zeros(4, 3),
        "old_log_prob_BT": torch.zeros(4, 3),
        "advantages_BT": torch.ones(4, 3),
        "response_mask_BT": torch.ones(4, 3, dtype=torch.int64),
        "rollout_log_prob_BT": torch.zeros(4, 3),
        "selected_BT": torch.zeros(4, 3, dtype=torch.bool),
    }
    return policy_losses.compute_policy_loss(name, **{**inputs, **changes}).loss_BT


def selecting(name: str, **changes: Any) -> Tensor | None:
    inputs: dict[str, Any] = {
        "old_log_prob_BT": torch.zeros(4, 3),
        "advantages_BT": torch.ones(4, 3),
        "response_mask_BT": torch.ones(4, 3, dtype=torch.int64),
    }
    return policy_losses.select_tokens(name, **{**inputs, **changes})


def with_row(shape: tuple[int, ...], value: float, row: int = 2) -> Tensor:
    tensor = torch.zeros(shape)
    tensor[row, ...] = value
    return tensor


# Tensors that estimators read besides the mask: name in messages → (argument, shape).
READS = {
    "token_level_rewards": ("token_level_rewards_BT", (4, 3)),
    "values": ("values_BT", (4, 3)),
    "reward_baselines": ("reward_baselines_B", (4,)),
    "reward_components": ("reward_components_BK", (4, 2)),
}
NON_FINITE_CASES = [
    (name, tensor)
    for name, entry in ADVANTAGES.items()
    for tensor, (argument, _) in READS.items()
    if argument in entry.needs
]


@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize(("name", "tensor"), NON_FINITE_CASES)
def test_nan_or_infinity_in_an_estimator_names_tensor_and_row(
    name: str, tensor: str, value: float
) -> None:
    argument, shape = READS[tensor]
    with pytest.raises(NonFiniteError, match=f"`{tensor}` is -?(nan|inf) at row 2") as caught:
        advantages(name, **{argument: with_row(shape, value)})
    assert (caught.value.tensor, caught.value.row) == (tensor, 2)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, entry in policy_losses.POLICY_LOSSES.items()
        for argument in entry.needs
        if argument not in ("response_mask_BT", "selected_BT")
    ],
)
def test_nan_or_infinity_in_a_loss_names_tensor_row_and_token(
    name: str, argument: str, value: float
) -> None:
    with pytest.raises(NonFiniteError, match=f"`{argument[:-3]}` is (nan|inf) at row 2, token 0"):
        losses(name, **{argument: with_row((4, 3), value)})


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_nan_in_a_masked_sample_changes_no_advantage(name: str) -> None:
    mask = torch.ones(4, 3, dtype=torch.int64)
    mask[2] = 0
    rewards, values = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
    components = torch.arange(8.0).view(4, 2)
    clean = {"response_mask_BT": mask, "group_ids": ["a", "a", "a", "a"]}
    first, _ = advantages(name, **clean)
    rewards[2] = values[2] = components[2] = NAN
    again, _ = advantages(
        name, **clean, token_level_rewards_BT=rewards, values_BT=values,
        reward_components_BK=components,
    )  # fmt: skip
    assert torch.equal(first, again) and bool(torch.isfinite(again).all())


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_estimators_accept_batches_without_tokens(name: str) -> None:
    empty = torch.zeros(4, 0)
    got = advantages(
        name, token_level_rewards_BT=empty, response_mask_BT=empty.long(), values_BT=empty,
        responses_BT=empty.long(),
    )  # fmt: skip
    assert got[0].shape == got[1].shape == (4, 0)


@pytest.mark.parametrize("shape", [(4, 0), (0, 3)])
@pytest.mark.parametrize("name", list(policy_losses.POLICY_LOSSES))
def test_losses_accept_micro_batches_without_tokens_or_samples(
    name: str, shape: tuple[int, int]
) -> None:
    empty = torch.zeros(shape)
    names = [f"{n}_BT" for n in ("log_prob", "old_log_prob", "advantages", "rollout_log_prob")]
    got = losses(
        name, **dict.fromkeys(names, empty), response_mask_BT=empty.long(), selected_BT=empty
    )
    assert got.shape == shape


@pytest.mark.parametrize("mask_value", [2, -1, 0.5, NAN])
@pytest.mark.parametrize("call", [advantages, losses])
def test_masks_with_values_other_than_zero_and_one_raise(call: Any, mask_value: float) -> None:
    mask = torch.ones(4, 3, dtype=torch.int64 if isinstance(mask_value, int) else torch.float32)
    mask[3, 1] = mask_value
    with pytest.raises(MaskError, match="`response_mask` must hold only 0 and 1, but row 3") as got:
        call("grpo" if call is advantages else "ppo_clip", response_mask_BT=mask)
    assert got.value.row == 3


def test_different_shapes_raise() -> None:
    with pytest.raises(ShapeError, match=r"`token_level_rewards` has shape \[4, 2\], but `respons"):
        advantages("grpo", token_level_rewards_BT=torch.zeros(4, 2))
    with pytest.raises(ShapeError, match=r"`values` has shape \[3, 3\]"):
        advantages("gae", values_BT=torch.zeros(3, 3))
    with pytest.raises(ShapeError, match=r"`reward_baselines` has shape \[3\]"):
        advantages("remax", reward_baselines_B=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"`reward_components` must have shape \[4, K\]"):
        advantages("gdpo", reward_components_BK=torch.zeros(3, 2))
    with pytest.raises(
        ShapeError, match="`reward_weights` has 3 numbers, but there are 2 reward comp"
    ):
        advantages("gdpo", reward_weights=[1.0, 1.0, 1.0])
    with pytest.raises(ShapeError, match=r"`response_mask` must have shape \[samples, tokens\]"):
        advantages("grpo", response_mask_BT=torch.ones(12), token_level_rewards_BT=torch.ones(12))
    with pytest.raises(ShapeError, match="`group_ids` has 3 ids, but the batch has 4 samples"):
        advantages("grpo", group_ids=["a", "a", "b"])
    with pytest.raises(ShapeError, match=r"`old_log_prob` has shape \[4, 2\]"):
        losses("ppo_clip", old_log_prob_BT=torch.zeros(4, 2))
    with pytest.raises(ShapeError, match="`importance_weights` has shape"):
        losses("ppo_clip", importance_weights_BT=torch.ones(4))
    with pytest.raises(NonFiniteError, match="`importance_weights` is nan at row 2"):
        losses("ppo_clip", importance_weights_BT=with_row((4, 3), NAN))


def test_invalid_group_ids_raise() -> None:
    with pytest.raises(GroupError, match="`group_ids` is None at row 1"):
        advantages("grpo", group_ids=["a", None, "b", "b"])
    with pytest.raises(GroupError, match="`group_ids` is nan at row 2"):
        advantages("grpo", group_ids=["a", "a", NAN, "b"])
    with pytest.raises(GroupError, match="the prompt group of row 3 has 1"):
        advantages("grpo_passk", group_ids=["a", "a", "a", "b"])
    empty = torch.zeros(0, 3)
    with pytest.raises(GroupError, match="`grpo` received a batch with no samples"):
        advantages("grpo", token_level_rewards_BT=empty, response_mask_BT=empty, group_ids=[])


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("grpo", "group_ids"),
        ("gae", "values_BT"),
        ("remax", "reward_baselines_B"),
        ("gdpo", "reward_components_BK"),
    ],
)
def test_a_missing_input_of_an_estimator_is_named(name: str, argument: str) -> None:
    with pytest.raises(AlgorithmError, match=f"`{name}` needs `{argument}`"):
        advantages(name, **{argument: None})


def test_a_missing_input_of_a_loss_is_named() -> None:
    with pytest.raises(AlgorithmError, match="`decoupled_ppo` needs `rollout_log_prob_BT`"):
        losses("decoupled_ppo", rollout_log_prob_BT=None)
    with pytest.raises(AlgorithmError, match=r"needs `selected_BT`.*once over the whole batch"):
        losses("kl_cov", selected_BT=None)
    with pytest.raises(AlgorithmError, match=r"needs `old_log_prob_BT`, .*\. Pass it, or choose"):
        losses("kl_cov", old_log_prob_BT=None)


def test_unknown_names_and_settings_raise_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"no advantage estimator 'gpro'.* mean 'grpo"):
        advantages("gpro")
    with pytest.raises(UnknownNameError, match=r"no policy loss 'gsop'.* did you mean 'gspo'"):
        policy_losses.get_policy_loss("gsop")
    with pytest.raises(UnknownSettingError, match="`gpg` reads no setting `f_nrom`; did you mean"):
        advantages("gpg", f_nrom=1.0)
    with pytest.raises(UnknownSettingError, match="`sapo` reads no setting `tau`"):
        losses("sapo", tau=1.0)
    advantages("rloo", gamma=0.9, lam=0.9, norm_adv_by_std=True)  # shared settings are ignored
    losses("sapo", clip_ratio_low=0.1)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("ppo_clip", {"clip_ratio_c": 1.0}, "`clip_ratio_c` is an upper bound of the ratio"),
        ("ppo_clip", {"clip_ratio_low": -0.1}, "and `clip_ratio_high` of at least 0"),
        ("cispo", {"clip_ratio_high": NAN}, "and `clip_ratio_high` of at least 0"),
        ("gspo", {"clip_ratio_high": -1.0}, "and `clip_ratio_high` of at least 0"),
        ("geo_mean", {"clip_ratio_low": -1.0}, "and `clip_ratio_high` of at least 0"),
        ("sapo", {"tau_neg": 0.0}, "`tau_pos` and `tau_neg` must be above 0"),
        ("decoupled_ppo", {"behaviour_weight_cap": 0.0}, "`behaviour_weight_cap` must be above 0"),
        ("decoupled_ppo", {"behaviour_weight_cap": NAN}, "`behaviour_weight_cap` must be above 0"),
        ("kl_cov", {"kl_cov_ratio": 0.0}, "`kl_cov_ratio` is a fraction of the tokens"),
        ("clip_cov", {"clip_cov_ratio": 2.0}, "`clip_cov_ratio` is a fraction of the tokens"),
    ],
)
def test_settings_out_of_range_raise(name: str, setting: dict[str, float], message: str) -> None:
    call = selecting if "cov" in name else losses
    with pytest.raises(AlgorithmError, match=message):
        call(name, **setting)


def test_finite_tensors_whose_sum_overflows_are_accepted() -> None:
    require_finite(values=torch.full((4,), 3e38))
