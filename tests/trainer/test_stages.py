"""What the controller does to a batch between reward and advantage, on batches made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import AlgorithmConfig
from quadriga.protocol import DataProto
from quadriga.trainer import stages

# Groups a (both wrong, one of them long), b (one right), c (both right), two samples each.
SCORES = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
LENGTHS = [1, 4, 4, 2, 3, 3]
FINISHED = [1, 0, 0, 1, 1, 1]
GROUPS = ["a", "a", "b", "b", "c", "c"]


def batch() -> DataProto:
    mask = (torch.arange(4) < torch.tensor(LENGTHS)[:, None]).long()
    scores = torch.zeros(6, 4)
    scores[range(6), [length - 1 for length in LENGTHS]] = torch.tensor(SCORES)
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "token_level_scores": scores,
            "finished": torch.tensor(FINISHED),
            "old_log_probs": -torch.ones(6, 4),
            "rollout_log_probs": -torch.ones(6, 4) - mask * torch.tensor(2.0).log(),
            "ref_log_prob": -torch.ones(6, 4),
        },
        {"uid": np.array(GROUPS, dtype=object)},
    )


def algorithm(*overrides: str) -> AlgorithmConfig:
    return load_config(AlgorithmConfig, list(overrides))


def kept(data: DataProto) -> list[int]:
    return data.batch["response_mask"].sum(-1).tolist()


def test_by_default_every_token_stays() -> None:
    data = batch()
    stages.drop_cut_off(data, algorithm())
    metrics = stages.drop_dead_groups(data, algorithm())
    assert kept(data) == LENGTHS
    assert metrics["group/total"] == 3 and metrics["group/dead"] == 2
    assert metrics["group/dead_at_top"] == metrics["group/dead_at_bottom"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", ["mask", "refill"])
def test_groups_without_signal_get_weight_zero(mode: str) -> None:
    """Refilling drops them; those that it keeps to fill up the batch must not count either."""
    data = batch()
    chosen = algorithm("filter_groups.enable=true", f"filter_groups.mode={mode}")
    stages.drop_dead_groups(data, chosen)
    assert kept(data) == [0, 0, 4, 2, 0, 0]


def test_penalties_are_no_signal() -> None:
    """Group a is all wrong: that one of its answers is long does not bring it to life."""
    data, config = batch(), algorithm("overlong.enable=true", "overlong.buffer_length=2",
                                      "filter_groups.enable=true")  # fmt: skip
    stages.drop_dead_groups(data, config)
    stages.shape_scores(data, config)
    assert kept(data) == [0, 0, 4, 2, 0, 0]
    assert data.batch["token_level_rewards"].sum(-1).tolist() == [0, 0, -1, 1, 0, 0]


def test_responses_that_were_cut_off_are_no_members() -> None:
    """Without its cut-off answer, group b has one right answer and nothing to compare it with."""
    data = batch()
    config = algorithm("overlong.drop_truncated=true", "filter_groups.enable=true")
    stages.drop_cut_off(data, config)
    assert kept(data) == [1, 0, 0, 2, 3, 3]
    metrics = stages.drop_dead_groups(data, config)
    assert metrics["group/dead"] == 3
    assert kept(data) == [0] * 6


def test_a_batch_without_tokens_has_no_groups_and_no_advantages() -> None:
    data, config = batch(), algorithm("adv_estimator=grpo", "filter_groups.enable=true")
    data.batch["response_mask"] = torch.zeros(6, 4, dtype=torch.int64)
    assert stages.drop_dead_groups(data, config) == {}
    stages.shape_scores(data, config)
    stages.estimate_advantages(data, config)
    assert not data.batch["advantages"].any()


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        (["level=token"], 2.0),
        (["level=geometric", "upper=1.5"], 1.5),
        (["level=token", "normalise=true"], 1.0),
        (["level=token", "upper=1.5", "mode=mask"], 0.0),
    ],
)
def test_corrections_reach_their_settings(overrides: list[str], want: float) -> None:
    data = batch()
    config = algorithm(*[f"rollout_correction.{part}" for part in overrides])
    metrics: dict[str, Any] = stages.correct_mismatch(data, config.rollout_correction)
    mask = data.batch["response_mask"].bool()
    assert data.batch["rollout_is_weights"][mask].tolist() == pytest.approx([want] * sum(LENGTHS))
    assert metrics["mismatch/k1"] == pytest.approx(-0.6931472)
