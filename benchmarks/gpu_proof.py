"""Run every part of the GPU code once on a machine with one GPU, and write one JSON file.

    scripts/gpu_proof.sh                                  # with the Python of .venv, or PYTHON=…
    python benchmarks/gpu_proof.py --out proof.json
    python benchmarks/gpu_proof.py --device cpu --size 1m # the same parts on a CPU, small

Needs no network: models have random weights and data is made here. Each part is a process of its
own and may take twice an equal share of the time that is left, so that none takes the time of the
others; all parts together take at most `--minutes`. A part that fails, or that the
environment lacks a package for, says so in the file and the others run. The file is written anew
after each part.

- digest: 20 GRPO steps, twice. Are the weights equal bit for bit?
- attention: log-probabilities of packed rows by each kernel; seconds, and the largest difference
  from float32 with plain attention.
- sleep: bytes of the device that each rollout engine frees, and whether it generates the same
  after it has woken.
- step: a GRPO step for each size and rollout engine (tokens per second, useful FLOP/s over the
  peak, peak memory, planned memory, share of the weight sync), beside TRL where it is installed.
- offload: the step with parameters and optimizer in host memory between uses.
- megatron: the step with Megatron-core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import grpo_step

Figures = dict[str, Any]
MINUTES = 8.5
ENGINES = ("hf", "vllm", "sglang")
ROLLOUT = "actor_rollout_ref.rollout.name"
TRAINER = "actor_rollout_ref.actor.engine"
OFFLOADS = (f"{TRAINER}.param_offload=true", f"{TRAINER}.optimizer_offload=true")
PACKAGES = ("torch", "transformers", "vllm", "sglang", "megatron-core", "trl", "ray", "quadriga")
STEPS = 20


class Missing(Exception):
    """The machine or its environment lacks what a part needs."""


def need(*names: str) -> None:
    for name in names:
        if find_spec(name) is None:
            raise Missing(f"{name} is not installed")


def machine(device: str) -> Figures:
    import torch

    found: Figures = {"chip": grpo_step.device_name(device), "cpus": os.cpu_count()}
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        capability = torch.cuda.get_device_capability()
        found |= {
            "memory_gib": memory / 2**30,
            "capability": capability,
            "cuda": torch.version.cuda,
        }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def digest(device: str, _: str) -> Figures:
    """Train twice with equal settings, and compare the bytes of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        setup = grpo_step.Setup(Path(folder), grpo_step.SIZES["1m"], device, STEPS, ())
        grpo_step.write_inputs(setup.folder, setup.size, STEPS)
        case = next(iter(setup.size.cases.values()))
        found = []
        for _run in range(2):
            grpo_step.ours(setup, case)
            weights = setup.folder / "run/model/model.safetensors"
            found.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    return {"sha256": found[0], "equal": found[0] == found[1]}


def attention(device: str, size: str) -> Figures:
    """Compare each kernel with float32 and plain attention on rows of uneven length."""
    import numpy as np
    import torch

    from quadriga.config.schema import EngineConfig, ModelConfig
    from quadriga.engines.fsdp import FSDPEngine
    from quadriga.errors import ConfigError
    from train_step import rows_of

    random = np.random.default_rng(0)
    prompts = [random.integers(5, 200, n) for n in (12, 250, 250, 40)]
    rows = rows_of([prompts[i // 2] for i in range(8)], random.integers(1, 200, 8), random)
    mask = rows["response_mask"].bool()
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        grpo_step.write_inputs(Path(folder), grpo_step.SIZES[size], 1)
        model = ModelConfig(path=f"{folder}/model")

        def log_probs(kernel: Any, dtype: Any) -> tuple[torch.Tensor, float]:
            engine = FSDPEngine(
                model, EngineConfig(dtype=dtype, attention=kernel), packed=True, device=device
            )
            engine.forward(rows)  # compiles
            began = time.perf_counter()
            outputs = engine.forward(rows)["log_probs"]  # on the CPU, so the device has finished
            return outputs[mask], time.perf_counter() - began

        reference, seconds = log_probs("sdpa", "float32")
        found["float32 sdpa"] = {"seconds": seconds}
        for kernel in ("sdpa", "varlen", "flex"):
            try:
                values, seconds = log_probs(kernel, "bfloat16")
            except ConfigError as error:
                found[kernel] = {"refused": str(error)}
                continue
            difference = float((values - reference).abs().max())
            found[kernel] = {"seconds": seconds, "largest_difference_nats": difference}
    return found


def sleep(device: str, size: str) -> Figures:
    """Release and resume each rollout engine that is installed."""
    import torch

    from quadriga.config.schema import ModelConfig
    from quadriga.rollout import build_rollout
    from quadriga.rollout.base import SamplingParams

    def used() -> float:
        if device == "cpu":
            return 0.0
        free, total = torch.cuda.mem_get_info()  # of all processes
        return (total - free) / 2**30

    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        grpo_step.write_inputs(Path(folder), grpo_step.SIZES[size], 1)
        prompts = torch.randint(5, 200, (4, 16), generator=torch.Generator().manual_seed(0))
        sampling = SamplingParams(max_new_tokens=16, eos_token_ids=(), pad_token_id=0)
        given = (prompts, torch.ones_like(prompts), sampling)
        for name in ENGINES:
            if name != "hf" and find_spec(name) is None:
                found[name] = {"skipped": f"{name} is not installed"}
                continue
            engine = build_rollout(name, ModelConfig(path=f"{folder}/model"), device=device)
            before = engine.generate(*given, torch.arange(4)).response_ids
            sizes = {"awake_gib": used()}
            engine.release()
            sizes["asleep_gib"] = used()
            began = time.perf_counter()
            engine.resume()
            sizes |= {"wakes_in_seconds": time.perf_counter() - began, "awake_again_gib": used()}
            after = None
            if not engine.lacks_weights():
                after = torch.equal(before, engine.generate(*given, torch.arange(4)).response_ids)
            found[name] = {**sizes, "generates_the_same": after}
            engine.close()
    return found


def step(device: str, size: str, *settings: str, packages: tuple[str, ...] = ()) -> Figures:
    """Measure a GRPO step; beside TRL if it is installed and the settings are the usual ones."""
    need(*packages)
    words = ["--device", device, "--size", size, "--quick"]
    for setting in settings:
        words += ["--set", setting]
    if not settings and find_spec("trl") is not None:
        words += ["--trl-python", sys.executable]
    command = [sys.executable, str(Path(__file__).with_name("grpo_step.py")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    figures: Figures = json.loads(done.stdout)
    return figures


def megatron(device: str, size: str) -> Figures:
    if device == "cpu":
        raise Missing("Megatron-core needs CUDA devices")
    return step(device, size, f"{TRAINER}.name=megatron", packages=("megatron",))


def parts(sizes: list[str]) -> dict[str, Callable[[str], Figures]]:
    """Return the parts by name, the most telling ones first."""
    first = sizes[0]
    found: dict[str, Callable[[str], Figures]] = {
        f"step {first} hf": lambda device: step(device, first),
        "digest of 20 steps": lambda device: digest(device, first),
        "attention": lambda device: attention(device, first),
        "sleep": lambda device: sleep(device, first),
    }
    for name in ENGINES[1:]:
        found[f"step {first} {name}"] = lambda device, name=name: step(
            device, first, f"{ROLLOUT}={name}", packages=(name,)
        )
    found["offload"] = lambda device: step(device, first, *OFFLOADS)
    found["megatron"] = lambda device: megatron(device, first)
    for size in sizes[1:]:
        found[f"step {size} hf"] = lambda device, size=size: step(device, size)
    return found


def run_part(name: str, options: argparse.Namespace, seconds: float) -> Figures:
    """Run one part in a process of its own."""
    own = ["--part", name, "--device", options.device, "--size", *options.size]
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, __file__, *own], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **grpo_step.ENVIRONMENT},
    ) as process:  # fmt: skip
        try:
            printed, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            return {"failed": f"not done within its share of the time, {seconds:.0f} s"}
    try:
        found: Figures = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"failed": said.strip()[-1500:] or f"exit status {process.returncode}"}
    return found | {"seconds": round(time.perf_counter() - began, 1)}


def print_part(name: str, options: argparse.Namespace) -> None:
    from quadriga.observability.quiet import silence_libraries

    silence_libraries()
    try:
        found = parts(options.size)[name](options.device)
    except Missing as error:
        found = {"skipped": str(error)}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu, or the type of an accelerator")
    parser.add_argument("--size", nargs="+", default=["0.5b", "1.5b"], choices=grpo_step.SIZES)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu_proof.json"))
    parser.add_argument("--part", help="run this part here, and print its figures")
    options = parser.parse_args()
    if options.part:
        print_part(options.part, options)
        return
    if grpo_step.device_name(options.device) is None:
        parser.error(f"--device {options.device}: this machine has no such device")
    ends = time.perf_counter() + 60 * options.minutes
    result: Figures = {"date": time.strftime("%Y-%m-%d"), "machine": machine(options.device)}
    names = [*parts(options.size)]
    for number, name in enumerate(names):
        left = ends - time.perf_counter()
        share = min(left, 2 * left / (len(names) - number))
        result[name] = (
            run_part(name, options, share) if share > 0 else {"skipped": "no time is left"}
        )
        about = result[name]
        said = about.get("failed") or about.get("skipped") or f"done in {about['seconds']} s"
        print(f"{name}: {said.splitlines()[-1]}", file=sys.stderr)
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(any("failed" in found for found in result.values() if isinstance(found, dict)))


if __name__ == "__main__":
    main()
