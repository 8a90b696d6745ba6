"""vLLM through us, and the same vLLM engine called directly as its `LLM` class calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine, SamplingParams

Direct = Callable[[list[list[int]], SamplingParams, int], int]


@contextmanager
def engines(folder: str) -> Iterator[tuple[RolloutEngine, Direct]]:
    """Start vLLM for the model of a folder. Both ways use one engine, so it has one cache."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as OwnParams

    engine = build_rollout("vllm", ModelConfig(path=folder), dtype="float32")

    def direct(prompts: list[list[int]], sampling: SamplingParams, seed: int) -> int:
        own = engine._running.engine
        for row, prompt in enumerate(prompts):
            params = OwnParams(
                temperature=1.0, max_tokens=sampling.max_new_tokens, ignore_eos=True, logprobs=0,
                stop_token_ids=list(sampling.end_token_ids), seed=1_000_000 * seed + row,
                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            own.add_request(str(row), {"prompt_token_ids": prompt}, params)
        tokens = 0
        while own.has_unfinished_requests():
            outputs = [output for output in own.step() if output.finished]
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens

    try:
        yield engine, direct
    finally:
        engine.close()
