"""Rows that wait for their environments: after a resumption, an error, and in a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from quadriga.agents.pool import Answer
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ModelError, RolloutError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.values import object_array
from quadriga.streams import generation as sliced
from quadriga.streams.episodes import Episodes, with_routes
from quadriga.streams.playing import EpisodeGenerator
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replicas
from quadriga.streams.saved import load_groups, save_groups
from quadriga.streams.staleness import StalenessBound

R = 6


class Pool:
    """Answers each call with one reward of 0.5 for each turn, and `observed`."""

    def __init__(self):
        self.played, self.waiting = [], []

    def play(self, number, row, turns, prompt):
        self.played.append([action.text for action in turns])
        self.prompt_tokens = [action.prompt_tokens for action in turns]
        self.waiting.append(Answer(number, "observed", [], [0.5] * len(turns)))

    def answers(self):
        found, self.waiting = self.waiting, []
        return found

    def wait(self, timeout):
        return bool(self.waiting)

    def end(self, number): ...


def episodes(pool: Pool) -> Episodes:
    turns = SimpleNamespace(text=lambda ids: " ".join(map(str, ids)))
    return Episodes(pool, turns, R, max_turns=9, max_turn_tokens=None, concurrency=9)


def prompts(count: int = 1) -> DataProto:
    ids = torch.ones(count, 3, dtype=torch.int64)
    arrays = {
        fields.COLUMNS: object_array([{}] * count),
        fields.RAW_PROMPT: object_array([[{"role": "user", "content": "a"}]] * count),
    }
    tensors = {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: ids, fields.SAMPLE_SEED: ids[:, 0]}
    return DataProto.from_dict(tensors, arrays)


def answered(versions: list[list[int]], finished: int = 1) -> DataProto:
    """Rows after a call; their tokens are 5, 6, … in the columns that have a version."""
    known = torch.tensor([row + [-1] * (R - len(row)) for row in versions])
    tensors = {
        fields.RESPONSES: torch.where(known == -1, 0, torch.arange(5, 5 + R)),
        fields.RESPONSE_MASK: (known >= 0).long(),
        fields.TOKEN_VERSIONS: known * (known != -1),
        fields.ROLLOUT_LOG_PROBS: torch.zeros(known.shape),
        fields.FINISHED: torch.full((len(versions),), finished),
    }
    return DataProto.from_dict(tensors)


def test_a_full_row_of_a_checkpoint_has_the_rewards_of_its_earlier_turns():
    """Its last turn was cut, so the environment is asked for the others only."""
    group, pool = PromptGroup(0, prompts()), Pool()
    own = episodes(pool)
    own.act([(group, 0)], answered([[0, 0, -2, -2, 0, 0]], finished=0))
    assert pool.played == [["5 6"]] and own.wait(0.0)
    assert own.collect() == [] and own.complete() == [group]
    assert group.batch.batch[fields.TURN_REWARDS].tolist() == [[0, 0.5, 0, 0, 0, 0]]
    about = group.batch.non_tensor_batch[fields.EPISODE][0]
    assert (about["status"], about["turns"]) == ("length", 2)


def test_a_turn_knows_how_many_tokens_of_its_context_stand_before_it():
    group, pool = PromptGroup(0, prompts()), Pool()
    versions = [[0, -2, 0, -3, -2, 0]]  # -3: a context begins
    episodes(pool).act([(group, 0)], answered(versions))
    assert pool.prompt_tokens == [3, 5, 2]


def test_a_row_ends_after_its_seconds_and_one_with_images_has_no_other_prompt():
    timed, own = PromptGroup(0, prompts()), episodes(Pool())
    own.max_seconds = 0.0
    own.act([(timed, 0)], answered([[0, 0]]))
    assert own.collect() == []
    image, own.max_seconds = PromptGroup(1, prompts()), None
    image.prompts.non_tensor_batch[fields.MULTI_MODAL_INPUTS] = object_array([{}])
    own.begin(image)
    own.pool.waiting = [Answer(2, "observed", [{"role": "user", "content": "b"}])]
    assert len(own.collect()) == 1  # its first turn is written, and then it ends
    own.act([(image, 0)], answered([[0]]))
    assert own.collect() == []
    [[one], [other]] = (group.batch.non_tensor_batch[fields.EPISODE] for group in (timed, image))
    assert (one["status"], other["status"]) == ("seconds", "raised")
    assert "a row with images" in other["detail"]


def test_a_row_whose_observation_the_template_cannot_write_fails_alone():
    def following_ids(rows):
        if any(sampled == [5, 6] for sampled, _ in rows):
            raise ModelError("there is no such role")
        return [[9, 9]] * len(rows)

    group, own = PromptGroup(0, prompts(3)), episodes(Pool())
    own.turns.following_ids, own.turns.with_tools = following_ids, lambda _: own.turns
    own.act([(group, 2), (group, 0), (group, 1)], answered([[0], [0, 0], [0, 0, 0]]))
    more = {int(part.rows[0]): part.tokens.batch for part in own.collect()}
    found = {row: tokens[fields.RESPONSES][0].tolist() for row, tokens in more.items()}
    assert found == {2: [5, 9, 9, 0, 0, 0], 1: [5, 6, 7, 9, 9, 0]}
    assert more[1][fields.TOKEN_VERSIONS][0].tolist() == [0, 0, 0, -2, -2, 0]
    [(rows, failed)] = group.answers
    about = failed.non_tensor_batch[fields.EPISODE][0]
    assert (rows.tolist(), about["status"], about["turns"]) == ([0], "raised", 1)


def test_an_error_leaves_no_episode_for_the_next_batch():
    def fails(_):
        raise RolloutError("no engine")

    group = SimpleNamespace(
        world_size=1, generate_sequences=SimpleNamespace(submit=fails), init_model=lambda: None
    )
    own, config = episodes(Pool()), load_config(TrainConfig, [f"data.max_response_length={R}"])
    generator = EpisodeGenerator(config, Replicas(lambda _: group, 1), own, apart=False)
    for _ in range(2):
        with pytest.raises(RolloutError, match="no engine"):
            generator.play(prompts(2), lambda rows: rows)
        assert not own.acting and own.rows_of(None) == 0 and own.complete() == []


@pytest.mark.parametrize(
    ("answers", "starts"),
    [
        ([], 0.5),  # no other answer for a part of the time of a call
        ([0.4, 0.8, 1.2, 1.6], 2.1),
        ([0.4 * n for n in range(20)], 5.0),  # not longer than half a call
    ],
)
def test_a_call_waits_for_the_answers_that_come_one_after_the_other(monkeypatch, answers, starts):
    now, own = [0.0], SimpleNamespace(acting=True, complete=list)
    own.collect = lambda: [now[0]] if any(abs(now[0] - one) < 1e-9 for one in answers) else []
    replicas, queue = SimpleNamespace(working=[]), SimpleNamespace(groups={})
    generation = sliced.SlicedGeneration(
        replicas, queue, None, 1, R, 9, False, lambda *_: None, episodes=own
    )
    generation.paused, generation._call_s = ["a row"], 10.0
    monkeypatch.setattr(sliced, "time", SimpleNamespace(perf_counter=lambda: now[0] + 100))
    monkeypatch.setattr(generation, "reclaim", lambda: None)
    for tick in range(80):
        now[0] = tick / 10
        generation.keep(None)
        if not generation._waits_for_others():
            break
    assert now[0] == pytest.approx(starts, abs=0.11)


def test_a_checkpoint_holds_the_prompts_before_reset(tmp_path):
    def parts() -> tuple[PromptQueue, SimpleNamespace]:
        generation = SimpleNamespace(
            episodes=None, paused=[], go_on=lambda _: None, replicas=SimpleNamespace(working=[])
        )
        return PromptQueue(StalenessBound(1, 1), 2), generation

    queue, generation = parts()
    chat = [{"role": "user", "content": "before"}]
    queue.add([PromptGroup(3, prompts(2), started=0, chats={1: chat}), PromptGroup(4, prompts(2))])
    save_groups(tmp_path, queue, generation, {"drawn": 1})
    again, generation = parts()
    assert load_groups(tmp_path, again, generation)["drawn"] == 1
    assert {number: group.chats for number, group in again.groups.items()} == {3: {1: chat}, 4: {}}


@pytest.mark.parametrize(("asked", "most"), [(None, 3), (2, 2), (5, 3)])
def test_a_request_shortens_turns_and_does_not_lengthen_them(asked, most):
    group, own = PromptGroup(0, prompts()), episodes(Pool())
    group.max_tokens, own.max_turn_tokens = {0: asked} if asked else {}, 3
    mask = (torch.arange(R) < torch.arange(1, R)[:, None]).long()
    rows = DataProto.from_dict({fields.RESPONSES: mask, fields.RESPONSE_MASK: mask})
    ended = [bool(own.turn_ended([(group, 0)], rows.select_idxs([i]))) for i in range(R - 1)]
    assert ended == [size >= most for size in range(1, R)]


def test_a_row_whose_environment_is_slow_does_not_keep_the_others_of_its_call():
    """The last turn of each row was cut, so each ends with the answer of its environment."""
    group, pool = PromptGroup(0, prompts(8)), Pool()
    own, calls = episodes(pool), [[0, 0, -2, -2, row, row] for row in range(8)]
    own.act([(group, row) for row in range(8)], answered(calls, finished=0))
    pool.waiting, slow = pool.waiting[:7], pool.waiting[7]
    assert own.collect() == []
    ((_, rows, results),) = own.waiting()
    (episode,) = own._rows.values()
    assert rows.tolist() == [7] and len(episode.results) == 1
    assert results.batch[fields.TOKEN_VERSIONS].tolist() == [calls[7]]
    pool.waiting = [slow]
    assert own.collect() == [] and own.complete() == [group]


def test_rows_that_begin_are_joined_with_rows_whose_experts_are_known():
    old = answered([[0, 0]]).union(
        DataProto.from_dict({fields.ROUTED_EXPERTS: torch.ones(1, R, 2, 1, dtype=torch.int8)})
    )
    joined = DataProto.concat(with_routes([answered([[0]]), old]))
    assert joined.batch[fields.ROUTED_EXPERTS].flatten(1).tolist() == [[-1] * 2 * R, [1] * 2 * R]
