"""The batch of a step, with a rollout and a reward that are made by hand."""

import numpy as np
import pytest
import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import GroupError
from quadriga.protocol import DataProto, fields
from quadriga.trainer.stages import Sampler, merged

COLUMNS = 3


def prompts(count: int) -> DataProto:
    return DataProto.from_dict(
        {name: torch.ones(count, 2, dtype=torch.int64)
         for name in (fields.INPUT_IDS, fields.ATTENTION_MASK)},
        {fields.INDEX: np.arange(count), fields.RAW_PROMPT: np.array([[]] * count, dtype=object)},
    )  # fmt: skip


class Rollout:
    """Responses of three tokens, finished unless `truncated` says otherwise for a row."""

    world_size = 1

    def __init__(self, truncated: list[bool] | None = None) -> None:
        self.truncated = truncated

    def generate_sequences(self, rows: DataProto) -> DataProto:
        count = len(rows)
        cut = [False] * count if self.truncated is None else self.truncated[:count]
        return DataProto.from_dict(
            {
                fields.RESPONSE_MASK: torch.ones(count, COLUMNS, dtype=torch.int64),
                fields.FINISHED: 1 - torch.tensor(cut).long(),
            }
        )


class Reward:
    """Scores of successive calls. A score of None: the sample has failed and is left out."""

    def __init__(self, *calls: list[float | None]) -> None:
        self.calls = list(calls)
        self.masked_rows: list[int] = []
        self.metrics: dict[str, float] = {}

    def __call__(self, batch: DataProto) -> DataProto:
        given = self.calls.pop(0)
        assert len(given) == len(batch)
        self.masked_rows = [row for row, score in enumerate(given) if score is None]
        failed = float(len(self.masked_rows))
        self.metrics = {
            "reward/raised": failed,
            "reward/masked": failed,
            "reward/failed": failed / len(given),
        }
        scores = torch.zeros(len(batch), COLUMNS)
        scores[:, -1] = torch.tensor([score or 0.0 for score in given])
        return DataProto.from_dict({fields.TOKEN_LEVEL_SCORES: scores})


def sampler(reward: Reward, *settings: str, rollout: Rollout | None = None) -> Sampler:
    given = ["actor_rollout_ref.rollout.n=2", "data.train_batch_size=2", *settings]
    config = load_config(TrainConfig, given)
    stream = iter([prompts(2), prompts(2), prompts(2)])
    return Sampler(config, rollout or Rollout(), reward, stream)


def kept(batch: DataProto) -> list[int]:
    return batch.batch[fields.RESPONSE_MASK].any(-1).long().tolist()


REFILL = (
    "algorithm.adv_estimator=grpo",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.mode=refill",
)


def test_refilling_does_not_count_responses_that_failed() -> None:
    """The first group has the scores 1 and "failed", which are no two different scores."""
    reward = Reward([1.0, None, 1.0, 0.0], [0.0, 1.0, None, None])
    batch, metrics = sampler(reward, *REFILL).draw(step=1)
    assert batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert metrics["group/kept"] == metrics["group/gen_batches"] == 2
    # of both draws: 1 of 4 samples has failed, then 2 of 4
    assert metrics["reward/raised"] == metrics["reward/masked"] == 3
    assert metrics["reward/failed"] == pytest.approx(3 / 8)


def test_each_draw_counts_the_same_in_the_shares_of_a_step() -> None:
    """1 of 4, 2 of 4 and 4 of 4 samples fail in three draws."""
    reward = Reward([1.0, None, 1.0, 1.0], [0.0, 0.0, None, None], [None] * 4)
    _, metrics = sampler(reward, *REFILL).draw(step=1)
    assert metrics["reward/failed"] == pytest.approx(7 / 12)


def test_means_of_unequal_calls_are_over_their_rows_and_counts_are_added() -> None:
    calls = {"reward/failed": 0.5, "reward/raised": 1.0}, {"reward/failed": 0.0}
    assert merged(*calls, rows=[2, 6]) == {"reward/failed": 0.125, "reward/raised": 1.0}


def test_refilling_does_not_count_truncated_responses_that_are_dropped() -> None:
    truncated = Rollout([True, False, False, False])
    scores = [0.0, 1.0, 1.0, 0.0]
    for drops, groups in ((True, 1), (False, 2)):
        reward = Reward(scores, scores, scores)
        settings = (*REFILL, f"algorithm.overlong.drop_truncated={str(drops).lower()}",
                    "algorithm.filter_groups.max_num_gen_batches=1")  # fmt: skip
        batch, metrics = sampler(reward, *settings, rollout=truncated).draw(step=1)
        assert metrics["group/kept"] == groups and len(batch) == 4
        assert kept(batch) == [1, 1, 1, 1]  # a later stage masks truncated responses


def test_groups_without_signal_are_an_error_also_if_samples_failed() -> None:
    reward = Reward(*([[1.0, None, 1.0, 1.0]] * 3))
    chosen = sampler(reward, *REFILL, "algorithm.filter_groups.under_filled=error")
    with pytest.raises(GroupError, match="0 of 2 prompt groups are not zero-variance"):
        chosen.draw(step=1)


def test_responses_without_a_baseline_are_left_out() -> None:
    """ReMax: the greedy response to the second prompt has no score."""
    reward = Reward([0.5, None])
    batch, metrics = sampler(reward, "algorithm.adv_estimator=remax").draw(step=1)
    assert batch.batch[fields.REWARD_BASELINES].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert kept(batch) == [1, 1, 0, 0]
    assert metrics == {"reward/raised": 1.0, "reward/masked": 1.0}


def test_a_baseline_of_zero_is_a_score() -> None:
    batch, metrics = sampler(Reward([0.0, 1.0]), "algorithm.adv_estimator=remax").draw(step=1)
    assert kept(batch) == [1, 1, 1, 1] and not any(metrics.values())
