"""Parameters, gradients and the optimizer's state in host memory, and its step there.

On a CPU device and host are the same, so the same code runs and only the copies do nothing.
"""

from __future__ import annotations

import engine_cases
import optimizer_cases as cases
import pytest
import step_cases
import torch

from quadriga.engines.optimizers.rules import local_shard

NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(
        name == "adamw_8bit" and not cases.has_torchao(), reason="torchao is not installed"
    ))
    for name in cases.NAMES
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    step_cases.write_model(path)
    return str(path)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.state_stream()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduces", [True, False])
def test_steps_on_the_host_equal_steps_on_the_device(name, reduces, folder, tmp_path):
    rows = engine_cases.make_batch()
    plain, hosted = (
        cases.build(folder, name, "float32", use_dynamic_bsz=True, max_tokens_per_micro_batch=24,
                    reduce_each_micro_batch=reduces, offload_policy=on_host)
        for on_host in (False, True)
    )  # fmt: skip
    assert cases.steps(hosted, rows, 2) == cases.steps(plain, rows, 2)
    hosted.save(tmp_path)
    plain.load(tmp_path)
    assert cases.steps(hosted, rows, 1) == cases.steps(plain, rows, 1)
    expected = weights(plain)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(hosted).items())
    one, other = (engine.forward(rows)["log_probs"] for engine in (hosted, plain))
    assert torch.equal(one, other)


def test_what_is_on_the_host_is_not_offloaded_again(folder):
    engine = cases.build(folder, "adamw", offload_policy=True)
    cases.steps(engine, engine_cases.make_batch(), 1)
    engine._memory.enabled = True  # the CPU stands in for a device
    shards = [local_shard(p.detach()) for p in engine.module.parameters()]
    moments = list(engine.optimizer.existing_moments())
    engine.offload()
    assert all(t.untyped_storage().nbytes() for t in [*shards, *moments])
    engine.reload()


def test_moments_are_on_the_device_during_an_optimizer_step_only(folder):
    engine = cases.build(folder, "adamw", optimizer_offload=True)
    rows = engine_cases.make_batch()
    cases.steps(engine, rows, 1)
    engine._memory.enabled = True
    engine._memory.offload("moments")
    moments = list(engine.optimizer.existing_moments())

    def on_device():
        return sum(moment.untyped_storage().nbytes() for moment in moments)

    found = {}
    accumulate, step = engine._accumulate, engine.optimizer.step

    def backward(*args):
        for metrics in accumulate(*args):
            found["backward"] = on_device()
            yield metrics

    def update():
        found["step"] = on_device()
        return step()

    engine._accumulate, engine.optimizer.step = backward, update
    cases.steps(engine, rows, 1)
    parameters = sum(local_shard(p.detach()).nbytes for p in engine.module.parameters())
    assert found == {"backward": 0, "step": 2 * parameters}
    assert on_device() == 0
