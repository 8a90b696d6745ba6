"""Measure one GRPO step of Quadriga and of TRL in one run.

    python benchmarks/grpo_step.py --trl-python /path/to/trl-env/bin/python --out result.json
    python benchmarks/grpo_step.py --quick          # Quadriga alone, few steps
    python benchmarks/grpo_step.py --device cuda --size 0.5b --trl-python …

Both systems train the same Qwen2 model of about 1.0 M random parameters in float32, in one process
with two threads: 16 prompts × 8 samples, a reference model with a KL loss, on-policy, responses
that end at an end token or at the limit. A step covers generation, scoring, log-probabilities,
advantages and the update. The figure of a case is the median of the steps after three warm-up
steps. Cases of the two systems alternate. Compare ratios of one run only.

Also measured: the useful FLOP/s over the peak of a matrix product, tokens per second, the peak
memory of the process or of the device beside what the memory plan says, the share of each stage in
a step, and on a CPU two Ray workers of one thread over one process of two (1 is equal, above 1 is
faster). `--set` gives settings of Quadriga, such as another rollout engine.

The sizes 0.5b and 1.5b compute in bfloat16 with float32 weights, for a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "grpo"))

from sizes import SIZES, Size
from trl_peer import PROMPTS, SAMPLES, Case, prompts  # the same for both systems
from useful_flops import peak_flops, useful_flops

PARTS = Path(__file__).parent / "grpo"
WARM_UP = 3
STAGES = ("rollout", "evaluate", "ref_log_prob", "old_log_prob", "advantages", "update_actor",
          "sync_weights")  # fmt: skip
Metrics = dict[str, float]
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""


def write_inputs(folder: Path, size: Size, steps: int) -> int:
    """Write the model and, for each case, the prompts. Return the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from quadriga.models import TinyModel, write_tiny_model

    write_tiny_model(str(folder / "model"), prompts(64, 40), TinyModel(), seed=0)  # a tokenizer
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            intermediate_size=size.intermediate,
            vocab_size=size.vocab,
            max_position_embeddings=2048,
            tie_word_embeddings=size.tied,
            **special_tokens(folder / "model"),
        )
    )
    model.save_pretrained(folder / "model")
    parameters: int = sum(p.numel() for p in model.parameters())
    (folder / "reward.py").write_text(REWARD)
    for words in {case.prompt_words for case in size.cases.values()}:
        rows = [
            {
                "prompt": [{"role": "user", "content": text}],
                "data_source": "length",
                "reward_model": {"ground_truth": ""},
                "extra_info": {},
            }
            for text in prompts(PROMPTS * steps, words)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"prompts-{words}.jsonl").write_text(text)
    return parameters


def special_tokens(folder: Path) -> dict[str, int]:
    """Return the numbers of the special tokens in a model's config."""
    config = json.loads((folder / "config.json").read_text())
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            if config.get(key) is not None}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What the cases have in common."""

    folder: Path
    size: Size
    device: str
    steps: int
    settings: tuple[str, ...]  # of Quadriga, `key=value`


def ours(setup: Setup, case: Case, workers: int = 1) -> tuple[list[Metrics], dict[str, int]]:
    """Return the metrics of the steps of `quadriga train` after warm-up, and its bytes: the most
    that it used, and those that were planned.

    One worker runs in the controller's process with two threads; two are Ray workers with one each.
    """
    run = setup.folder / "run"
    overrides = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"[{setup.folder}/prompts-{case.prompt_words}.jsonl]",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": case.limit,
        "actor_rollout_ref.model.path": setup.folder / "model",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.engine.dtype": setup.size.dtype,
        "reward.path": setup.folder / "reward.py",
        "trainer.backend": "local" if workers == 1 else "ray",
        "trainer.device": setup.device,
        "trainer.n_gpus_per_node": workers,
        "trainer.threads_per_worker": 2 // workers,
        "trainer.total_training_steps": setup.steps,
        "trainer.loggers": "[jsonl]",
        "trainer.default_local_dir": run,
        "trainer.overwrite": "true",
    }
    command = [sys.executable, str(PARTS / "measured_train.py"), setup.device]
    given = (f"{key}={value}" for key, value in overrides.items())
    printed = _run([*command, *given, *setup.settings])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [record for record in records if "time/step" in record][WARM_UP:]
    return measured, _last_line(printed)


def described(setup: Setup, case: Case, peak: float) -> Metrics:
    """Return the figures of Quadriga for one case: the median step, its useful FLOP/s over the
    peak, and the share of each stage."""
    records, memory = ours(setup, case)
    step = statistics.median(record["time/step"] for record in records)
    needed = statistics.median(useful_flops(record, setup.size, PROMPTS) for record in records)
    speed = statistics.median(record["perf/tokens_per_second"] for record in records)
    figures = {
        "ours_s": step,
        "useful_flops_over_peak": needed / step / peak,
        "tokens_per_second": speed,
        **{f"{name}_gib": size / 2**30 for name, size in memory.items()},
    }
    for stage in STAGES:
        seconds = [record.get(f"time/{stage}", 0.0) for record in records]
        if any(seconds):
            figures[f"share_of_{stage}"] = statistics.median(seconds) / step
    if setup.device == "cpu":
        pair = statistics.median(record["time/step"] for record in ours(setup, case, 2)[0])
        figures["two_workers_over_one_process"] = step / pair
    return figures


def trl(python: str, setup: Setup, case: Case) -> tuple[Metrics, str]:
    """Return the median step of TRL and its peak memory, and its version."""
    words = [str(setup.folder / "model"), json.dumps(asdict(case)), str(setup.steps)]
    peer = [python, str(PARTS / "trl_peer.py"), *words, setup.device, setup.size.dtype]
    printed = _last_line(_run(peer))
    seconds = statistics.median(printed["seconds"][WARM_UP:])
    return {"trl_s": seconds, "trl_peak_memory_gib": printed["peak_memory"] / 2**30}, printed["trl"]


def _last_line(printed: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def device_name(device: str) -> str | None:
    """Return the name of the chip, or of the kind of processor. None: the machine has none."""
    import torch

    if device == "cpu":
        return platform.machine()
    module = getattr(torch, device, None)
    return module.get_device_name() if module is not None and module.is_available() else None


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    from quadriga.observability.quiet import silence_libraries

    silence_libraries()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl-python", help="the Python of an environment that has TRL")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--device", default="cpu", help="cpu, or the type of an accelerator")
    parser.add_argument("--size", default="1m", choices=SIZES, help="parameters of the model")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--quick", action="store_true", help="one case, few steps")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    machine = device_name(options.device)
    if machine is None:
        parser.error(f"--device {options.device}: this machine has no such device")
    steps, size = WARM_UP + 2 if options.quick else options.steps, SIZES[options.size]
    peak = peak_flops(options.device)
    result: dict[str, object] = {
        "machine": machine,
        "cpus": os.cpu_count(),
        "peak_gflops": round(peak / 1e9, 1),
    }
    cases: dict[str, Metrics] = {}
    with tempfile.TemporaryDirectory() as folder:
        result["parameters"] = write_inputs(Path(folder), size, steps)
        setup = Setup(Path(folder), size, options.device, steps, tuple(options.settings))
        for name, case in list(size.cases.items())[: 1 if options.quick else None]:
            print(f"{name} …", file=sys.stderr)
            figures = described(setup, case, peak)
            if options.trl_python:
                peer, result["trl"] = trl(options.trl_python, setup, case)
                figures |= {**peer, "speed_up": peer["trl_s"] / figures["ours_s"]}
            cases[name] = {key: round(value, 4) for key, value in figures.items()}
    result["cases"] = cases
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
