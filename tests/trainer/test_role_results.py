"""A result of an added stage that does not fit is named, and updates see the batch only."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_cases import trained

from quadriga.errors import FieldError, LengthError, WorkerError
from quadriga.observability.metrics import MetricSet
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.registry import PlacedStage, Role
from quadriga.trainer.stages import StageRunner

MASK, SCORES = fields.RESPONSE_MASK, fields.TOKEN_LEVEL_SCORES
ROWS: list[int] = []


def log_role(prefix: str, report: DataProto) -> None:
    MetricSet().add(report.meta_info.get("metrics", {}))


def run_stage(answer, *writes: str, ranks: int = 1) -> DataProto:
    """Run an added stage whose method is `answer` on 5 rows of 3 tokens."""
    stage = RoleStage("answer", reads=(MASK, SCORES), writes=writes, after="score_responses")
    batch = DataProto.from_dict({MASK: torch.ones(5, 3), SCORES: torch.zeros(5, 3)})
    group = SimpleNamespace(answer=answer, world_size=ranks)
    record = SimpleNamespace(span=lambda name: nullcontext(), log_role=log_role)
    runner = StageRunner([PlacedStage("odd", stage)], {"odd": group}, record)
    return runner.run_added("after", batch, "score_responses")


def tensor(key: str, change):
    return lambda data: DataProto.from_dict(tensors={key: change(data.batch[SCORES])})


FIELDS = {
    "numbers without a fraction": (
        tensor(SCORES, torch.Tensor.long),
        r"token_level_scores \[5, 3\] of int64, expected a tensor \[B, R\] of float32 "
        r"\(response_mask is \[5, 3\]\)",
    ),
    "one number a row": (tensor(SCORES, lambda s: s.sum(-1)), r"scores \[5\] of float32"),
    "one column": (tensor(SCORES, lambda s: s[:, :1]), r"scores \[5, 1\] of float32"),
    "an array": (
        lambda data: DataProto.from_dict(non_tensors={SCORES: np.zeros((5, 3))}),
        r"scores \[5, 3\] of float64, expected",
    ),
    "a field that is missing": (tensor("gain", lambda s: s), "scores, but returned gain; make bo"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_is_not_as_declared_is_named(case) -> None:
    answer, words = FIELDS[case]
    with pytest.raises(FieldError, match=f"stage odd.answer .*{words}"):
        run_stage(answer, SCORES)


def test_other_floats_and_fields_of_the_user_are_taken() -> None:
    def answer(data: DataProto) -> DataProto:
        tensors = {SCORES: data.batch[SCORES].bfloat16(), "gain": torch.zeros(len(data), 3, 2)}
        return DataProto.from_dict(tensors=tensors)

    assert run_stage(answer, SCORES, "gain").batch["gain"].shape == (5, 3, 2)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_counted_with_those_that_pad_a_batch(rows) -> None:
    def answer(data: DataProto) -> DataProto:
        return data.slice(0, rows).select(batch_keys=[SCORES])

    with pytest.raises(LengthError, match=f"got 6 rows and returned {rows}; expected one row"):
        run_stage(answer, SCORES, ranks=2)


@pytest.mark.parametrize("value", ["much", torch.ones(3), None])
def test_a_metric_that_is_no_number_is_named(value) -> None:
    with pytest.raises(WorkerError, match=r"odd.answer returned a metric that is no number"):
        run_stage(lambda data: DataProto(meta_info={"metrics": {"gain": value}}))


class Odd(Worker):
    """Counts the rows that it gets, and returns only metrics."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def answer(self, data: DataProto) -> DataProto:
        ROWS.append(len(data))
        return DataProto(meta_info={"metrics": {"rows": float(len(data))}})


def test_an_update_sees_no_greedy_responses(train_overrides, own_roles) -> None:
    """They are scored beside the batch, and their number need not divide over the ranks."""
    ROWS.clear()
    stage = RoleStage("answer", reads=(MASK, SCORES), after="score_responses")
    register_role(Role.add("Odd"), worker=Odd, stages=[stage])
    rows = trained(
        [*train_overrides, "trainer.n_gpus_per_node=4", "placement.actor=[0]",
         "placement.odd=[1-3]", "algorithm.adv_estimator=remax", "data.train_batch_size=4",
         "actor_rollout_ref.rollout.n=3", "trainer.total_training_steps=1"],
    )  # fmt: skip
    assert ROWS == [4, 4, 4]
    assert rows[-1]["odd/rows"] == 4
