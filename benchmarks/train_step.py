"""Time one optimizer step: padded, packed, and packed with shared prompts, on one rank and on four.

    python benchmarks/train_step.py --out result.json
    python benchmarks/train_step.py --quick             # a smaller batch, one timed step per mode

The model is a Llama of about 1.1 M random parameters in float32, the ranks are processes of one
thread that share the machine's cores. Two batches:

- lognormal lengths: each row has a prompt of its own. Padded rows in the order of the batch, 8 in a
  micro-batch (`padded`); padded rows sorted by length and split by tokens, as the engine does for
  models that cannot be packed (`padded_sorted`); packed rows (`packed`).
- prompt 512, response 80, n = 8 (lognormal responses): prompts that differ from row to row, so that
  none is shared (`packed`); a prompt for every 8 rows, with single sequences balanced over the
  ranks (`shared_rows`); and the same with whole groups balanced (`shared`).

The modes of a batch alternate. A figure is the median of the timed steps; compare ratios of one run
only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.parallel.balancing import RowCosts, arrange_rows

RANKS = (1, 4)
PAIRS = (
    ("padded", "packed"),
    ("padded_sorted", "packed"),
    ("packed", "shared"),
    ("shared_rows", "shared"),
)
GOALS = {"padded / packed": 1.5, "packed / shared": 2.5}
BUDGET = 8192  # tokens of a micro-batch
VOCABULARY = 200  # the model has a few more
SHAPE = TinyModel(max_position_embeddings=2048)
Batch = dict[str, torch.Tensor]


def rows_of(prompts: list[np.ndarray], responses: np.ndarray, random: np.random.Generator) -> Batch:
    """Pad prompts on the left and random responses of these lengths on the right."""
    P, R = max(map(len, prompts)), int(responses.max())
    ids = torch.zeros(len(prompts), P + R, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses.tolist(), strict=True)):
        tokens = [*prompt.tolist(), *random.integers(5, VOCABULARY, response).tolist()]
        ids[row, P - len(prompt) : P + response] = torch.tensor(tokens)
        attention[row, P - len(prompt) : P + response] = 1
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "response_mask": attention[:, P:].clone(),
    }


def lognormal(median: int, sigma: float, count: int, random: np.random.Generator) -> np.ndarray:
    lengths = median * random.lognormal(0, sigma, count)
    return np.clip(lengths, 1, 16 * median).astype(np.int64)


def make_batches(quick: bool) -> dict[str, Batch]:
    """Return the batches by name; `shared` and `packed` have rows of equal lengths."""
    random = np.random.default_rng(0)
    count = 32 if quick else 96
    lengths = lognormal(80, 0.8, count, random)
    own = [random.integers(5, VOCABULARY, n) for n in lognormal(64, 0.6, count, random)]
    groups = 4 if quick else 8
    responses = lognormal(80, 0.5, 8 * groups, random)
    prompts = [random.integers(5, VOCABULARY, 512) for _ in range(8 * groups)]
    return {
        "lognormal": rows_of(own, lengths, random),
        "packed": rows_of(prompts, responses, random),
        "shared": rows_of([prompts[i // 8] for i in range(8 * groups)], responses, random),
    }


def part_of_rank(batch: Batch, rank: int, ranks: int, engine: FSDPEngine, group: int) -> Batch:
    """Return the rows of a rank, balanced as groups of `group` neighbouring rows."""
    mask, width = batch["attention_mask"], batch["response_mask"].shape[1]
    prompt, response = mask[:, :-width].sum(1).numpy(), mask[:, -width:].sum(1).numpy()
    numbers = np.arange(len(mask)) // group
    costs = RowCosts.of(engine._token_model.cost, numbers, prompt, response)
    mine = arrange_rows(costs, ranks, None)[rank][0]
    return {name: field[mine] for name, field in batch.items()}


def stepper(engine: FSDPEngine, rows: Batch, size: int | None) -> Callable[[], float]:
    """Return a function that makes one optimizer step and returns its seconds.

    `size`: rows of a micro-batch; None: split by tokens.
    """
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs: Batch, _: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        return -outputs["log_probs"].sum() / tokens, {}

    def step() -> float:
        start = time.perf_counter()
        engine.train_step(rows, loss, micro_batch_size=size)
        return time.perf_counter() - start

    return step


def measure_rank(rank: int, ranks: int, model: str, port: int, quick: bool, file: str) -> None:
    """Time every mode as one of `ranks` ranks; rank 0 writes the median seconds."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    settings = EngineConfig(max_tokens_per_micro_batch=BUDGET)
    padded, packed = (
        FSDPEngine(ModelConfig(path=model), settings, OptimConfig(total_steps=100), packed=form)
        for form in (False, True)
    )
    batches = make_batches(quick)
    modes = {
        "lognormal": {
            "padded": (padded, batches["lognormal"], 1, 8),
            "padded_sorted": (padded, batches["lognormal"], 1, None),
            "packed": (packed, batches["lognormal"], 1, None),
        },
        "prompt 512, response 80, n = 8": {
            "packed": (packed, batches["packed"], 1, None),
            "shared_rows": (packed, batches["shared"], 1, None),
            "shared": (packed, batches["shared"], 8, None),
        },
    }
    seconds: dict[str, dict[str, float]] = {}
    for name, forms in modes.items():
        steps = {
            form: stepper(engine, part_of_rank(batch, rank, ranks, engine, group), size)
            for form, (engine, batch, group, size) in forms.items()
        }
        timed: dict[str, list[float]] = {form: [] for form in forms}
        for turn in range(2 if quick else 4):
            for form, step in steps.items():
                took = step()
                if turn:  # the first step allocates
                    timed[form].append(took)
        seconds[name] = {form: statistics.median(took) for form, took in timed.items()}
    if rank == 0:
        Path(file).write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def measure(ranks: int, model: str, quick: bool, folder: Path) -> dict[str, dict[str, float]]:
    """Start the ranks and return seconds and ratios of each batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / f"{ranks}.json"
    mp.spawn(measure_rank, args=(ranks, model, port, quick, str(file)), nprocs=ranks)
    found: dict[str, dict[str, float]] = json.loads(file.read_text())
    for seconds in found.values():
        for slow, fast in PAIRS:
            if slow in seconds and fast in seconds:
                seconds[f"{slow} / {fast}"] = seconds[slow] / seconds[fast]
    return {name: {k: round(v, 4) for k, v in values.items()} for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller batch, one timed step")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    result: dict[str, object] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    goals: dict[str, dict[str, float | bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        result["parameters"] = write_tiny_model(model, ["one two three"], SHAPE)
        for ranks in RANKS:
            print(f"{ranks} rank(s) …", file=sys.stderr)
            found = measure(ranks, str(model), options.quick, Path(folder))
            result[f"{ranks} rank(s)"] = found
            for values in found.values():
                for name in GOALS.keys() & values.keys():
                    goals[f"{name}, {ranks} rank(s)"] = {
                        "value": values[name],
                        "goal": GOALS[name],
                        "met": values[name] >= GOALS[name],
                    }
    text = json.dumps({"goals": goals, **result}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
