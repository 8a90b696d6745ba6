"""A result of an added stage that does not fit is named, and updates see the batch only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError, FieldError, LengthError, WorkerError
from quadriga.observability.jsonl import read_jsonl
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.dataflow import StepPlan, validation_dataflow
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.registry import load_train_config

MASK, SCORES = fields.RESPONSE_MASK, fields.TOKEN_LEVEL_SCORES
ANSWER = [None]
ROWS: list[int] = []


class Odd(Worker):
    """Returns what a test has put into `ANSWER`."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def answer(self, data: DataProto) -> object:
        ROWS.append(len(data))
        return ANSWER[0](data)


def train(overrides, *more: str) -> list[dict[str, float]]:
    config = load_train_config([*overrides, *more])
    trainer = RayPPOTrainer(config)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
    return list(read_jsonl(f"{config.trainer.default_local_dir}/metrics.jsonl"))


def add_odd(answer, *writes: str, **place: object) -> None:
    ANSWER[0] = answer
    ROWS.clear()
    place = place or {"after": "score_responses"}
    stage = RoleStage("answer", reads=(MASK, SCORES), writes=writes, **place)
    register_role(Role.add("Odd"), worker=Odd, stages=[stage])


def tensor(key: str, change):
    return lambda data: DataProto.from_dict(tensors={key: change(data.batch[SCORES])})


FIELDS = {
    "numbers without a fraction": (
        SCORES, tensor(SCORES, torch.Tensor.long),
        r"token_level_scores as a tensor \[16, 12\] of int64, expected \[B, R\] of float32 "
        r"\(response_mask is \[16, 12\]\): score of the reward function",
    ),
    "one number a row": (SCORES, tensor(SCORES, lambda s: s.sum(-1)), r"tensor \[16\] of float32"),
    "one column": (SCORES, tensor(SCORES, lambda s: s[:, :1]), r"a tensor \[16, 1\] of float32"),
    "an array": (
        SCORES, lambda data: DataProto.from_dict(non_tensors={SCORES: np.zeros((16, 12))}),
        r"as an array \[16, 12\] of float64, expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_is_not_as_declared_is_named(train_overrides, own_roles, case) -> None:
    key, answer, words = FIELDS[case]
    add_odd(answer, key)
    with pytest.raises(FieldError, match=f"stage odd.answer returned .*{words}") as caught:
        train(train_overrides)
    assert caught.value.field == key


def test_other_floats_and_fields_of_the_user_are_taken(train_overrides, own_roles) -> None:
    add_odd(
        lambda data: DataProto.from_dict(
            tensors={SCORES: data.batch[SCORES].bfloat16(), "gain": torch.zeros(len(data), 3, 2)}
        ),
        SCORES, "gain",
    )  # fmt: skip
    assert len(train(train_overrides)) == 3


APART = ("trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.odd=[1-2]",
         "trainer.val_before_train=true", "data.val_batch_size=5")  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_counted_with_those_that_pad_a_batch(train_overrides, own_roles, rows) -> None:
    add_odd(
        lambda data: data.slice(0, 1).repeat(rows).select(batch_keys=[SCORES]), SCORES,
        after="score_responses", in_validation=True,
    )  # fmt: skip
    with pytest.raises(LengthError, match=f"got 6 rows and returned {2 * rows}; expected one row"):
        train(train_overrides, *APART)


METRICS = {
    "a text": ({"gain": "much"}, "the metric 'gain': .*'much'.*, expected a number"),
    "several numbers": ({"gain": torch.ones(3)}, "the metric 'gain': .*, expected a number"),
}


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_that_is_no_number_is_named(train_overrides, own_roles, case) -> None:
    metrics, words = METRICS[case]
    add_odd(lambda data: DataProto(meta_info={"metrics": metrics}))
    with pytest.raises(WorkerError, match=f"stage odd.answer returned {words}"):
        train(train_overrides)


def test_an_update_sees_no_greedy_responses(train_overrides, own_roles) -> None:
    """They are scored beside the batch, and their number need not divide over the ranks."""
    add_odd(lambda data: None)
    placed = ("trainer.n_gpus_per_node=4", "placement.actor=[0]", "placement.odd=[1-3]")
    train(train_overrides, *placed, "algorithm.adv_estimator=remax", "data.train_batch_size=4",
          "actor_rollout_ref.rollout.n=3", "trainer.total_training_steps=1")  # fmt: skip
    assert ROWS == [4, 4, 4]


# What a stage writes must be used.


def flow_with(train_overrides, writes: str, *more: str, **place: str):
    stages = [RoleStage("answer", reads=(fields.ATTENTION_MASK,), writes=(writes,), **place)]
    register_role(Role.add("Odd"), worker=Odd, stages=stages)
    return StepPlan.of(load_train_config([*train_overrides, *more])).stages


REF = "algorithm.use_kl_in_reward=true"
LOST = {
    "advantages": (fields.ADVANTAGES, {"before": "estimate_advantages"}, "estimate_advantages"),
    "rewards": (fields.TOKEN_LEVEL_REWARDS, {"after": "score_responses"}, "shape_scores"),
    "a mask": (MASK, {"before": "generate_sequences"}, "generate_sequences"),
    "a pass": (fields.REF_LOG_PROB, {"before": "compute_ref_log_prob"}, "compute_ref_log_prob"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_field_that_is_written_again_is_refused(train_overrides, own_roles, case) -> None:
    key, place, later = LOST[case]
    words = f"stage odd.answer writes {key}, but stage {later} then writes it again; place"
    with pytest.raises(ConfigError, match=words):
        flow_with(train_overrides, key, REF, **place)


def test_a_field_that_a_pass_is_computing_is_refused(train_overrides, own_roles) -> None:
    words = "stage odd.answer writes ref_log_prob, but beside score_responses it runs while"
    with pytest.raises(ConfigError, match=words):
        flow_with(train_overrides, fields.REF_LOG_PROB, REF, after="score_responses")


def test_of_two_roles_that_score_one_is_refused(train_overrides, own_roles) -> None:
    for name in ("First", "Second"):
        stage = RoleStage("answer", reads=(MASK,), writes=(SCORES,), before="score_responses",
                          in_validation=True)  # fmt: skip
        register_role(Role.add(name), worker=Odd, stages=[stage])
    config = load_train_config(train_overrides)
    for flow in (StepPlan.of, validation_dataflow):
        with pytest.raises(ConfigError, match=r"token_level_scores, but stage second\.answer"):
            flow(config)
