"""What streams cost the engine hf: slices against one call, and how long an update keeps it idle.

    python benchmarks/stream_engine.py --out stream_engine.json    # two cores, about two minutes
    python benchmarks/stream_engine.py --quick                     # small models, few repeats

Prints JSON. `slices`: seconds of 64 responses of at most 256 tokens (8 prompts of 64 tokens; end
tokens of probability 0.6 %), over the seconds of one call, with and without kept caches; least of
the repeats. `updates`: one rank trains (its weights are sent), one rank generates slices of 32
tokens of 16 rows, on Ray. Medians of the seconds of an update, with the end of the slice that it
waits for; `idle_s`, the seconds of it in which no rank decodes; `share`, idle over all. The exit
code is 1 if slices of 32 with kept caches take above 1.05 ×, or the share with weights in flight is
above 5 %, except with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quadriga.backends import get_backend
from quadriga.config.loading import load_config
from quadriga.config.schema import ActorRolloutRefConfig, ModelConfig
from quadriga.data.loader import pad_rows
from quadriga.models.tiny import write_tiny_model
from quadriga.protocol import DataProto
from quadriga.rollout import build_rollout
from quadriga.rollout.base import Continued, SamplingParams
from quadriga.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.streams.replicas import ReplicaLink, Replicas
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker, InFlightWorker
from quadriga.workers.runtime import RankRuntime

ROWS, PROMPT, SLICE = 16, 64, 32
GOALS = {"slices of 32, kept": 1.05, "share": 0.05}


class Recorded(InFlightWorker):
    """A rollout that records when it generates."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.spans: list[tuple[float, float]] = []

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        began = time.time()
        found = super().generate_sequences(prompts)
        self.spans.append((began, time.time()))
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self) -> list[tuple[float, float]]:
        """Return the spans so far."""
        return self.spans


class Generator(threading.Thread):
    """Calls the rollout without a pause, as a stream does."""

    def __init__(self, group: Any) -> None:
        super().__init__(daemon=True)
        self.group, self.ended = group, False
        self.lock, self.at_work = threading.Condition(), False
        self.paused = False
        ids = torch.randint(20, 200, (ROWS, PROMPT))
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tensors["sample_seed"] = torch.arange(ROWS)
        self.rows = DataProto.from_dict(tensors, meta_info={"at_most": SLICE})

    def run(self) -> None:
        while not self.ended:
            with self.lock:
                self.lock.wait_for(lambda: not self.paused)
                future, self.at_work = self.group.generate_sequences.submit(self.rows), True
            future.get()
            with self.lock:
                self.at_work = False
                self.lock.notify_all()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within the block no call is in flight."""
        with self.lock:
            self.paused = True
            self.lock.wait_for(lambda: not self.at_work)
        yield
        with self.lock:
            self.paused = False
            self.lock.notify_all()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Within the block no call is submitted."""
        with self.lock:
            yield


def idle_seconds(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Return the seconds between two times that are in no span."""
    return end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in spans)


def updates(quick: bool, repeats: int) -> dict[str, dict[str, float]]:
    """Return the figures of each way."""
    size, layers = (64, 2) if quick else (512, 8)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder, ["one two three"])  # for the tokenizer
        config = LlamaConfig(
            vocab_size=8192, hidden_size=size, intermediate_size=11 * size // 4,
            num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        given = load_config(
            ActorRolloutRefConfig, [f"model.path={folder}", "rollout.update=in_flight"]
        )
        backend = get_backend("ray")
        backend.start(num_cpus=2)
        runtime = RankRuntime(max_response_length=SLICE * 2, threads=1)

        def group(cls: type, role: str) -> Any:
            pool = backend.resource_pool([1], use_gpu=False, max_colocate_count=1)
            held = backend.class_with_args(cls, config=given, role=role, runtime=runtime)
            return backend.worker_group(pool, held)

        actor, replicas = (
            group(ActorRolloutRefWorker, "actor"),
            Replicas(lambda _: group(Recorded, "rollout"), 1),
        )
        actor.init_model()
        replicas.init_model()
        link, rollout = ReplicaLink(actor, replicas), replicas.all[0].group
        link.sync()
        generator = Generator(rollout)
        generator.start()
        times: dict[str, list[tuple[float, float]]] = {"pause": [], "in_flight": []}
        for _ in range(repeats):
            for way, own in times.items():
                time.sleep(1.0)
                start = time.time()
                if way == "pause":
                    with generator.pause():
                        link.sync()
                else:
                    link.sync(generator.applying)
                own.append((start, time.time()))
        generator.ended = True
        generator.join()
        spans = rollout.recorded()[0]
        for way, own in times.items():
            seconds = statistics.median(end - start for start, end in own)
            idle = statistics.median(idle_seconds(*each, spans) for each in own)
            found[way] = {"update_s": seconds, "idle_s": idle, "share": idle / seconds}
        found["slice_s"] = {"median": statistics.median(b - a for a, b in spans)}
        backend.shutdown()
    return found


def slices(quick: bool, repeats: int) -> dict[str, float]:
    """Return the seconds of all slices over the seconds of one call."""
    torch.manual_seed(0)
    size = 64 if quick else 256
    config = LlamaConfig(
        vocab_size=1024, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        engine = build_rollout("hf", ModelConfig(path=folder))
    prompts = [row for row in torch.randint(20, 1000, (8, PROMPT)).tolist() for _ in range(8)]
    sampling = SamplingParams(256, eos_token_ids=tuple(range(6)), pad_token_id=0)

    def run(at_most: int, keep: int) -> None:
        found, going = [list[int]() for _ in prompts], list(range(len(prompts)))
        while going:
            ids, mask = pad_rows([prompts[i] + found[i] for i in going], 0, PROMPT + 256, "left")
            continued = Continued(torch.tensor([len(found[i]) for i in going]), at_most, keep)
            out = engine.generate(ids, mask, sampling, torch.tensor(going), continued=continued)
            for i, row, own in zip(going, out.response_ids, out.response_mask, strict=True):
                found[i] += row[own.bool()].tolist()
            going = [i for i, why in zip(going, out.finish_reason, strict=True) if why == "paused"]

    ways = {"one call": (256, 0)}
    for at_most in (32, 64):
        ways |= {f"slices of {at_most}": (at_most, 0), f"slices of {at_most}, kept": (at_most, 64)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    run(256, 0)
    for _ in range(repeats):
        for name, given in ways.items():
            began = time.perf_counter()
            run(*given)
            seconds[name].append(time.perf_counter() - began)
    return {name: min(own) / min(seconds["one call"]) for name, own in seconds.items()}


def main() -> None:
    """Print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small models, few repeats")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 2 if args.quick else 5
    found = {"slices": slices(args.quick, repeats), "updates": updates(args.quick, repeats)}
    text = json.dumps(found, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    values = {**found["slices"], **found["updates"]["in_flight"]}
    sys.exit(not args.quick and any(values[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    main()
