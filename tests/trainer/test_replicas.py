"""A rollout of replicas: each row is answered once, whichever replica is slow, stale or lost."""

from collections.abc import Iterator
from contextlib import closing
from itertools import repeat

import pytest
from replica_groups import NEEDS, Future, Group, Method, died, prompts, raised
from run_cases import metrics_of_run, timeless, two_steps

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import ReplicasConfig, RolloutEngineConfig, TrainConfig
from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    RolloutDiedError,
    RolloutInputError,
    RolloutTimeoutError,
    WorkerError,
    WorkerMethodError,
)
from quadriga.protocol import fields
from quadriga.streams.replicas import ReplicaLink, Replicas, ReplicatedRollout
from quadriga.trainer.checks.settings import check_generate_settings
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.preflight import check_settings
from quadriga.trainer.stages import StageRunner


def rollout(*groups: Group, restarts: int = 0, **settings) -> ReplicatedRollout:
    waiting = iter(groups)
    count = len(groups) - restarts
    replicas = Replicas(lambda number: next(waiting), count, restarts)
    replicas.version = 1
    given = ReplicasConfig(enable=True, **{"request_rows": 2, **settings})
    return ReplicatedRollout(replicas, RolloutEngineConfig(replicas=given))


def answered(ours: ReplicatedRollout, batch) -> None:
    """Check that every row has its own answer, in the order of the rows."""
    out = ours.generate_sequences(batch)
    expected = batch.batch[fields.SAMPLE_SEED] * 10
    assert out.batch[fields.RESPONSES][:, 0].tolist() == expected.tolist()


def asked(*groups: Group) -> list[int]:
    """Every row of which some replica was asked, sorted; a row that was asked twice is there
    twice."""
    return sorted(row for group in groups for rows in group.asked for row in rows)


WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta")


def test_replicas_join_and_come_back_where_there_is_room():
    """At a weight sync: what joins gets its weights and rows, and no loss counts as a restart."""
    first, second, back, joins = (Group() for _ in range(4))
    free: set[int] = set()
    waiting = iter((first, second, back, joins))
    replicas = Replicas(lambda number: next(waiting), 2, 0, free.__contains__, 1, 3)
    link = ReplicaLink(Sender(), replicas)
    link.sync()
    assert len(replicas.working) == 2
    replicas.lose(replicas.all[1], died())
    link.sync()
    assert [r.number for r in replicas.working] == [0]
    free |= {1, 2, 3}
    back.version = joins.version = first.version  # of the actor, in a real sync
    link.sync()
    assert [(r.number, r.starts) for r in replicas.working] == [(0, 1), (1, 2), (2, 1)]
    assert [r.group for r in replicas.working] == [first, back, joins] and replicas.restarts == 0
    ours = ReplicatedRollout(replicas, RolloutEngineConfig(replicas=ReplicasConfig(request_rows=1)))
    answered(ours, prompts(*WORDS))
    assert asked(first, back, joins) == list(range(7)) and joins.asked


def test_an_elastic_replica_that_does_not_start_is_tried_three_times(caplog):
    groups = [Group() for _ in range(4)]
    for group in groups[1:]:
        group.init_model = Method(lambda: Future(error=raised(OSError("no memory"))))
    waiting = iter(groups)
    replicas = Replicas(lambda number: next(waiting), 1, 0, lambda number: True, 1, 2)
    for _ in range(5):
        replicas.restart_lost()
    assert [group.ended for group in groups] == [0, 1, 1, 1] and [*replicas.to_start()] == []
    assert caplog.text.count("replica 1 cannot be started: ") == 3
    assert "replica 1 has failed to start 3 times and is not tried again" in caplog.text


def test_fewer_replicas_than_the_settings_allow_end_the_run():
    groups = iter((Group(), Group()))
    replicas = Replicas(lambda number: next(groups), 2, 0, lambda number: False, 2, 3)
    replicas.lose(replicas.all[0], died())
    with pytest.raises(RolloutDiedError, match=r"fewer than min_count=2 .* replica 0: the process"):
        replicas.working  # noqa: B018  # a property that raises


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{min_count: 2}", "so min_count and max_count have no effect"),
        ("{elastic: true}", "is for replicas; set rollout.replicas.enable=true"),
        ("{elastic: true, enable: true, min_count: 3}", "2 replicas at the start are not in 3 … 4"),
        ("{elastic: true, enable: true, max_count: 1}", "2 replicas at the start are not in 1 … 1"),
    ],
)
def test_elastic_settings_that_do_not_fit_are_refused(given, problem):
    settings = [f"rollout.replicas={given}", "trainer.n_gpus_per_node=2", "model.path=x"]
    with pytest.raises(ConfigError, match=problem):
        check_generate_settings(load_config(GenerateConfig, settings))


class TestRows:
    def test_each_row_is_asked_once_and_answered_in_order(self):
        groups = Group(), Group(), Group(looks=1)
        ours = rollout(*groups)
        assert ours.world_size == 1
        answered(ours, prompts(*WORDS))
        assert asked(*groups) == list(range(7))
        assert all(group.asked for group in groups)

    def test_the_samples_of_one_prompt_are_asked_of_one_replica_together(self):
        groups = Group(), Group()
        answered(rollout(*groups), prompts("alpha", "beta", "gamma", n=4))
        assert asked(*groups) == list(range(12))
        for rows in (rows for group in groups for rows in group.asked):
            assert rows == list(range(rows[0], rows[0] + 4)) and rows[0] % 4 == 0

    def test_a_slow_replica_is_asked_less_often(self):
        slow, fast = Group(looks=50), Group()
        answered(rollout(slow, fast, request_rows=1), prompts(*"abcdefghijklmnop"))
        assert len(slow.asked) == 2  # as many as it may have at once
        assert asked(slow, fast) == list(range(16))


LOSSES = {
    "its process ends": died(),
    "a call exceeds its deadline": CallTimeoutError("deadline exceeded"),
    "its engine dies": raised(RolloutDiedError("the connection is lost")),
    "its engine is late": raised(RolloutTimeoutError("no answer after 5 s")),
}


class TestLosses:
    @pytest.mark.parametrize("error", LOSSES.values(), ids=LOSSES)
    def test_the_rows_of_a_lost_replica_are_asked_of_another_one(self, error, caplog):
        lost, other = Group(fails={1: error}, looks=1), Group(looks=1)
        ours = rollout(lost, other)
        batch = prompts("alpha", "beta", "gamma", "delta", "epsilon", n=3)
        answered(ours, batch)
        # Its first answer counts; the second request, and what was in flight behind it, do not.
        again = [row for rows in lost.asked[1:] for row in rows]
        assert asked(lost, other) == sorted([*range(15), *again])
        assert lost.ended == 1 and other.ended == 0
        assert "replica 0 of the rollout is lost, 1 of 2 are left" in caplog.text
        for rows in other.asked:  # the samples of a prompt are still together
            assert len(rows) % 3 == 0
        answered(ours, batch)  # without the lost one

    def test_a_late_answer_of_a_lost_replica_is_not_counted(self):
        lost, other = Group(fails={0: died()}), Group()
        futures = []
        submit = lost.generate_sequences.submit
        lost.generate_sequences.submit = lambda rows: futures.append(submit(rows)) or futures[-1]
        answered(rollout(lost, other), prompts(*WORDS))
        assert [future.cancelled for future in futures] == [False, True]

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("stale", "the weights of version 0 sampled an answer, but the last weight sync gave"),
            ("short", "a replica was asked for 2 responses and returned 1"),
        ],
    )
    def test_a_replica_with_a_wrong_answer_is_lost(self, fault, message, caplog):
        wrong, other = Group(**{fault: True}), Group()
        answered(rollout(wrong, other), prompts(*WORDS))
        assert (wrong.ended, other.ended) == (1, 0)
        assert message in caplog.text

    def test_without_a_replica_the_run_ends_and_every_loss_is_named(self):
        groups = Group(fails={0: died()}), Group(fails={0: raised(RolloutTimeoutError("late"))})
        with pytest.raises(RolloutDiedError, match=r"all 2 replicas .*lost.*replica 0: the pro.*; "
                           "replica 1: RolloutTimeoutError") as error:  # fmt: skip
            rollout(*groups).generate_sequences(prompts(*WORDS))
        assert error.value.__cause__ is not None
        assert [group.ended for group in groups] == [1, 1]

    @pytest.mark.parametrize(
        "error",
        [raised(RolloutInputError("row 0 is empty")), raised(ZeroDivisionError("of the program"))],
        ids=["input", "program"],
    )
    def test_an_error_that_every_replica_would_raise_is_raised(self, error):
        groups = Group(fails={0: error}), Group(looks=100)
        with pytest.raises(WorkerMethodError) as caught:
            rollout(*groups).generate_sequences(prompts(*WORDS))
        assert caught.value is error
        assert [group.ended for group in groups] == [0, 0]


class Sender:
    """An actor that sends two rounds."""

    def __init__(self):
        self.rounds = 0
        self.needs = None
        self.send_weights = self

    def stream(self, needs) -> Iterator[list[str]]:
        self.needs = needs
        for _ in range(2):
            self.rounds += 1
            yield ["part"]


class TestWeightSync:
    def test_all_replicas_get_every_round_of_one_sending(self):
        groups, sender = (Group(), Group()), Sender()
        ours = rollout(*groups)
        ReplicaLink(sender, ours.replicas).sync()
        assert sender.rounds == 2 and sender.needs == NEEDS
        assert [group.received for group in groups] == [2, 2]
        assert ours.replicas.version == 2
        answered(ours, prompts(*WORDS))

    @pytest.mark.parametrize("method", ["weight_needs", "receive_weights", "finish_weights"])
    def test_a_replica_that_is_lost_in_a_sync_is_left_out(self, method):
        groups = Group(weights={method: died()}), Group()
        ours = rollout(*groups)
        ReplicaLink(Sender(), ours.replicas).sync()
        assert [group.ended for group in groups] == [1, 0]
        answered(ours, prompts(*WORDS))
        assert not groups[0].asked

    def test_a_lost_replica_starts_again_and_gets_the_weights_of_the_next_sync(self):
        lost, other, again = Group(fails={0: died()}), Group(), Group(looks=1)
        ours = rollout(lost, other, again, restarts=1)
        answered(ours, prompts(*WORDS))
        again.version = 1
        ReplicaLink(Sender(), ours.replicas).sync()
        assert again.received == 2
        answered(ours, prompts(*WORDS))
        assert again.asked and ours.replicas.restarts == 0
        assert len(ours.replicas.working) == 2

    def test_a_replica_that_does_not_start_again_stays_lost(self, caplog):
        lost, other, again = Group(fails={0: died()}), Group(), Group()
        again.init_model = Method(lambda: Future(error=raised(OSError("no memory"))))
        ours = rollout(lost, other, again, restarts=1)
        answered(ours, prompts(*WORDS))
        ReplicaLink(Sender(), ours.replicas).sync()
        assert "replica 0 cannot be started again" in caplog.text
        assert again.ended == 1 and len(ours.replicas.working) == 1

    def test_replicas_of_several_versions_end_the_run(self):
        ours = rollout(Group(), Group(weights={"finish_weights": [7]}))
        with pytest.raises(WorkerError, match=r"hold the versions \[2, 7\], expected one"):
            ReplicaLink(Sender(), ours.replicas).sync()


KEY = "actor_rollout_ref.rollout.replicas"
APART = (
    "trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.rollout=[1-2]",
    f"{KEY}.enable=true", f"{KEY}.request_rows=3", "algorithm.filter_groups.enable=false",
)  # fmt: skip


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([f"{KEY}.enable=true"], "only the rollout runs, .* of actor"),
            ([*APART, f"{KEY}.request_rows=0"], "request_rows must be at least 1"),
            (
                [*APART, "actor_rollout_ref.rollout.weight_transport=collective",
                 "trainer.backend=ray"],
                "replicas.enable=true; set it to auto",
            ),
        ],
    )  # fmt: skip
    def test_settings_that_do_not_fit_are_refused(self, train_overrides, given, message):
        with pytest.raises(ConfigError, match=message):
            check_settings(load_config(TrainConfig, [*train_overrides, *given]))


class TestRuns:
    def test_a_run_with_replicas_computes_the_numbers_of_one_process(
        self, run, tiny_task, tmp_path
    ):
        together = metrics_of_run([*two_steps(tiny_task, tmp_path / "one")])
        rows, path = run(*APART), "weight_sync/bytes_"
        assert timeless(rows) == timeless(together)
        # The tensors of the actor here, and two copies in the store there.
        assert rows[-1][path + "store"] == 2 * together[-1][path + "in_place"]

    def test_a_replica_that_dies_between_calls_is_replaced_with_the_right_weights(
        self, train_overrides
    ):
        config = load_config(TrainConfig, [*train_overrides, *APART, f"{KEY}.restarts=1"])
        trainer = RayPPOTrainer(config)
        with closing(trainer):
            groups = trainer.init_workers()
            sampler = trainer.make_sampler(groups, StageRunner())
            sampler.stream = repeat(next(trainer.stream))
            before = sampler.draw(1).batch
            replicas = groups.rollout.replicas
            first = replicas.all[0].group
            first.shutdown()
            after = sampler.draw(1).batch
            assert replicas.all[0].loss is not None
            for key in (fields.RESPONSES, fields.ROLLOUT_LOG_PROBS):
                assert (before.batch[key] == after.batch[key]).all(), key
            groups.sync_weights()
            assert replicas.all[0].group is not first and len(replicas.working) == 2
            again = sampler.draw(1).batch
            assert (again.batch[fields.RESPONSES] == before.batch[fields.RESPONSES]).all()
            assert set(again.batch[fields.WEIGHT_VERSION].tolist()) == {2}
