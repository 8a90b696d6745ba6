"""SGLang through us, and an `sglang.Engine` with the same arguments called directly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine, SamplingParams

Direct = Callable[[list[list[int]], SamplingParams, int], int]


@contextmanager
def engines(folder: str) -> Iterator[tuple[RolloutEngine, Mapping[str, Direct]]]:
    """Start SGLang twice for the model of a folder: below us, and in this process."""
    import torch

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang

    device: dict[str, object] = {
        "device": "cpu", "attention_backend": "torch_native", "grammar_backend": "none",
        "disable_cuda_graph": True, "max_total_tokens": 1 << 16,
    } if on_cpu else {"mem_fraction_static": 0.3}  # fmt: skip
    engine = build_rollout("sglang", ModelConfig(path=folder), dtype="float32")
    own = sglang.Engine(
        model_path=folder, dtype="float32", skip_tokenizer_init=True, sampling_backend="pytorch",
        log_level="error", **device,
    )  # fmt: skip

    def direct(prompts: list[list[int]], sampling: SamplingParams, seed: int) -> int:
        params = {
            "temperature": 1.0, "max_new_tokens": sampling.max_new_tokens, "ignore_eos": True,
            "stop_token_ids": list(sampling.end_token_ids),
        }  # fmt: skip
        answers = own.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers)

    try:
        yield engine, {"direct": direct}
    finally:
        own.shutdown()
        engine.close()
