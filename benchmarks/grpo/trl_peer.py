"""Time GRPO steps of TRL. Run by TRL's own Python; prints one JSON line.

python benchmarks/grpo/trl_peer.py MODEL_FOLDER '{"prompt_words": 5, "limit": 64}' 8 cpu float32
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

PROMPTS, SAMPLES = 16, 8


@dataclass(frozen=True)
class Case:
    """Words of each prompt, and the most tokens of a response."""

    prompt_words: int
    limit: int


def prompts(count: int, words: int) -> list[str]:
    """Return `count` different prompts of `words` words each."""
    return [" ".join(str((i + j) % 10) for j in range(words)) for i in range(count)]


def score(text: str) -> float:
    """Return a score in [0, 1) that varies within a prompt group."""
    return len(text) % 7 / 7


def peak_memory(device: str) -> int:
    """Return the bytes that this process has used at most: of the device, or of the host."""
    if device == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import torch

    return int(getattr(torch, device).max_memory_allocated())


def main(folder: str, case: Case, steps: int, device: str, dtype: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    rows = [
        {"prompt": [{"role": "user", "content": text}]}
        for text in prompts(PROMPTS * steps, case.prompt_words)
    ]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [score(c[0]["content"]) for c in completions],
        args=GRPOConfig(
            output_dir=f"{folder}-trl",
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=case.limit,
            max_steps=steps,
            learning_rate=1e-6,
            beta=0.001,  # above 0: a reference model is loaded and evaluated
            use_cpu=device == "cpu",
            bf16=dtype == "bfloat16",  # with float32 weights, as Quadriga has them
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    measured = {"seconds": seconds, "peak_memory": peak_memory(device), "trl": version("trl")}
    print(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1], Case(**json.loads(sys.argv[2])), int(sys.argv[3]), *sys.argv[4:])
