"""`RewardManager` turns responses into scores per token."""

import asyncio
import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from quadriga.errors import ConfigError, DataError, FieldError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, load_reward_function
from quadriga.rewards.functions import Outcome
from quadriga.rewards.manager import RewardPart, reward_components

USER_FILE = Path(__file__).with_name("user_rules.py")


class Letters:
    """A tokenizer of single characters, which skips 0 as padding."""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(token) for token in row if token) for row in rows]


def batch_of(texts, truths, source="quadriga/arithmetic", width=10):
    responses = torch.zeros(len(texts), width, dtype=torch.int64)
    mask = torch.zeros(len(texts), width, dtype=torch.int64)
    for i, text in enumerate(texts):
        responses[i, : len(text)] = torch.tensor([ord(c) for c in text], dtype=torch.int64)
        mask[i, : len(text)] = 1
    return DataProto.from_dict(
        {"responses": responses, "response_mask": mask},
        {
            "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
            "data_source": [source] * len(texts),
            "extra_info": [{"index": i} for i in range(len(texts))],
        },
    )


def test_the_score_is_at_the_last_response_token():
    scored = RewardManager(Letters())(batch_of(["#### 7", "#### 8", "####7"], ["7", "7", "7"]))
    scores = scored.batch["token_level_scores"]
    assert scores.dtype == torch.float32 and scores.shape == (3, 10)
    assert scores.sum(-1).tolist() == [1.0, 0.0, 1.0]
    assert scores[0].nonzero().tolist() == [[5]] and scores[2].nonzero().tolist() == [[4]]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_of_the_user_and_its_extra_numbers(processes):
    function = load_reward_function(USER_FILE, "by_length")
    manager = RewardManager(Letters(), function, num_processes=processes)
    scored = manager(batch_of(["a1", "b22"], ["", "x"], source="anything"))
    manager.close()
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [2.0, 3.0]
    assert manager.metrics["reward/extra/digits"] == 1.5
    assert manager.metrics["reward/raised"] == 0 and manager.failures == []


def test_failures_are_counted_named_and_logged(caplog):
    manager = RewardManager(Letters(), load_reward_function(USER_FILE, "moody"))
    with caplog.at_level(logging.WARNING):
        scored = manager(batch_of(["a", "b", "c"], ["ok", "raise", "nan"]))
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.0]
    assert manager.metrics["reward/raised"] == 2
    assert [failure.row for failure in manager.failures] == [1, 2]
    assert "2 of 3 samples have no score" in caplog.text and "no mood" in caplog.text


def test_a_reward_of_several_may_have_no_opinion():
    """2 · length and a rule for texts with a digit, None for others; nobody scores "?"."""
    parts = (
        RewardPart("long", 2.0, lambda response: None if response == "?" else len(response)),
        RewardPart("digit", 1.0, lambda response: {"score": 5.0 if "7" in response else None}),
    )
    manager = RewardManager(Letters(), parts)
    outcomes = manager.score_texts(["ab", "c7", "?"], [{}] * 3)
    assert [outcome.score for outcome in outcomes] == [4.0, 9.0, 0.0]
    assert outcomes[0].extra == {"long": 2.0}
    assert manager.metrics["reward/extra/digit"] == 5.0 and manager.metrics["reward/raised"] == 1
    assert manager.failures[0].detail == "no score: the function returned None"
    alone = RewardManager(Letters(), lambda response: None if response else 1.0)
    assert [one.status for one in alone.score_texts(["a", ""], [{}] * 2)] == ["raised", "scored"]
    assert str(alone.failures[0]) == "row 0, raised", "no data source"


def test_a_callable_can_score_in_this_process_but_not_in_a_pool():
    def length(data_source, solution_str, ground_truth, extra_info):
        return len(solution_str)

    assert (
        RewardManager(Letters(), length)(batch_of(["abc"], ["1"])).batch["token_level_scores"].sum()
        == 3
    )
    with pytest.raises(ConfigError, match="by file and name"):
        RewardManager(Letters(), length, num_processes=1)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_coroutine_is_awaited(processes):
    function = load_reward_function(USER_FILE, "asks_a_judge")
    with closing(RewardManager(Letters(), function, num_processes=processes)) as manager:
        batch = batch_of(["a1", "b22"], ["", "x"])
        assert manager(batch).batch["token_level_scores"].sum(-1).tolist() == [2.0, 3.0]

        async def notebook():
            return manager(batch)

        assert asyncio.run(notebook()).batch["token_level_scores"].sum(-1).tolist() == [2.0, 3.0]


def test_a_semaphore_works_in_later_batches():
    one = asyncio.Semaphore(1)

    async def score(completions):
        async def judge(text):
            async with one:
                await asyncio.sleep(0.001)
            return len(text)

        return await asyncio.gather(*map(judge, completions))

    manager = RewardManager(Letters(), score)

    async def notebook():
        return manager.score_texts(["a", "bb"], [{}] * 2)

    for outcomes in (manager.score_texts(["a", "bb"], [{}] * 2), asyncio.run(notebook())):
        assert [outcome.score for outcome in outcomes] == [1.0, 2.0], outcomes


@pytest.mark.parametrize("score", [1e39, -1e39, float("inf"), float("nan")])
def test_a_score_that_float32_cannot_hold_fails_its_sample(score):
    parts = (RewardPart("huge", 1.0, lambda **_: score), RewardPart("half", 0.5, lambda **_: 1.0))
    for function in (lambda **_: score, parts):
        manager = RewardManager(Letters(), function)
        assert manager(batch_of(["a"], [""])).batch["token_level_scores"].sum() == 0
        assert "at most 3.4e+38" in manager.failures[0].detail
    named = RewardManager(Letters(), lambda **_: {"score": 1.0, "len": score}, components=["len"])
    assert named(batch_of(["a"], [""])).batch["reward_components"].tolist() == [[0.0]]
    assert "the entry 'len' of a returned dict must be finite" in named.failures[0].detail
    with pytest.raises(FieldError, match="one finite number of float32 for each component"):
        reward_components([Outcome("scored", extra={"len": score})], ["len"])
    weighted = RewardManager(Letters(), (RewardPart("huge", 1e3, lambda **_: 1e38),))
    weighted(batch_of(["a"], [""]))
    assert "the weighted sum of the parts: a score" in weighted.failures[0].detail


@pytest.mark.parametrize("policy", ["zero", "mask"])
@pytest.mark.parametrize(("rows", "calls"), [(0, 3), (1, 1), (2, 1), (4, 2)])
def test_a_step_without_any_score_ends_the_run(rows, calls, policy):
    """A call has fewer samples than a step, if responses are scored group by group. Without the
    size of a step, three calls in a row end the run."""
    function = load_reward_function(USER_FILE, "moody")
    manager = RewardManager(Letters(), function, on_failure=policy)
    lost, scored = batch_of(["a", "b"], ["raise", "nan"]), batch_of(["a", "b"], ["ok", "raise"])
    manager.batch_rows = rows
    for batch in (*[lost] * (calls - 1), scored, *[lost] * (calls - 1)):
        manager(batch)
    manager.check_any(samples=2 * calls)
    with pytest.raises(RewardError, match=rf"none of the last {2 * calls} samples .* no mood"):
        manager(lost)


def test_one_sample_alone_does_not_end_the_run():
    manager = RewardManager(Letters(), load_reward_function(USER_FILE, "moody"))
    manager.batch_rows = 1
    manager(batch_of(["a"], ["raise"]))
    with pytest.raises(RewardError, match="none of the last 1 samples has a score"):
        manager.check_any(samples=1)


def test_check_names_the_first_item_that_cannot_be_scored():
    manager = RewardManager(Letters())
    good = {"index": 0, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}
    manager.check([good])
    with pytest.raises(DataError, match="row 3 cannot be scored: reward_model must be a dict"):
        manager.check([good, {"index": 3, "data_source": "openai/gsm8k", "reward_model": None}])
    with pytest.raises(DataError, match="no rule function for data_source 'who'"):
        manager.check([{**good, "data_source": "who"}])
