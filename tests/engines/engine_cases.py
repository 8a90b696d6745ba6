"""Engines, batches and steps for the engine tests, in this process and in spawned ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.tiny import TinyModel

if TYPE_CHECKING:
    from gradient_cases import Folders

MODEL_SHAPE = TinyModel(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48
)
LENGTHS = [(3, 4), (3, 2), (5, 6), (2, 1), (5, 6), (6, 3), (4, 5)]  # (prompt, response)
SAME_PROMPT = {1: 0, 4: 2}
P, R = 7, 6


def make_batch(*, shared: bool = True) -> dict[str, torch.Tensor]:
    """Make seven rows. Row 2 has an observation token. `shared`: rows 1 and 4 have the prompts of 0
    and 2; otherwise all prompts differ."""
    random = torch.Generator().manual_seed(3)
    ids = torch.zeros(len(LENGTHS), P + R, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(LENGTHS), R, dtype=torch.int64)
    for row, (prompt, response) in enumerate(LENGTHS):
        ids[row, P - prompt : P + response] = torch.randint(
            5, 200, (prompt + response,), generator=random
        )
        if row in SAME_PROMPT:
            ids[row, :P] = ids[SAME_PROMPT[row], :P]
            ids[row, P - 1] += not shared
        attention[row, P - prompt : P + response] = 1
        mask[row, :response] = 1
    mask[2, 2] = 0
    weight = torch.randn(len(LENGTHS), R, generator=random, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "weight": weight}


def gradients(engine: FSDPEngine, rows, loss, micro: int | None, **settings):
    """Return the full gradients by name, and the metrics, of a step that changes no weight."""
    found: dict[str, torch.Tensor] = {}

    def keep_gradients() -> tuple[float, float]:
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.full_tensor().clone()
                parameter.grad = None
        return 0.0, 0.0

    engine.optimizer.step = keep_gradients
    return found, engine.train_step(rows, loss, micro_batch_size=micro, **settings)


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.state_stream()}


def same_weights(engine, other) -> bool:
    """Whether two engines have equal weights, to the bit."""
    found, expected = weights(engine), weights(other)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def assert_close(found, expected, *, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def rows_of(batch, first: int, last: int):
    return {name: field[first:last] for name, field in batch.items()}


OPTIM = OptimConfig(lr=0.01, lr_scheduler="linear", lr_warmup_steps=2)


def trainable(folder: str, optim: OptimConfig | None = OPTIM, **settings) -> FSDPEngine:
    """Build an engine in float32, as in a training run."""
    engine = EngineConfig(fsdp_size=settings.pop("fsdp_size", -1))
    return FSDPEngine(ModelConfig(path=folder), engine, optim, total_steps=8, **settings)


def step(engine: FSDPEngine, rows=None) -> dict[str, float]:
    rows = make_batch() if rows is None else rows
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs, micro):
        return -(outputs["log_probs"] * micro["weight"].float()).sum() / tokens, {}

    return engine.train_step(rows, loss)


def skipped_steps(folder: str, rank: int, rows) -> dict[str, tuple[float, float]]:
    """Make steps whose gradient is not finite on rank 1 only.

    Returns:
        what is damaged → over both ranks, the sum of the skipped steps and the number of ranks
        whose weights have changed.
    """
    found = {}
    for damage, size in (("loss", -1), ("hybrid loss", 1), ("shard", -1)):
        engine = trainable(folder, fsdp_size=size)
        damaged = dict(rows)
        if rank == 1 and damage != "shard":
            damaged["weight"] = rows["weight"] * float("nan")
        elif rank == 1:
            damage_shard(engine)
        found[damage] = skipped_and_changed(engine, damaged)
    return found


def skipped_and_changed(engine: FSDPEngine, rows) -> tuple[float, ...]:
    """Make a step. Return, over all ranks, the sum of the skipped steps and the number of ranks
    whose weights have changed."""
    before = {name: tensor.clone() for name, tensor in engine.state_stream()}
    skipped = step(engine, rows)["skipped_steps"]
    equal = [torch.equal(tensor, before[name]) for name, tensor in engine.state_stream()]
    return tuple(engine.global_counts(skipped, float(not all(equal))))


def damage_shard(engine: FSDPEngine) -> None:
    """Make one number of this rank's gradient shards infinite in the next optimizer step."""
    make_step = engine.optimizer.step

    def damaged_step() -> tuple[float, float]:
        first = next(iter(engine.module.parameters()))
        first.grad.to_local().view(-1)[0] = float("inf")
        return make_step()

    engine.optimizer.step = damaged_step


def rank_main(rank: int, ranks: int, folders: Folders, work: str) -> None:
    """Compute the gradients of every case; then load what one rank saved, step, and save."""
    import gradient_cases

    folder, batch = folders.policy, make_batch()

    def own_rows(cut: int):
        return rows_of(batch, 0, cut) if rank == 0 else rows_of(batch, cut, len(LENGTHS))

    gathered = {
        case: gradient_cases.gradients(
            case, *gradient_cases.engines(case, folders), own_rows(case.cut)
        )
        for case in gradient_cases.TWO_RANKS
    }
    engine = trainable(folder, min_unit_parameters=1)
    engine.load(f"{work}/one_rank")
    metrics = step(engine, own_rows(4))
    engine.save(f"{work}/two_ranks")
    engine.save_hf(f"{work}/export")
    hybrid = trainable(folder, fsdp_size=1)
    hybrid.load(f"{work}/one_rank")
    step(hybrid, own_rows(4))
    hybrid.save(f"{work}/hybrid")
    skipped = skipped_steps(folder, rank, own_rows(4))
    if rank == 0:
        found = {"gradients": gathered, "metrics": metrics, "skipped": skipped}
        torch.save(found, f"{work}/results.pt")
