"""Offloaded states hold no device memory, and nothing else changes.

The CPU stands in for the device. What is measured is the size of the storages, whichever object
refers to them.
"""

from __future__ import annotations

import engine_cases as cases
import torch

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.base import DeviceMemory
from quadriga.engines.fsdp import FSDPEngine


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
    expected = dict(plain.state_stream())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in offloaded.state_stream())


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
