"""Steps of the optimizer on one rank, and on two and three that hold uneven shards."""

import engine_cases as cases
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine

DTYPES = ("float64", "float32")
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
STEPS = 3
CUTS = {1: (0, 7), 2: (0, 4, 7), 3: (0, 4, 5, 7)}  # first row of each rank


def optim(**settings) -> OptimConfig:
    """Return settings with warm-up and a small bound of the gradient's norm, which is reached."""
    # The gradient of a bias of keys is 0 but for rounding. With the default `eps`, AdamW would make
    # a step of the size of the learning rate from that.
    return OptimConfig(lr=0.01, eps=1e-5, lr_warmup_steps=1, grad_clip=0.5, **settings)


def build(folder: str, dtype: str = "float32", **settings) -> FSDPEngine:
    engine = EngineConfig(dtype=dtype, reduce_dtype="float32" if dtype == "float32" else "float64",
                          **settings)  # fmt: skip
    return FSDPEngine(ModelConfig(path=folder), engine, optim(), min_unit_parameters=1)


def steps(engine: FSDPEngine, rows: dict[str, torch.Tensor], count: int = STEPS) -> list[float]:
    """Make steps, and return the norms of their gradients."""
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs, micro):
        return -(outputs["log_probs"] * micro["weight"] * micro["response_mask"]).sum() / tokens, {}

    return [engine.train_step(rows, loss)["grad_norm"] for _ in range(count)]


def rank_main(rank: int, ranks: int, folder: str, results: str) -> None:
    """Make the steps on `ranks` ranks, and save a checkpoint after each optimizer's."""
    first, last = CUTS[ranks][rank : rank + 2]
    rows = cases.rows_of(cases.make_batch(), first, last)
    found = {}
    for dtype in DTYPES:
        engine = build(folder, dtype)
        norms = steps(engine, rows)
        weights = {key: tensor.clone() for key, tensor in engine.state_stream()}
        found[dtype] = norms, weights
    if ranks == 2:  # two replicas, each with all rows of every matrix
        engine = build(folder, "float64", fsdp_size=1)
        found["hybrid"] = steps(engine, rows), dict(engine.state_stream())
    engine = build(folder, "float64")
    steps(engine, rows, 2)
    engine.save(f"{results}/{ranks}")
    if rank == 0:
        torch.save(found, f"{results}/{ranks}.pt")
