"""What an optimizer step of a Megatron engine allocates on each rank, measured and planned."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import memory_cases
import torch
from torch.utils._pytree import tree_leaves

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.engines.base import EntropyUse
from quadriga.engines.megatron.memory import stage_memories
from quadriga.engines.memory import Rows, TrainingUse
from quadriga.models.memory import AllocationCounter
from quadriga.parallel.distributed import gather_over_ranks

ROWS = Rows(count=16, prompt=32, response=48, samples=4, micro_batch=4)


@dataclass(frozen=True)
class Case:
    """The settings on which the memory of a step depends."""

    name: str
    family: str = "llama deep"
    head: str = "lm"
    checkpointing: bool = False
    entropy: EntropyUse = "unused"
    settings: dict[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(name="megatron", **self.settings)

    def model(self, folder: Path) -> ModelConfig:
        return ModelConfig(
            path=str(folder / self.family), gradient_checkpointing=self.checkpointing
        )


def planned(case: Case, folder: Path, ranks: int):
    """Return the plan of each stage."""
    rows = replace(ROWS, entropy=case.entropy)
    use = TrainingUse(case.head, ranks, "cpu", rows, rows)
    return stage_memories(case.model(folder), case.engine, use)


def measured(case: Case, folder: Path) -> dict[str, int]:
    """Make steps with an engine. Gradients are counted in `kept`, as the plan does."""
    engine = build_engine(
        case.model(folder), case.engine, OptimConfig(), head=case.head, total_steps=20
    )
    batch = ROWS.batch()
    name = "log_probs" if case.head == "lm" else "values"

    def update() -> None:
        engine.train_step(
            batch,
            lambda out, _: (out[name].sum(), {}),
            entropy=case.entropy != "unused",
            micro_batch_size=ROWS.micro_batch,
        )

    def evaluate() -> None:
        entropy = case.head == "lm" and case.entropy != "unused"
        engine.forward(batch, entropy=entropy, micro_batch_size=ROWS.micro_batch)

    update()  # the moments exist after the first step
    held = {state: memory_cases.stored(engine._tensors(state))
            for state in ("parameters", "gradients", "moments")}  # fmt: skip
    return held | {
        "stage": engine.ranks.place.stage,
        "update": counted_peak_of(update),
        "evaluate": counted_peak_of(evaluate),
    }


class Counter(AllocationCounter):
    """Counts the storages of tensors of the CPU that operators make.

    The profiler has no record of what threads of gloo free, and these passes have many collectives.
    Without collectives, both count the same.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, counted=False)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, counted=True)
        self.peak = max(self.peak, self.live)
        return result


def counted_peak_of(call) -> int:
    """Return the most bytes that exist at once of tensors that operators make in a call."""
    with Counter() as counter:
        call()
    return counter.peak


def measure_on_ranks(rank: int, ranks: int, folder: str, cases: list[Case]) -> None:
    """Measure every case, and write what all ranks measured."""
    from megatron.core import parallel_state

    import megatron_on_cpu

    megatron_on_cpu.install()
    found = {}
    for case in cases:
        found[case.name] = gather_over_ranks(measured(case, Path(folder)))
        parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(found, Path(folder) / f"{ranks}.pt")


def longer(config, layers: int):
    """Return a config with more layers."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return config
