"""Measure one GRPO step of Quadriga and of TRL in one run.

    python benchmarks/grpo_step.py --trl-python /path/to/trl-env/bin/python --out result.json
    python benchmarks/grpo_step.py --quick          # Quadriga alone, few steps

Both systems train the same Qwen2 model of about 1.0 M random parameters in float32, in one process
with two threads: 16 prompts × 8 samples, a reference model with a KL loss, on-policy, responses
that end at an end token or at the limit. A step covers generation, scoring, log-probabilities,
advantages and the update. The figure of a case is the median of the steps after three warm-up
steps. Cases of the two systems alternate. Compare ratios of one run only.

Also measured: the useful FLOP/s over the peak of a matrix product, the share of each stage in a
step, and two Ray workers of one thread over one process of two (1 is equal, above 1 is faster).
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "grpo"))

from trl_peer import PROMPTS, SAMPLES, prompts  # the same prompts and scores for both systems
from useful_flops import peak_flops, useful_flops

WARM_UP = 3
MODEL = {"hidden": 192, "layers": 2, "intermediate": 512, "kv_share": 50, "vocab": 512}
STAGES = ("rollout", "evaluate", "ref_log_prob", "old_log_prob", "advantages", "update_actor",
          "sync_weights")  # fmt: skip
CASES = {
    "prompt 5 words, limit 64": {"prompt_words": 5, "limit": 64},
    "prompt 5 words, limit 256": {"prompt_words": 5, "limit": 256},
    "prompt 125 words, limit 64": {"prompt_words": 125, "limit": 64},
}
Metrics = dict[str, float]
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""


def write_inputs(folder: Path, steps: int) -> int:
    """Write the model and, for each case, the prompts. Return the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from quadriga.models import TinyModel, write_tiny_model
    from quadriga.observability.quiet import quiet_libraries

    texts = prompts(64, 40)
    shape = TinyModel(
        hidden_size=MODEL["hidden"],
        num_layers=MODEL["layers"],
        intermediate_size=MODEL["intermediate"],
        vocab_size=MODEL["vocab"],
    )
    write_tiny_model(str(folder / "model"), texts, shape, seed=0)  # its tokenizer is kept
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=MODEL["hidden"],
            num_hidden_layers=MODEL["layers"],
            num_attention_heads=6,
            num_key_value_heads=3,
            intermediate_size=MODEL["intermediate"],
            vocab_size=MODEL["vocab"],
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            **special_tokens(folder / "model"),
        )
    )
    with quiet_libraries():
        model.save_pretrained(folder / "model")
    parameters: int = sum(p.numel() for p in model.parameters())
    (folder / "reward.py").write_text(REWARD)
    for words in {case["prompt_words"] for case in CASES.values()}:
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


def ours(folder: Path, case: dict[str, int], steps: int, workers: int = 1) -> list[Metrics]:
    """Return the metrics of the steps of `quadriga train` after warm-up.

    One worker runs in the controller's process with two threads; two are Ray workers with one each.
    """
    run = folder / "run"
    overrides = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": f"[{folder}/prompts-{case['prompt_words']}.jsonl]",
        "data.train_batch_size": PROMPTS,
        "data.max_response_length": case["limit"],
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "reward.path": folder / "reward.py",
        "trainer.backend": "local" if workers == 1 else "ray",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": workers,
        "trainer.threads_per_worker": 2 // workers,
        "trainer.total_training_steps": steps,
        "trainer.loggers": "[jsonl]",
        "trainer.default_local_dir": run,
        "trainer.overwrite": "true",
    }
    command = [sys.executable, "-m", "quadriga.cli.main", "train"]
    _run([*command, *(f"{key}={value}" for key, value in overrides.items())])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "time/step" in record][WARM_UP:]


def described(records: list[Metrics], peak: float) -> dict[str, float]:
    """Return the median step, its useful FLOP/s over the peak, and the share of each stage."""
    step = statistics.median(record["time/step"] for record in records)
    needed = statistics.median(useful_flops(record, MODEL, PROMPTS) for record in records)
    figures = {"ours_s": step, "useful_flops_over_peak": needed / step / peak}
    for stage in STAGES:
        seconds = [record.get(f"time/{stage}", 0.0) for record in records]
        if any(seconds):
            figures[f"share_of_{stage}"] = statistics.median(seconds) / step
    return figures


def trl(python: str, folder: Path, case: dict[str, int], steps: int) -> tuple[list[float], str]:
    """Return the seconds of each step of TRL, and its version."""
    peer = Path(__file__).parent / "grpo" / "trl_peer.py"
    out = _run([python, str(peer), str(folder / "model"), json.dumps({**case, "steps": steps})])
    printed = json.loads(out.strip().splitlines()[-1])
    return printed["seconds"], printed["trl"]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl-python", help="the Python of an environment that has TRL")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="one case, few steps")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    steps = WARM_UP + 2 if options.quick else options.steps
    peak = peak_flops()
    result: dict[str, object] = {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "peak_gflops": round(peak / 1e9, 1),
    }
    cases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        result["parameters"] = write_inputs(Path(folder), steps)
        for name, case in list(CASES.items())[: 1 if options.quick else None]:
            print(f"{name} …", file=sys.stderr)
            figures = described(ours(Path(folder), case, steps), peak)
            pair = statistics.median(m["time/step"] for m in ours(Path(folder), case, steps, 2))
            figures["two_workers_over_one_process"] = figures["ours_s"] / pair
            if options.trl_python:
                seconds, result["trl"] = trl(options.trl_python, Path(folder), case, steps)
                figures["trl_s"] = statistics.median(seconds[WARM_UP:])
                figures["speed_up"] = figures["trl_s"] / figures["ours_s"]
            cases[name] = {key: round(value, 4) for key, value in figures.items()}
    result["cases"] = cases
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
