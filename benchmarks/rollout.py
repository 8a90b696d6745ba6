"""Measure the rollout engines of Quadriga against the same generation without Quadriga.

    python benchmarks/rollout.py --out result.json
    python benchmarks/rollout.py --quick                # one run per case, 4 prompts × 4 responses
    python benchmarks/rollout.py --engines hf vllm      # in an environment that has vLLM
    python benchmarks/rollout.py --engines sglang --runs 3    # in one that has SGLang

The engine `hf` is compared with `generate` of transformers on 16 prompts × 8 responses: 64 tokens
each, and uneven lengths to 256, where an end token follows each token with probability 1/64. The
model is a Llama of about 1.0 M random parameters in float32, with two threads. Our engine returns
the log-probability of every token; transformers is measured without them, and once with the logits
from which they are computed.

An engine of its own (`vllm`, `sglang`) is compared with itself, called as its users call it: the
same prompts, sampling and log-probabilities, through us and directly. vLLM is also compared with an
engine that vLLM starts by itself with its defaults (`by_itself`). Where an engine is not installed,
it is left out, and the result says so.

The sides of a case take turns, also at being first. A figure is the median of the runs after a
warm-up run, in response tokens per second. Compare ratios of one run only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "rollout_peers"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from quadriga.config.schema import ModelConfig
from quadriga.models import TinyModel, write_tiny_model
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine, SamplingParams

PROMPTS, SAMPLES, PROMPT_TOKENS, THREADS = 16, 8, 24, 2
QUICK_PROMPTS, QUICK_SAMPLES = 4, 4
VOCABULARY = 256  # ids of prompts; the tokenizer of the model has a few more
# 4 of about 270 tokens, which are about equally likely: a response has 64 tokens on average.
ENDS = (100, 101, 102, 103)
Side = Callable[[int], int]
"""A generation with a seed; returns the number of response tokens."""


@dataclass(frozen=True)
class Case:
    """Sampling of one case, and the goal: our tokens per second / those of the peer."""

    name: str
    sampling: SamplingParams
    goal: float


CASES = (
    Case("64 tokens each", SamplingParams(64, (), 0), goal=2.0),
    Case("uneven, to 256 tokens", SamplingParams(256, ENDS, 0), goal=3.0),
)
OWN_ENGINE_GOAL = 0.95


@dataclass(frozen=True)
class Size:
    """Prompts, and responses to each of them."""

    prompts: int
    samples: int

    def requests(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask [prompts × samples, P], padded on the left to the longest prompt."""
        random = torch.Generator().manual_seed(0)
        shape = (self.prompts, PROMPT_TOKENS)
        ids = torch.randint(110, VOCABULARY, shape, generator=random)
        lengths = torch.randint(
            PROMPT_TOKENS // 2, PROMPT_TOKENS + 1, (self.prompts,), generator=random
        )
        mask = (torch.arange(PROMPT_TOKENS) >= PROMPT_TOKENS - lengths[:, None]).long()
        rows = (ids * mask, mask)
        return rows[0].repeat_interleave(self.samples, 0), rows[1].repeat_interleave(
            self.samples, 0
        )


def ours(engine: RolloutEngine, sampling: SamplingParams, size: Size) -> Side:
    """Return the generation by a rollout engine."""
    ids, mask = size.requests()

    def generate(seed: int) -> int:
        seeds = torch.arange(len(ids)) + 1_000_000 * seed
        return int(engine.generate(ids, mask, sampling, seeds).response_mask.sum())

    return generate


def transformers_side(folder: str, sampling: SamplingParams, size: Size, *, logits: bool) -> Side:
    """Return the generation by `generate` of transformers; each prompt is prefilled once a row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, mask = (x[:: size.samples] for x in size.requests())
    ends = list(sampling.end_token_ids)

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0,
                num_return_sequences=size.samples, max_new_tokens=sampling.max_new_tokens,
                eos_token_id=ends or 10**6, pad_token_id=0,
                return_dict_in_generate=True, output_logits=logits,
            )  # fmt: skip
        tokens = out.sequences[:, PROMPT_TOKENS:]
        if logits:
            log_p = torch.stack(out.logits, 1).float().log_softmax(-1)
            log_p.gather(-1, tokens[..., None])
        ended = torch.isin(tokens, torch.tensor(ends)).long()
        return int((ended.cumsum(1) - ended == 0).sum())

    return generate


def measure(sides: dict[str, Side], runs: int) -> dict[str, float]:
    """Return the median tokens per second of each side; they take turns, also at being first."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(runs + 1):
        names = list(sides)
        first = run % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            tokens = sides[name](run)
            rate = tokens / (time.perf_counter() - start)
            if run:  # the first run warms up
                rates[name].append(rate)
    return {name: round(statistics.median(rate), 1) for name, rate in rates.items()}


def compare_with_transformers(folder: str, case: Case, size: Size, runs: int) -> dict[str, float]:
    """Return the figures of the engine `hf` in one case."""
    engine = build_rollout("hf", ModelConfig(path=folder), dtype="float32")
    found = measure(
        {
            "ours": ours(engine, case.sampling, size),
            "transformers": transformers_side(folder, case.sampling, size, logits=False),
            "transformers_with_logits": transformers_side(folder, case.sampling, size, logits=True),
        },
        runs,
    )
    engine.close()
    ratios = {
        f"ratio_to_{name}": round(found["ours"] / found[name], 2)
        for name in ("transformers", "transformers_with_logits")
    }
    return found | ratios


def compare_with_itself(
    name: str, folder: str, size: Size, runs: int
) -> dict[str, dict[str, float]]:
    """Return the figures of every case through us and by the engine called directly."""
    module = importlib.import_module(f"direct_{name}")
    figures: dict[str, dict[str, float]] = {}
    with module.engines(folder) as (engine, directly):
        for case in CASES:
            ids, mask = size.requests()
            prompts = [row[valid.bool()].tolist() for row, valid in zip(ids, mask, strict=True)]
            sides = {"ours": ours(engine, case.sampling, size)}
            for way, direct in directly.items():
                sides[way] = partial(direct, prompts, case.sampling)
            found = measure(sides, runs)
            ratios = {f"ratio_to_{way}": round(found["ours"] / found[way], 3) for way in directly}
            figures[case.name] = found | ratios
    return figures


def goal(value: float, wanted: float) -> dict[str, float | bool]:
    return {"value": value, "goal": wanted, "met": value >= wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one run per case")
    parser.add_argument("--runs", type=int, help="runs of each side per case, after one to warm up")
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=["hf", "vllm", "sglang"])
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    runs: int = options.runs or (1 if options.quick else 7)
    size = Size(QUICK_PROMPTS, QUICK_SAMPLES) if options.quick else Size(PROMPTS, SAMPLES)
    result: dict[str, dict[str, object]] = {"goals": {}, "cases": {}, "left_out": {}}
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        write_tiny_model(folder, ["one two three"], TinyModel())
        for name in options.engines:
            if importlib.util.find_spec("transformers" if name == "hf" else name) is None:
                result["left_out"][name] = f"{name} is not installed"
            elif name == "hf":
                for case in CASES:
                    figures = compare_with_transformers(folder, case, size, runs)
                    result["cases"][f"hf, {case.name}"] = figures
                    ratio = figures["ratio_to_transformers"]
                    result["goals"][f"hf / transformers, {case.name}"] = goal(ratio, case.goal)
            else:
                for case_name, figures in compare_with_itself(name, folder, size, runs).items():
                    result["cases"][f"{name}, {case_name}"] = figures
                    key = f"{name} through us / {name} directly, {case_name}"
                    result["goals"][key] = goal(figures["ratio_to_direct"], OWN_ENGINE_GOAL)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
