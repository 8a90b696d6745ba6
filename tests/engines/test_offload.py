"""Offloaded states hold no device memory, states on the host stay there, and numbers are the same.

The CPU stands in for the device. What is measured is the size of the storages, whichever object
refers to them.
"""

import engine_cases as cases
import optimizer_cases as optimizers
import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.base import DeviceMemory
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.optimizers import local_shard
from quadriga.parallel.device import host_empty


def offloading(folder: str):
    """Build an engine that offloads. Its weights are copies, like those on an accelerator."""
    engine = cases.trainable(folder)
    for parameter in engine.module.parameters():
        parameter.data = parameter.data.clone()  # a file that is mapped to memory cannot be resized
    engine._memory.enabled = True
    return engine


def test_offload_frees_every_storage_of_parameters_and_moments(model_folder):
    engine = offloading(model_folder)
    cases.step(engine)
    shards = [p.to_local() for p in engine.module.parameters()]
    moments = list(engine.optimizer.existing_moments())
    held = [*shards, *engine.optimizer.rules[0]._shards, *moments]
    parameter_bytes = sum(shard.nbytes for shard in shards)
    engine.offload()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    on_host = {
        state: sum(size for *_, size in copies)
        for state, copies in engine._memory.offloaded.items()
    }
    assert on_host["parameters"] >= parameter_bytes
    assert on_host["moments"] == 2 * parameter_bytes
    engine.reload()
    assert all(tensor.untyped_storage().nbytes() for tensor in held)
    assert not engine._memory.offloaded


def test_steps_with_offload_equal_steps_without(model_folder):
    plain, offloaded = cases.trainable(model_folder), offloading(model_folder)
    for index in range(3):
        offloaded.offload()
        if index == 1:
            offloaded.reload()
        assert cases.step(offloaded) == cases.step(plain)
        assert bool(offloaded._memory.offloaded) == (index != 1)
    batch = cases.make_batch()
    assert torch.equal(offloaded.forward(batch)["log_probs"], plain.forward(batch)["log_probs"])
    assert cases.same_weights(offloaded, plain)


def test_reload_leaves_on_the_host_what_the_settings_keep_there(model_folder):
    settings = EngineConfig(dtype="float32", param_offload=True)
    engine = FSDPEngine(ModelConfig(path=model_folder), settings, cases.OPTIM, total_steps=4)
    for parameter in engine.module.parameters():
        parameter.data = parameter.data.clone()
    engine._memory.enabled = True
    engine.offload()
    assert set(engine._memory.offloaded) == {"parameters", "gradients", "moments"}
    engine.reload()
    assert set(engine._memory.offloaded) == {"parameters", "gradients"}


def test_views_of_one_storage_are_copied_once_and_stay_views():
    whole = torch.arange(6.0)
    view = whole[2:4]
    memory = DeviceMemory(torch.device("cpu"), lambda state: [view, whole])
    memory.enabled = True
    memory.offload("moments")
    assert len(memory.offloaded["moments"]) == 1 and not whole.untyped_storage().nbytes()
    memory.reload("moments")
    whole[2] = 9
    assert view.tolist() == [9, 3]


@pytest.mark.parametrize("reduces", [True, False])
def test_steps_on_the_host_equal_steps_on_the_device(reduces, gpt2_folder, tmp_path):
    rows = cases.make_batch()
    plain, hosted = (
        optimizers.build(gpt2_folder, use_dynamic_bsz=True, max_tokens_per_micro_batch=24,
                         reduce_each_micro_batch=reduces, offload_policy=on_host)
        for on_host in (False, True)
    )  # fmt: skip
    assert optimizers.steps(hosted, rows, 2) == optimizers.steps(plain, rows, 2)
    hosted.save(tmp_path)
    plain.load(tmp_path)
    assert optimizers.steps(hosted, rows, 1) == optimizers.steps(plain, rows, 1)
    expected = cases.weights(plain)
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in cases.weights(hosted).items()
    )
    one, other = (engine.forward(rows)["log_probs"] for engine in (hosted, plain))
    assert torch.equal(one, other)


def test_what_is_on_the_host_is_not_offloaded_again(gpt2_folder):
    engine = optimizers.build(gpt2_folder, offload_policy=True)
    optimizers.steps(engine, cases.make_batch(), 1)
    engine._memory.enabled = True  # the CPU stands in for a device
    shards = [local_shard(p.detach()) for p in engine.module.parameters()]
    moments = list(engine.optimizer.existing_moments())
    engine.offload()
    assert all(t.untyped_storage().nbytes() for t in [*shards, *moments])
    engine.reload()


def test_moments_are_on_the_device_during_an_optimizer_step_only(gpt2_folder):
    engine = optimizers.build(gpt2_folder, optimizer_offload=True)
    rows = cases.make_batch()
    optimizers.steps(engine, rows, 1)
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
    optimizers.steps(engine, rows, 1)
    parameters = sum(local_shard(p.detach()).nbytes for p in engine.module.parameters())
    assert found == {"backward": 0, "step": 2 * parameters}
    assert on_device() == 0


def test_pinned_memory_has_the_bytes_that_were_asked_for(monkeypatch):
    """Only a device can pin memory: here the settings of torch's allocator are read."""
    empty, asked = torch.empty, []

    def unpinned(shape, *, dtype, pin_memory):
        asked.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", unpinned)
    assert host_empty([3], torch.uint8, pinned=True).shape == (3,) and asked == [True]
    assert "pinned_max_round_threshold_mb:1" in torch._C._accelerator_getAllocatorSettings()
