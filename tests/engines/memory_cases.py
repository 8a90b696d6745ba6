"""Small models of five families, and what an optimizer step on them allocates.

Allocations are those of torch's allocator, as the profiler records them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from optimizer_cases import has_torchao
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from memory_models import CONFIGS, SIZES
from quadriga.config.schema import (
    Checkpointing,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimizerName,
)
from quadriga.engines.base import EntropyUse
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.memory.fsdp import fsdp_memory
from quadriga.engines.memory.passes import Rows
from quadriga.engines.memory.states import TrainingMemory
from quadriga.engines.optimizers.rules import local_shard

ROWS = Rows(count=8, prompt=32, response=48, samples=4)
ONE_UNIT, LAYER_UNITS = 10**9, 1


@dataclass(frozen=True)
class Case:
    """The settings on which the memory of a step depends.

    Attributes:
        micro_batch: rows of a micro-batch; None: all.
        early: whether gradients are reduced after each micro-batch.
        unit: least parameters of a layer that is an FSDP unit.
        optimizer: `optim.name`.
        fsdp_size: ranks that share one copy of the parameters.
        rank: size of the adapters; None: all weights are trained that `freeze` does not match.
        tensor, sequence, context: degrees of model parallelism.
        dtype: in which it computes.
        entropy: what the loss reads of the entropies.
    """

    family: str
    checkpointing: Checkpointing = False
    micro_batch: int | None = None
    early: bool | None = None
    unit: int = ONE_UNIT
    optimizer: OptimizerName = "adamw"
    fsdp_size: int = -1
    rank: int | None = None
    freeze: tuple[str, ...] = ()
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    dtype: str = "auto"
    entropy: EntropyUse = "unused"


WITH_ENTROPY = [
    *(
        Case("llama untied", checkpointing, entropy=entropy)
        for checkpointing, entropy in product((False, True), ("value", "gradient"))
    ),
    Case("llama untied", micro_batch=4, unit=LAYER_UNITS, entropy="value"),
]
OPTIMIZERS = ("adamw_8bit", "muon") if has_torchao() else ("muon",)
CASES = [
    *(
        Case(family, checkpointing)
        for family, checkpointing in product(CONFIGS, (False, True, "selective"))
    ),
    *(
        Case(family, optimizer=optimizer, unit=unit)
        for family, optimizer, unit in product(
            ("llama untied", "qwen3 experts"), OPTIMIZERS, (ONE_UNIT, LAYER_UNITS)
        )
    ),
    *(
        Case("llama untied", checkpointing, micro_batch=4, early=early, unit=unit)
        for checkpointing, early, unit in product(
            (False, True), (False, True), (ONE_UNIT, LAYER_UNITS)
        )
    ),
    *(
        Case("llama untied", unit=unit, micro_batch=micro, fsdp_size=1)
        for unit, micro in product((ONE_UNIT, LAYER_UNITS), (None, 4))
    ),
    Case("llama untied", unit=ONE_UNIT, rank=8),
    Case("llama untied", unit=LAYER_UNITS, micro_batch=4, rank=8),
    Case("llama untied", unit=ONE_UNIT, freeze=("model.embed_tokens.*", "model.layers.0.*")),
    Case("qwen3 experts", rank=4, checkpointing=True),
    *WITH_ENTROPY,
]
DIVIDED = [
    *(
        Case("llama untied", checkpointing, micro_batch=micro, early=early, tensor=2)
        for checkpointing, micro, early in ((True, 4, False), (False, 4, True))
    ),
    Case("qwen2 tied", micro_batch=4, tensor=2, rank=8),
    Case("qwen3 experts", tensor=2),
    Case("qwen2 tied", tensor=2, dtype="bfloat16"),
    Case("qwen2 tied", micro_batch=4, tensor=2, dtype="bfloat16"),
    Case("llama untied", True, micro_batch=4, sequence=2),
    Case("llama untied", micro_batch=4, context=2),
]
"""Cases whose rows are divided over two ranks."""


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank. `update` and `evaluate`: the most that a call allocates. `step`: gradient
    shards, and the most that the update of the parameters allocates. `sent`: what the passes of a
    step send."""

    parameters: int
    optimizer: int
    update: int
    step: int
    evaluate: int
    sent: int


def write_models(folder: Path) -> None:
    """Write a model of each family to a folder of its name."""
    for family, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / family)


def settings(case: Case, folder: Path) -> tuple[ModelConfig, EngineConfig]:
    model = ModelConfig(
        path=str(folder / case.family),
        gradient_checkpointing=case.checkpointing,
        freeze=case.freeze,
        lora=LoraConfig(rank=case.rank),
    )
    engine = EngineConfig(
        reduce_each_micro_batch=case.early,
        fsdp_size=case.fsdp_size,
        tensor_parallel_size=case.tensor,
        sequence_parallel_size=case.sequence,
        context_parallel_size=case.context,
        dtype=case.dtype,
    )
    return model, engine


@cache
def planned(case: Case, folder: Path, ranks: int, *, reshard: bool = True) -> TrainingMemory:
    rows = replace(ROWS, micro_batch=case.micro_batch, entropy=case.entropy)
    model, engine = settings(case, folder)
    return fsdp_memory(
        model, replace(engine, reshard_after_forward=reshard), head="lm", ranks=ranks,
        device_type="cpu", update=rows, evaluate=rows, optim=OptimConfig(name=case.optimizer),
        min_unit_parameters=case.unit,
    )  # fmt: skip


def measured(case: Case, folder: Path) -> Measured:
    """Make steps with a real engine."""
    model, engine_settings = settings(case, folder)
    engine = FSDPEngine(
        model, engine_settings, OptimConfig(name=case.optimizer), total_steps=4,
        min_unit_parameters=case.unit,
    )  # fmt: skip
    batch = ROWS.batch(SIZES["vocab_size"])

    def loss(outputs, _):
        total = outputs["log_probs"].sum()
        return (total - outputs["entropy"].sum() if case.entropy == "gradient" else total), {}

    def update() -> None:
        engine.train_step(
            batch, loss, entropy=case.entropy != "unused", micro_batch_size=case.micro_batch
        )

    sent = sent_by(engine, update)
    return Measured(  # the moments exist after the first step
        sent=sent,
        parameters=stored(map(local_shard, engine.module.parameters()))
        + stored(engine.module.buffers()),
        optimizer=stored(engine.optimizer.existing_moments()),
        update=least_peak_of(update),
        step=stored(local_shard(p) for p in engine.module.parameters() if p.requires_grad)
        + peak_of_step(engine, update),
        evaluate=least_peak_of(
            lambda: engine.forward(
                batch, entropy=case.entropy != "unused", micro_batch_size=case.micro_batch
            )
        ),
    )


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, unless it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.paused = 0, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional") and not self.paused:
            self.total += sent_bytes(function.__name__.split(".")[0], args)
        return function(*args, **(kwargs or {}))


def sent_bytes(name: str, args) -> int:
    """Return the bytes that a rank sends in a collective of two ranks."""
    if name == "_allgather_base_":  # output, input
        return args[1].nbytes
    if name == "_reduce_scatter_base_":  # output, input
        return args[1].nbytes // 2
    if name == "alltoall_base_":  # output, input
        return args[1].nbytes // 2
    if name == "all_reduce":  # of a DTensor
        return args[0].nbytes
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        return 0
    if name in ("allreduce_", "allgather_"):
        return sum(tensor.nbytes for tensor in args[name == "allgather_"])
    raise AssertionError(f"the collective {name} is not counted")


def sent_by(engine, update) -> int:
    """Return the bytes that `update` sends, without those of the optimizer."""
    mode, step = Sent(), engine.optimizer.step

    def uncounted_step():
        mode.paused = True
        try:
            return step()
        finally:
            mode.paused = False

    engine.optimizer.step = uncounted_step
    try:
        with mode:
            update()
    finally:
        engine.optimizer.step = step
    return mode.total


def stored(tensors) -> int:
    """Return the bytes of the storages of these tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def least_peak_of(call) -> int:
    """Return the least of three peaks.

    A buffer of a collective can be freed by a thread of gloo, of which the profiler has no record.
    It then seems to exist until the end.
    """
    return min(peak_of(call) for _ in range(3))


def peak_of_step(engine, update) -> int:
    """Return the most bytes that the optimizer allocates within `update`."""
    peaks = []
    step = engine.optimizer.step

    def measured_step():
        peaks.append(peak_of(step))
        return 0.0, 0.0

    engine.optimizer.step = measured_step
    update()
    update()
    engine.optimizer.step = step
    return min(peaks)


def peak_of(call) -> int:
    """Return the most bytes that exist at once of those that a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure_on_two_ranks(rank: int, folder: str, port: int) -> None:
    """Measure every case, and write what rank 0 measured."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    found = {case: measured(case, Path(folder)) for case in (*CASES, *DIVIDED)}
    if rank == 0:
        torch.save(found, Path(folder) / "two_ranks.pt")
    torch.distributed.destroy_process_group()
