"""Prompt groups that are generated while the policy is trained: none is lost, too old or mixed."""

import random
from collections import deque
from contextlib import closing
from datetime import date
from unittest import mock

import numpy as np
import pytest
import torch
from stream_cases import COLUMNS, Engine, length_of, sampler, score

from quadriga.algorithms.advantages import compute_advantages
from quadriga.errors import FieldError, WorkerDiedError, WorkerError
from quadriga.observability.jsonl import JsonlFile
from quadriga.protocol import DataProto, fields
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.staleness import StalenessBound
from quadriga.trainer.streaming import StreamedSampler, in_order


@pytest.mark.parametrize(
    ("steps", "ended", "started", "complete", "chosen"),
    [
        (1, 0, "A0 B0 C0 D0", "A C D", "A C"),
        (1, 1, "B0 D0 E1 F1", "B D E", "B D"),  # of age 1: both must be trained
        (1, 1, "B0 D0 E1 F1", "D E F", None),  # waits for B
        (1, 2, "E1 F1 G2 H2", "E G H", None),  # waits for F
        (1, 2, "E1 G2 H2", "G H E", "E G"),  # E must be, and G was complete first
        (1, 0, "A0 B0", "B A", "A B"),
        (1, 0, "A0 B0", "B", None),
        (0, 5, "H5 I5", "I", None),  # without staleness a step trains its own groups
        (0, 5, "H5 I5", "I H", "H I"),
    ],
)
def test_the_groups_of_a_step(steps, ended, started, complete, chosen):
    at = {ord(name): int(step) for name, step in started.split()}
    found = StalenessBound(2, steps).choose(ended, at, [ord(name) for name in complete.split()])
    assert (found and [chr(number) for number in found]) == (chosen and chosen.split())


def test_as_few_groups_begin_as_keep_the_trainer_at_work():
    bound, begun, aims = StalenessBound(groups=8, steps=4), deque(), []
    queue = PromptQueue(bound, 40, overlaps=True)
    queue.add([PromptGroup(number, DataProto()) for number in range(80)])
    for step, (waits, more) in enumerate([(1, 0), (1, 2), (0, 2), (0, 10), (0, 2)]):
        queue.ended = step
        assert not waits or queue.take() is queue.take() is None
        while queue.can_start:
            begun.append(queue.start(queue.waiting[0]))
        while len(queue.complete) < 8 + more:
            queue.ready(begun.popleft())
        assert len(queue.take()) == 8 and len(queue.complete) == more
        aims.append(queue.aim)
    assert aims == [16, 24, 24, 22, 22]
    resumed = PromptQueue(bound, 40, overlaps=True)
    resumed.add(list(queue.groups.values()))
    assert resumed.aim == len(begun) + 2 == 14, "groups that had begun"


@pytest.mark.parametrize(("lost", "restarts", "free", "pauses"), [
    (False, 1, None, False), (True, 0, None, False), (True, 1, None, True),
    (True, 0, (), False), (True, 0, (1,), True), (False, 0, (2,), True), (False, 0, (1,), False),
])  # fmt: skip
def test_weights_in_flight_wait_for_a_replica_that_starts(lost, restarts, free, pauses):
    more = ["actor_rollout_ref.rollout.update=in_flight"]
    with closing(sampler(random.Random(1), more=more)) as ours:
        ours.replicas.restarts, ours.replicas.most = restarts, 3 if free is not None else None
        ours.replicas.room = None if free is None else free.__contains__
        if lost:
            ours.replicas.lose(ours.replicas.all[1], WorkerDiedError("ended"))
        with ours.syncing() as applying:
            assert (applying is None) == pauses


def trained(ours: StreamedSampler, first: int = 1, last: int | None = None) -> list[DataProto]:
    """The batches of some steps. A weight sync ends each step."""
    found = []
    for step in range(first, (last or ours.total_steps) + 1):
        found.append(ours.draw(step).batch)
        calls = sum(len(replica.group.asked) for replica in ours.replicas.all)
        with ours.syncing():
            after = sum(len(replica.group.asked) for replica in ours.replicas.all)
            assert ours.overlaps or after == calls, "the actor has trained the weights they share"
            for replica in ours.replicas.all:
                replica.group.version = step
            ours.replicas.restart_lost()
            for replica in ours.replicas.all:
                replica.group.version = step
    return found


def check(ours: StreamedSampler, found: list[DataProto], staleness: int) -> None:
    """Every prompt of the run is trained once, whole, and by weights that are new enough."""
    n = ours.config.actor_rollout_ref.rollout.n
    size, refills = ours.config.data.train_batch_size, ours.config.algorithm.filter_groups.enable
    places = [[int(uid.split("-")[0]) for uid in b.non_tensor_batch[fields.UID]] for b in found]
    if not (refills or ours.queue.restarted):  # so the lengths of a step have no bias either
        for step, drawn in enumerate(places, start=1):
            assert step - staleness <= min(drawn) <= max(drawn) <= step + staleness
    uids = [uid for batch in found for uid in batch.non_tensor_batch[fields.UID]]
    expected = {f"{s}-0-{i}" for s in range(1, len(found) + 1) for i in range(size)}
    assert refills or set(uids) == expected
    assert len(uids) == n * len(set(uids)) == n * len(expected)
    for step, batch in enumerate(found, start=1):
        mask, ids = batch.batch[fields.RESPONSE_MASK], batch.batch[fields.RESPONSES]
        versions = batch.batch[fields.TOKEN_VERSIONS]
        for row in range(len(batch)):
            length, first = int(mask[row].sum()), int(ids[row, 0])
            assert length == length_of(first), "the seed is the first token"
            assert ids[row, :length].tolist() == list(range(first, first + length))
            own = versions[row, :length].tolist()
            assert own == sorted(own) and own[-1] <= step - 1
            assert own[0] >= step - 1 - staleness, "too old"
            assert own[0] == own[-1] or ours.config.actor_rollout_ref.rollout.update == "pause"
        groups = batch.non_tensor_batch[fields.UID].reshape(-1, n)
        assert (groups == groups[:, :1]).all(), "the rows of a prompt are neighbours"
        scores = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1)
        lengths = mask.sum(-1)
        assert scores.tolist() == lengths.tolist()
        if refills:
            assert (lengths.view(-1, n) != lengths.view(-1, n)[:, :1]).any(-1).all()
        if fields.REWARD_BASELINES in batch.batch.keys():  # noqa: SIM118
            greedy = lengths.view(-1, n)[:, :1].expand(-1, n).ravel()  # it has the first seed
            assert batch.batch[fields.REWARD_BASELINES].tolist() == greedy.tolist()


DRAIN, REMAX = "actor_rollout_ref.rollout.update=drain", "algorithm.adv_estimator=remax"
REFILL = "algorithm.filter_groups={enable: true, mode: refill, max_num_gen_batches: 99}"
FACTOR = "actor_rollout_ref.rollout.oversample="
CASES = [
    {"staleness": 1}, {"staleness": 3, "replicas": 3}, {"staleness": 2, "prompts": 1, "n": 1},
    {"staleness": 1, "overlaps": False}, {"staleness": 4, "overlaps": False, "slice_tokens": 1},
    {"staleness": 2, "slice_tokens": COLUMNS}, {"more": [FACTOR + "1"], "prompts": 5},
    {"staleness": 2, "more": [FACTOR + "1.25", DRAIN], "overlaps": False, "prompts": 8},
    {"staleness": 2, "more": [DRAIN]}, {"staleness": 2, "more": [REMAX]},
    {"staleness": 2, "more": [REFILL, FACTOR + "1.5"]},
    {"staleness": 1, "more": [REFILL, REMAX], "overlaps": False, "n": 3},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_trained_once_and_in_time(case, seed):
    with closing(sampler(random.Random(seed), steps=8, **case)) as ours:
        check(ours, trained(ours), case.get("staleness", 1))
        after = next(ours.stream).batch[fields.INPUT_IDS]  # what a longer run would go on with
        assert after[0] == -(-ours._all_dropped // len(after) + -8) * len(after)
    assert (ours._all_dropped or not ours.queue.groups) and not ours.generation.calling


def test_a_group_is_compared_whatever_the_versions_of_its_responses():
    given = {"n": 4, "staleness": 2, "slice_tokens": 1, "overlaps": False}
    with closing(sampler(random.Random(3), **given)) as ours:
        found = DataProto.concat(trained(ours)).batch
    last = found[fields.TOKEN_VERSIONS].amax(1).view(-1, 4)
    assert (last != last[:, :1]).any(), "members of a group have ended with different weights"
    score = found[fields.TOKEN_LEVEL_SCORES].sum(-1).view(-1, 4)
    above = score - score.mean(1, keepdim=True)
    scaled = above / (score.std(1, keepdim=True) + 1e-6)
    mask, groups = found[fields.RESPONSE_MASK], np.arange(len(score)).repeat(4)
    rewards = {"token_level_rewards_BT": found[fields.TOKEN_LEVEL_SCORES], "response_mask_BT": mask}
    for name, expected in {"grpo": scaled, "dr_grpo": above, "rloo": above * 4 / 3}.items():
        advantages, _ = compute_advantages(name, **rewards, group_ids=groups)
        torch.testing.assert_close(advantages, expected.view(-1, 1) * mask)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kept", [True, False])
def test_the_groups_of_a_lost_replica_go_on_elsewhere(seed, kept, monkeypatch):
    """They begin again if the store has lost their tokens, too."""
    if not kept:
        monkeypatch.setattr(DataProto, "prefetch", mock.Mock(side_effect=WorkerError("lost")))
    with closing(sampler(random.Random(seed), steps=8, replicas=3, dies=0.2)) as ours:
        check(ours, found := trained(ours), 1)
    assert sum(replica.starts for replica in ours.replicas.all) > 3
    tokens = sum(int(batch.batch[fields.RESPONSE_MASK].sum()) for batch in found)
    assert Engine.answered == tokens if kept else not ours.generation.moved


def test_scores_of_groups_that_were_lost_meanwhile_do_not_count(monkeypatch):
    monkeypatch.setattr(DataProto, "prefetch", mock.Mock(side_effect=WorkerError("lost")))
    lost = []

    def loses_the_replica(data):
        with ours._changed:
            homes = [group.home for group in ours.queue.groups.values() if group.batch is not None]
            if not lost:
                lost.extend(homes[:1])
                ours.replicas.lose(homes[0], WorkerDiedError("the process of rank 0 ended"))
                ours.generation.reclaim()
        return score(data)

    with closing(sampler(random.Random(0), steps=8)) as ours:
        ours.reward = loses_the_replica
        check(ours, trained(ours), 1)
    assert lost and ours.queue.restarted


def test_the_loss_of_the_actor_and_an_error_of_the_reward_end_the_run():
    ours = sampler(random.Random(0), overlaps=False)
    ours.replicas.all[0].group.dies = 1.0
    with pytest.raises(WorkerDiedError, match="the process of rollout rank 0 ended"):
        ours.draw(1)
    with closing(sampler(random.Random(0))) as ours:
        ours.reward = mock.Mock(side_effect=ZeroDivisionError("in the reward"))
        with pytest.raises(ZeroDivisionError, match="in the reward"):
            ours.draw(1)


@pytest.mark.parametrize("more", [[], [REFILL, REMAX, FACTOR + "1.5"]])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_resumed_stream_has_every_group_and_every_token(overlaps, at, more, tmp_path):
    given = {"steps": 6, "staleness": 2, "overlaps": overlaps, "slice_tokens": 1, "more": more}
    first = sampler(random.Random(at), **given)
    with closing(first):
        before = trained(first, last=at)
        with first.paused("save"):
            files = first.save(tmp_path)
    assert {file.name.split("/")[0] for file in files} == {"stream"}
    second = sampler(random.Random(9), **given)
    with closing(second):
        second.load(tmp_path, at)
        for replica in second.replicas.all:
            replica.group.version = at
        for _ in range(second._drawn):
            next(second.stream)
        asked = list(second.generation.paused)
        check(second, before + trained(second, first=at + 1), 2)
    if not overlaps and at == 1:
        assert asked, "responses were paused when the checkpoint was saved"


def test_prompts_that_no_checkpoint_can_hold_are_refused_before_the_first_step():
    ours = sampler(random.Random(0))
    rows = next(sampler(random.Random(0), prompts=3).stream)
    rows.non_tensor_batch["extra_info"] = np.array([date.min] * 3, dtype=object)
    ours.stream = iter([rows])
    with pytest.raises(FieldError, match=r"max_staleness=1 saves .*'extra_info' contains a .*date"):
        ours.draw(1)


def test_a_stream_with_other_data_begins_no_prompt_of_an_earlier_step():
    ours = sampler(random.Random(0))
    ours.load(None, 3)
    assert ours._drawn == 3 and not ours.queue.groups


def test_calls_that_had_the_weights_before_are_repeated_before_the_update(tmp_path):
    names = ["call", "take", "sync", "call", "call", "take", "sync", "call", "call"]
    steps, synced = [1, 1, 1, 1, 2, 2, 2, 3, 2], {3: 0, 8: 1}
    with closing(JsonlFile(tmp_path / "stream.jsonl")) as file:
        for line, (step, name) in enumerate(zip(steps, names, strict=True)):
            late = {"synced": synced[line]} if line in synced else {}
            file.write({"step": step, name: [], "at": 0.0, **late})
    found = [event.line - 1 for event in in_order(tmp_path / "stream.jsonl")]
    assert found == [0, 1, 3, 2, 4, 5, 8, 6, 7]
