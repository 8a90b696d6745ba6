"""Small models of five families, and what an optimizer step on them allocates.

Allocations are those of torch's allocator, as the profiler records them.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from memory_models import CONFIGS, peak_of
from quadriga.config import schema
from quadriga.engines import sharding
from quadriga.engines.base import EntropyUse
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.memory import Rows, TrainingUse, fsdp_memory
from quadriga.engines.optimizers import local_shard
from quadriga.models.memory import EngineMemory

ROWS = Rows(count=8, prompt=32, response=48, samples=4)
ONE_UNIT, LAYER_UNITS = 10**9, 1


@dataclass(frozen=True)
class Case:
    """The settings on which the memory of a step depends.

    Attributes:
        micro_batch: rows of a micro-batch; None: all.
        early: whether gradients are reduced after each micro-batch.
        unit: least parameters of a layer that is an FSDP unit.
        fsdp_size: ranks that share one copy of the parameters.
        rank: size of the adapters; None: all weights are trained that `freeze` does not match.
        tensor, sequence, context: degrees of model parallelism.
        dtype: in which it computes.
        entropy: what the loss reads of the entropies.
    """

    family: str
    checkpointing: schema.Checkpointing = False
    micro_batch: int | None = None
    early: bool | None = None
    unit: int = ONE_UNIT
    fsdp_size: int = -1
    rank: int | None = None
    freeze: tuple[str, ...] = ()
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    dtype: str = "auto"
    entropy: EntropyUse = "unused"


LLAMA = "llama untied"
WITH_ENTROPY = [
    Case(LLAMA, entropy="value"),
    Case(LLAMA, True, entropy="gradient"),
    Case(LLAMA, micro_batch=4, unit=LAYER_UNITS, entropy="value"),
]
CASES = [
    *(Case(family) for family in CONFIGS),
    *(Case(family, True) for family in (LLAMA, "qwen3 experts")),
    Case(LLAMA, "selective"),
    *(
        Case(LLAMA, early, micro_batch=4, early=early, unit=unit)
        for early, unit in product((False, True), (ONE_UNIT, LAYER_UNITS))
    ),
    Case(LLAMA, unit=LAYER_UNITS, micro_batch=4, fsdp_size=1),
    Case(LLAMA, unit=LAYER_UNITS, micro_batch=4, rank=8),
    Case(LLAMA, freeze=("model.embed_tokens.*", "model.layers.0.*")),
    *WITH_ENTROPY,
]
DIVIDED = [
    Case(LLAMA, True, micro_batch=4, early=False, tensor=2),
    Case("qwen2 tied", micro_batch=4, tensor=2, rank=8),
    Case("qwen3 experts", tensor=2),
    Case("qwen2 tied", micro_batch=4, tensor=2, dtype="bfloat16"),
    Case(LLAMA, True, micro_batch=4, sequence=2),
    Case(LLAMA, micro_batch=4, context=2),
]
"""Cases whose rows are divided over two ranks."""


@dataclass(frozen=True)
class Measured:
    """Bytes on one rank. `update` and `evaluate`: the most that a call allocates. `step`: gradient
    shards, and the most that the update of the parameters allocates."""

    parameters: int
    optimizer: int
    update: int
    step: int
    evaluate: int


def write_models(folder: Path) -> None:
    """Write a model of each family to a folder of its name."""
    for family, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / family)


def settings(case: Case, folder: Path) -> tuple[schema.ModelConfig, schema.EngineConfig]:
    model = schema.ModelConfig(
        path=str(folder / case.family),
        gradient_checkpointing=case.checkpointing,
        freeze=case.freeze,
        lora=schema.LoraConfig(rank=case.rank),
    )
    engine = schema.EngineConfig(
        reduce_each_micro_batch=case.early, fsdp_size=case.fsdp_size,
        tensor_parallel_size=case.tensor, sequence_parallel_size=case.sequence,
        context_parallel_size=case.context, dtype=case.dtype,
    )  # fmt: skip
    return model, engine


@cache
def planned(case: Case, folder: Path, ranks: int) -> EngineMemory:
    rows = replace(ROWS, micro_batch=case.micro_batch, entropy=case.entropy)
    use = TrainingUse("lm", ranks, "cpu", rows, rows)
    with patch.object(sharding, "MIN_UNIT_PARAMETERS", case.unit):
        return fsdp_memory(*settings(case, folder), use)


def measured(case: Case, folder: Path) -> Measured:
    """Make steps with a real engine."""
    model, engine_settings = settings(case, folder)
    engine = FSDPEngine(
        model, engine_settings, schema.OptimConfig(), total_steps=4,
        min_unit_parameters=case.unit,
    )  # fmt: skip
    batch = ROWS.batch()

    def loss(outputs, _):
        total = outputs["log_probs"].sum()
        return (total - outputs["entropy"].sum() if case.entropy == "gradient" else total), {}

    def update() -> None:
        engine.train_step(
            batch, loss, entropy=case.entropy != "unused", micro_batch_size=case.micro_batch
        )

    update()
    return Measured(  # the moments exist after the first step
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


def measure_on_ranks(rank: int, ranks: int, folder: str) -> None:
    """Measure every case, and write what rank 0 measured."""
    found = {case: measured(case, Path(folder)) for case in (*CASES, *DIVIDED)}
    if rank == 0:
        torch.save(found, Path(folder) / "two_ranks.pt")
