"""The stages between reward and advantage, on batches that are made by hand."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import AlgorithmConfig
from quadriga.parallel.balancing import Balance
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.trainer import stages

# Three prompt groups of two responses: a (both wrong, one of them long), b (one right), c (both
# right).
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
            fields.RESPONSE_MASK: mask,
            fields.TOKEN_LEVEL_SCORES: scores,
            fields.FINISHED: torch.tensor(FINISHED),
            fields.SEQUENCE_LENGTH: torch.tensor([9, 3, 8, 4, 3, 7]),
            fields.PROMPT_LENGTH: torch.ones(6, dtype=torch.int64),
            fields.OLD_LOG_PROBS: -torch.ones(6, 4),
            fields.ROLLOUT_LOG_PROBS: -torch.ones(6, 4) - mask * torch.tensor(2.0).log(),
            fields.REF_LOG_PROB: -torch.ones(6, 4),
        },
        {fields.UID: np.array(GROUPS, dtype=object)},
    )


def algorithm(*overrides: str) -> AlgorithmConfig:
    return load_config(AlgorithmConfig, list(overrides))


def kept(data: DataProto) -> list[int]:
    """Response tokens under the mask, per row."""
    return data.batch[fields.RESPONSE_MASK].sum(-1).tolist()


@pytest.mark.parametrize("rows", [[1, 3], [0, 1, 2, 3, 4, 5]])
def test_failed_samples_count_in_the_lengths_and_not_in_the_scores(rows) -> None:
    data = batch()
    data.batch[fields.SEQUENCE_LENGTH] = torch.tensor(LENGTHS) + 1
    data.batch[fields.RESPONSE_MASK][rows] = 0  # reward.on_failure=mask
    data, metrics = stages.measure_batch(data)
    assert metrics["response_length/mean"] == pytest.approx(sum(LENGTHS) / 6)
    assert metrics["response_length/max"] == 4
    left = [score for row, score in enumerate(SCORES) if row not in rows]
    expected = [sum(left) / len(left), max(left), min(left)] if left else [None] * 3
    found = [metrics.get(f"reward/{name}") for name in ("mean", "max", "min")]
    assert found == expected


def test_by_default_no_token_is_masked() -> None:
    data, _ = stages.mask_truncated(batch(), algorithm())
    data, metrics = stages.mask_zero_variance_groups(data, algorithm())
    assert kept(data) == LENGTHS
    assert metrics["group/total"] == 3 and metrics["group/dead"] == 2
    assert metrics["group/dead_at_top"] == metrics["group/dead_at_bottom"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("mode", ["mask", "refill"])
def test_zero_variance_groups_are_masked(mode: str) -> None:
    """Also with refilling, which keeps some of them if too few prompt groups have signal."""
    chosen = algorithm("filter_groups.enable=true", f"filter_groups.mode={mode}")
    assert kept(stages.mask_zero_variance_groups(batch(), chosen).batch) == [0, 0, 4, 2, 0, 0]


def test_a_length_penalty_does_not_change_which_groups_are_zero_variance() -> None:
    """In group a both responses are wrong; one gets a penalty, and the group is masked all the
    same."""
    config = algorithm("overlong.enable=true", "overlong.buffer_length=2",
                       "filter_groups.enable=true")  # fmt: skip
    data, _ = stages.mask_zero_variance_groups(batch(), config)
    data, _ = stages.shape_scores(data, config)
    assert kept(data) == [0, 0, 4, 2, 0, 0]
    rewards = data.batch[fields.TOKEN_LEVEL_REWARDS].sum(-1)
    assert rewards.tolist() == [0, 0, -1, 1, 0, 0]


def test_a_truncated_response_does_not_count_in_its_group() -> None:
    """Without its truncated response, group b has one response and so no variance."""
    config = algorithm("overlong.drop_truncated=true", "filter_groups.enable=true")
    data, _ = stages.mask_truncated(batch(), config)
    assert kept(data) == [1, 0, 0, 2, 3, 3]
    data, metrics = stages.mask_zero_variance_groups(data, config)
    assert metrics["group/dead"] == 3
    assert kept(data) == [0] * 6


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        (["level=token"], 2.0),
        (["level=token", "normalise=true"], 1.0),
        (["level=token", "upper=1.5", "mode=mask"], 0.0),
    ],
)
def test_the_rollout_correction_uses_its_settings(overrides: list[str], weight: float) -> None:
    config = algorithm(*[f"rollout_correction.{part}" for part in overrides])
    data, metrics = stages.correct_mismatch(batch(), config.rollout_correction, 0.5)
    weights = data.batch[fields.ROLLOUT_IS_WEIGHTS][data.batch[fields.RESPONSE_MASK].bool()]
    assert weights.tolist() == pytest.approx([weight] * sum(LENGTHS))
    assert metrics["mismatch/k1"] == pytest.approx(-0.6931472)


def lengths_of_ranks(data: DataProto, ranks: int) -> list[list[int]]:
    return [sorted(part) for part in data.batch[fields.SEQUENCE_LENGTH].view(ranks, -1).tolist()]


def test_balancing_keeps_groups_whole_and_counts_a_shared_prompt_once() -> None:
    """The groups have 9 + 3, 8 + 4 and 3 + 7 tokens. Prompts of 1 token count once: 11, 11, 9."""
    data, metrics = stages.balance_over_ranks(batch(), Balance(ranks=3))
    assert sorted(lengths_of_ranks(data, 3)) == [[3, 7], [3, 9], [4, 8]]
    assert metrics["batch/token_spread"] == pytest.approx(2 / 11)
    assert metrics["batch/cost_imbalance"] == pytest.approx(11 / (31 / 3))
    two, _ = stages.balance_over_ranks(batch(), Balance(ranks=2))
    assert [uid for uid, _ in groupby(two.non_tensor_batch[fields.UID])] in (
        ["a", "c", "b", "c"], ["b", "c", "a", "c"],
    )  # fmt: skip


def test_masked_rows_cost_nothing() -> None:
    """Group b is masked: its rows fill up the parts of the two groups that are computed."""
    data = batch()
    data.batch[fields.RESPONSE_MASK][2:4] = 0
    balanced, metrics = stages.balance_over_ranks(data, Balance(ranks=2, masked=True))
    assert balanced.non_tensor_batch[fields.UID].tolist() in (
        ["a", "a", "b", "c", "c", "b"], ["c", "c", "b", "a", "a", "b"],
    )  # fmt: skip
    assert metrics["batch/token_spread"] == pytest.approx(2 / 11)


@pytest.mark.parametrize(("ranks", "size"), [(2, 4), (2, 8), (4, 4), (2, None), (1, 4), (2, 6)])
def test_without_balance_a_mini_batch_has_the_same_rows_on_any_number_of_ranks(ranks, size):
    balance = Balance(ranks, enabled=False, mini_batch_rows=size)
    data = DataProto.from_dict(tensors={"row": torch.arange(12)})
    found, metrics = stages.balance_over_ranks(data, balance)
    assert metrics == {}
    parts = [part.batch["row"].tolist() for part in found.chunk(ranks)]
    size = size or 12
    for first in range(0, 12, size):
        start, end = first // ranks, min(first + size, 12) // ranks
        rows = [row for part in parts for row in part[start:end]]
        assert rows == list(range(first, min(first + size, 12))), "in order, rank by rank"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(("actor", "critic", "size"), [(2, 1, 6), (1, 2, 6), (2, 3, 6), (2, 6, 12)])
def test_a_critic_on_other_ranks_has_the_mini_batches_of_one_rank(actor, critic, size, enabled):
    """The rows are balanced for the actor in units of 6."""
    balance = Balance(
        actor, enabled, mini_batch_rows=6, critic_ranks=critic, critic_mini_batch_rows=size
    )
    count, n = 24, 2
    uid = np.array([f"{row // n}" for row in range(count)], dtype=object)
    length = np.arange(count) * 7 % 5 + 1
    tensors = {"prompt_length": torch.ones(count, dtype=torch.int64), "row": torch.arange(count)}
    tensors["sequence_length"] = torch.from_numpy(length) + 1
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    ordered, _ = stages.balance_over_ranks(data, balance)
    order = balance.critic_order(count)
    parts = ordered.select_idxs(order).chunk(critic)
    share = size // critic
    for mini in range(count // size):
        rows = [r for part in parts for r in part.batch["row"][mini * share :][:share].tolist()]
        assert sorted(rows) == list(range(mini * size, (mini + 1) * size))


def test_expanded_prompts_have_one_uid_per_prompt_and_one_seed_per_row() -> None:
    prompts = DataProto.from_dict(
        {
            fields.INPUT_IDS: torch.tensor([[0, 1], [2, 3]]),
            fields.ATTENTION_MASK: torch.tensor([[0, 1], [1, 1]]),
        }
    )
    rows = stages.expand_prompts(prompts, n=2, step=7, seed=0).batch
    assert rows.batch[fields.INPUT_IDS][:, 1].tolist() == [1, 1, 3, 3]
    assert rows.batch[fields.PROMPT_LENGTH].tolist() == [1, 1, 2, 2]
    assert rows.non_tensor_batch[fields.UID].tolist() == ["7-0-0", "7-0-0", "7-0-1", "7-0-1"]
    seeds = rows.batch[fields.SAMPLE_SEED]
    assert seeds.dtype == torch.int64 and len(set(seeds.tolist())) == 4
    other = stages.expand_prompts(prompts, n=2, step=7, seed=0, turn=1).batch
    assert not set(seeds.tolist()) & set(other.batch[fields.SAMPLE_SEED].tolist())


def test_seeds_by_index_depend_on_the_row_of_the_data_and_not_on_the_batch() -> None:
    def seeds(index: list[int], n: int, **more: int) -> list[list[int]]:
        mask = torch.ones(len(index), 2, dtype=torch.int64)
        arrays = {fields.INDEX: np.array(index, dtype=object)}
        prompts = DataProto.from_dict({fields.ATTENTION_MASK: mask}, arrays)
        rows = stages.expand_prompts(prompts, n=n, seed=3, seed_by_index=True, **more).batch
        return rows.batch[fields.SAMPLE_SEED].view(-1, n).tolist()

    a, b, c = seeds([4, 0, 9], n=2)
    assert seeds([0, 9], n=2, step=5, turn=1) == [b, c] and seeds([4], n=2) == [a]
    assert len({*a, *b, *c}) == 6


class Rollout:
    """A rollout of two ranks that returns each row's first token as its response."""

    world_size = 2

    def generate_sequences(self, inputs: DataProto) -> DataProto:
        assert len(inputs) % self.world_size == 0
        ids = inputs.batch[fields.INPUT_IDS]
        return DataProto.from_dict({fields.INPUT_IDS: ids, fields.RESPONSES: ids[:, :1]})


def test_generation_takes_any_number_of_rows_and_keeps_other_fields() -> None:
    ids = torch.tensor([[5, 6], [7, 8], [9, 1]])
    rows = DataProto.from_dict(
        {
            fields.INPUT_IDS: ids,
            fields.ATTENTION_MASK: torch.ones_like(ids),
            fields.SAMPLE_SEED: torch.arange(3),
            fields.REWARD_BASELINES: torch.tensor([0.1, 0.2, 0.3]),
        },
        {fields.UID: np.array(["a", "b", "c"], dtype=object)},
    )
    batch = stages.generate(rows, Rollout(), "train").batch
    assert batch.batch[fields.RESPONSES].flatten().tolist() == [5, 7, 9]
    assert batch.batch[fields.REWARD_BASELINES].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert batch.non_tensor_batch[fields.UID].tolist() == ["a", "b", "c"]
    assert set(batch.batch.keys()) == {
        fields.INPUT_IDS, fields.RESPONSES, fields.REWARD_BASELINES,
    }  # fmt: skip


class Pending:
    """A future of one batch."""

    def __init__(self, value: DataProto) -> None:
        self.value = value

    def result(self) -> DataProto:
        return self.value

    @staticmethod
    def wait_all(pendings: list[Pending], timeout: float | None = None) -> None: ...


@pytest.mark.parametrize("returns", ["batch", "future"])
def test_rows_are_scored_once_by_a_function_that_returns_a_batch_or_a_future(returns: str) -> None:
    calls = []

    def reward(data: DataProto) -> DataProto | DataProtoFuture:
        calls.append(len(data))
        scored = DataProto.from_dict({fields.TOKEN_LEVEL_SCORES: torch.ones(len(data), 4)})
        return scored if returns == "batch" else DataProtoFuture([Pending(scored)])

    reward.metrics = {"reward/raised": 2.0}
    data = batch()
    data.pop([fields.TOKEN_LEVEL_SCORES])
    for _ in range(2):
        data, metrics = stages.score_responses(data, reward)
        assert metrics == {"reward/raised": 2.0}
    assert calls == [6]
    assert data.batch[fields.TOKEN_LEVEL_SCORES].sum() == 24


class FailsInRowOne:
    """A reward function that excludes row 1, as `RewardManager` does with `on_failure="mask"`."""

    masked_rows = [1]  # noqa: RUF012

    def __call__(self, data):
        return DataProto.from_dict(
            {fields.TOKEN_LEVEL_SCORES: torch.zeros(data.batch[fields.RESPONSE_MASK].shape)}
        )


def test_rows_that_the_reward_function_excludes_are_masked():
    mask = torch.ones(3, 2, dtype=torch.int64)
    batch = DataProto.from_dict({fields.RESPONSE_MASK: mask})
    scored = stages.score_responses(batch, FailsInRowOne()).batch
    assert scored.batch[fields.RESPONSE_MASK].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert mask.sum() == 6  # the mask of the caller is not changed
