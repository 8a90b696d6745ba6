"""Each fault of an engine is caught by name; the fake engine satisfies the laws without one."""

import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fake_rollout import FakeRollout, full_abilities
from quadriga.errors import (
    RolloutDiedError,
    RolloutError,
    RolloutInputError,
    RolloutOutputError,
    RolloutTimeoutError,
    ShapeError,
)
from quadriga.rollout.base import Continued, RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.guard import GuardedRollout

SAMPLING = SamplingParams(max_new_tokens=6, eos_token_ids=tuple(range(20, 60)), pad_token_id=0)
IDS = torch.tensor([[0, 84, 83], [70, 71, 72]])
MASK = (IDS > 0).long()
SEEDS = torch.tensor([4, 2])
REQUEST = (IDS, MASK, SAMPLING, SEEDS)

# Fault → (class of the error, its attribute `fault`).
CAUGHT = {
    "dies": (RolloutDiedError, None),
    "fails": (RolloutError, None),
    "wedges": (RolloutTimeoutError, None),
    "wrong version": (RolloutOutputError, "weight version"),
    "missing row": (RolloutOutputError, "row count"),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_fault_in_the_middle_is_caught_by_name(folder, fault):
    kind, name = CAUGHT[fault]
    deadline = 1.0 if fault == "wedges" else None
    fake = FakeRollout(folder, fault=fault, after=1)
    engine = GuardedRollout(fake, deadline=deadline, rank=3)
    if deadline is not None:
        engine.deadline = 600.0  # the first answer may take long on a busy machine
    before = engine.generate(*REQUEST)
    engine.deadline = deadline
    with pytest.raises(RolloutError) as caught:
        engine.generate(*REQUEST)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is kind and error.engine == "fake" and error.rank == 3
    assert "rollout engine 'fake' on rank 3" in str(error)
    assert getattr(error, "fault", None) == name
    if name is not None:
        assert error.row == (None if fault == "missing row" else 1)
    assert before.response_mask.any()
    if deadline is not None:
        with pytest.raises(RolloutError, match="exceeded its deadline in generate"):
            engine.score(IDS, MASK)
    engine.close()


def test_an_engine_whose_call_was_interrupted_is_not_used_again(folder, monkeypatch):
    engine = GuardedRollout(FakeRollout(folder, fault="wedges"), deadline=600.0)

    def interrupted(answers, timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", lambda thread: None)
        patched.setattr("quadriga.rollout.guard.wait", interrupted)
        engine._within(600.0, "generate", lambda: None)
    with pytest.raises(RolloutError, match="was interrupted"):
        engine.score(IDS, MASK)
    engine.close()


def guard(name):
    """The guard of an engine without methods, with a window of 8 tokens."""
    abilities = replace(full_abilities(300), window=8)
    return GuardedRollout(
        SimpleNamespace(name=name, abilities=abilities, version=0, holds_adapters=False)
    )


def test_bad_requests_do_not_reach_the_engine():
    engine = guard("untouched")
    with pytest.raises(ShapeError, match="one seed for each of the 2 prompts"):
        engine.generate(IDS, MASK, SAMPLING, SEEDS[:1])
    with pytest.raises(RolloutInputError, match=r"row 1 has 3 tokens .* together 9, .* by 1") as e:
        engine.generate(IDS, MASK, SAMPLING, SEEDS)
    assert e.value.row == 1
    hole = torch.tensor([[1, 0, 1], [1, 1, 1]])
    with pytest.raises(RolloutInputError, match="row 0 has padding between its tokens"):
        engine.generate(IDS, hole, SAMPLING, SEEDS)
    with pytest.raises(RolloutInputError, match="must be integers"):
        engine.generate(IDS, MASK.float(), SAMPLING, SEEDS)


OUT = RolloutOutput(
    response_ids=torch.tensor([[5, 20, 0], [7, 8, 9]]),
    response_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
    rollout_log_probs=torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]]),
    finish_reason=("stop", "length"),
    weight_versions=torch.tensor([2, 2]),
)
THREE = replace(SAMPLING, max_new_tokens=3)


def check(out, sampling=THREE):
    guard("mine").check_output(out, 2, sampling, range(2, 3))


def changed(name, row, column, value):
    tensor = getattr(OUT, name).clone()
    tensor[row, column] = value
    return replace(OUT, **{name: tensor})


FAULTY = [
    ("row count", replace(OUT, weight_versions=torch.tensor([2]))),
    ("row count", replace(OUT, finish_reason=("stop",))),
    ("shape", replace(OUT, response_ids=OUT.response_ids[:, :2])),
    ("dtype", replace(OUT, rollout_log_probs=OUT.rollout_log_probs.double())),
    ("dtype", replace(OUT, response_mask=OUT.response_mask.bool())),
    ("mask", changed("response_mask", 1, 1, 0)),
    ("mask", changed("response_mask", 1, 1, 2)),
    ("mask", changed("response_mask", 0, slice(None), 0)),
    ("token id", changed("response_ids", 1, 0, 300)),
    ("token id", changed("response_ids", 1, 0, -1)),
    ("padding", changed("response_ids", 0, 2, 5)),
    ("log-probability", changed("rollout_log_probs", 0, 1, -torch.inf)),
    ("log-probability", changed("rollout_log_probs", 0, 1, 0.1)),
    ("log-probability", changed("rollout_log_probs", 0, 2, -0.1)),
    ("end", changed("response_ids", 1, 0, 20)),
    ("finish reason", replace(OUT, finish_reason=("length", "length"))),
    ("finish reason", replace(OUT, finish_reason=("stop", "stop"))),
    ("finish reason", changed("response_ids", 0, 1, 6)),
    ("finish reason", replace(OUT, finish_reason=("stop", "abort"))),
    ("weight version", replace(OUT, weight_versions=torch.tensor([2, 1]))),
]


def test_a_right_output_passes():
    check(OUT)
    empty = RolloutOutput(*(torch.zeros(0, 3, dtype=torch.int64),) * 2, torch.zeros(0, 3), (),
                          torch.zeros(0, dtype=torch.int64))  # fmt: skip
    guard("mine").check_output(empty, 0, THREE, range(2, 3))
    # A stop string may end a response with any token.
    check(changed("response_ids", 0, 1, 6), replace(THREE, stop_strings=("x",)))


PAUSED = replace(OUT, finish_reason=("stop", "paused"))


@pytest.mark.parametrize(
    ("out", "sampled", "fault"),
    [
        (PAUSED, [4, 2], None),
        (PAUSED, [3, 3], "finish reason"),  # row 1 is at its limit of 6
        (OUT, [3, 3], None),
        (OUT, [3, 2], "finish reason"),  # row 1 has 5 of 6 tokens
        (replace(PAUSED, finish_reason=("paused", "paused")), [0, 0], "finish reason"),
        (replace(PAUSED, finish_reason=("stop", "stop")), [0, 0], "finish reason"),
        (PAUSED, [5, 0], "mask"),  # row 0 has 7 tokens
    ],
)
def test_paused_rows_have_the_most_new_tokens_and_fewer_than_the_limit(out, sampled, fault):
    continued = Continued(torch.tensor(sampled), at_most=3)
    run = lambda: guard("mine").check_output(out, 2, SAMPLING, range(2, 3), continued)  # noqa: E731
    if fault is None:
        return run()
    with pytest.raises(RolloutOutputError) as raised:
        run()
    assert raised.value.fault == fault


@pytest.mark.parametrize(("fault", "out"), FAULTY, ids=lambda v: v if isinstance(v, str) else "")
def test_each_violation_of_the_protocol_has_a_name(fault, out):
    with pytest.raises(RolloutOutputError, match=r"rollout engine 'mine'.*No training") as caught:
        check(out)
    assert caught.value.fault == fault


def test_an_error_of_the_stream_of_weights_is_not_one_of_the_engine(folder):
    engine = GuardedRollout(FakeRollout(folder))

    def broken():
        yield "model.norm.weight", torch.ones(64)
        raise OSError("the trainer's disk is full")

    with pytest.raises(OSError, match="trainer's disk"):
        engine.update_weights(broken(), 2)


def test_the_guard_tells_what_an_engine_without_digests_read(folder):
    fake = FakeRollout(folder)
    fake.abilities = replace(fake.abilities, exposes_weights=False)
    engine = GuardedRollout(fake)
    weight = torch.full((64,), 2.0, dtype=torch.float64)
    engine.update_weights([("model.norm.weight", weight)], 1)
    assert engine.received_digests() == {"model.norm.weight": tensor_digest(weight.float())}
