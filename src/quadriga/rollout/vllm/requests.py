"""One call of `generate` or `score` as requests of vLLM.

consumes      token ids of each row, sampling settings, seeds
produces      token ids and log-probabilities of each row, in the order of the rows
waits for     vLLM's steps; a deadline is checked after each of them

Which log-probabilities vLLM returns is set on its sampler for each call:

    kind            mode of the sampler     log-softmax of
    policy          raw                     logits / temperature
    temperature_1   raw                     logits
    sampled         processed               what is left after temperature and filters

vLLM has these modes, but one for the life of an engine, and none for "policy" with filters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quadriga.errors import RolloutTimeoutError
from quadriga.parallel.distributed import rank
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.stop_strings import StopStrings

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

_64_BITS = (1 << 64) - 1


@dataclass
class RowResult:
    """What one row returned. `log_probs` are of the response, or of the prompt for `score`."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = False


@dataclass(frozen=True)
class Deadline:
    """When a call must have ended. `seconds` None: never."""

    method: str
    seconds: float | None
    start: float = field(default_factory=time.monotonic)

    def check(self, done: int, count: int) -> None:
        """Raise `RolloutTimeoutError` if the time is over."""
        if self.seconds is None or time.monotonic() - self.start <= self.seconds:
            return
        raise RolloutTimeoutError(
            f"rollout engine 'vllm' on rank {rank()}: {self.method} exceeded its deadline of "
            f"{self.seconds:g} s after {done} of {count} rows; raise "
            "actor_rollout_ref.rollout.options.call_timeout_s, or generate fewer rows or shorter "
            "responses",
            engine="vllm",
            method=self.method,
            deadline=self.seconds,
            rank=rank(),
        )


def generate_rows(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    *,
    vocabulary: int,
    stop_strings: StopStrings | None,
    deadline: Deadline,
    adapter: LoRARequest | None = None,
) -> list[RowResult]:
    """Sample a response for each prompt. `adapter`: with which vLLM computes."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    _set_log_probs(engine, sampling)
    watch = stop_strings is not None
    ends = [token for token in sampling.end_token_ids if token < vocabulary]
    requests = [
        VLLMSamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=0 if sampling.greedy or sampling.top_k < 0 else sampling.top_k,
            min_p=0.0 if sampling.greedy else sampling.min_p,
            seed=None if sampling.greedy else spread_seed(seed),
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens if ends else 0,
            stop_token_ids=ends,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if watch else RequestOutputKind.FINAL_ONLY,
        )
        for seed in seeds
    ]
    results = [RowResult() for _ in prompts]
    earliest = sampling.min_new_tokens
    for row, output, finished in _steps(engine, prompts, requests, deadline, adapter):
        tokens = [int(token) for token in output.outputs[0].token_ids]
        end = None
        if stop_strings is not None:
            end = _stopped_at(tokens, len(results[row].tokens), earliest, stop_strings)
        results[row].tokens = tokens[:end]
        if end is not None or output.finished:
            results[row].log_probs = list(output.outputs[0].logprobs.logprobs)[:end]
            results[row].stopped = end is not None or output.outputs[0].finish_reason == "stop"
            finished()
    return results


def score_rows(
    engine: LLMEngine,
    sequences: Sequence[list[int]],
    *,
    deadline: Deadline,
    adapter: LoRARequest | None = None,
) -> list[RowResult]:
    """Compute the log-probability at temperature 1 of each token but the first."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams

    _set_sampler(engine, "raw_logprobs", 1.0)
    request = VLLMSamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    results = [RowResult() for _ in sequences]
    requests = [request] * len(sequences)
    for row, output, finished in _steps(engine, sequences, requests, deadline, adapter):
        results[row].log_probs = list(output.prompt_logprobs.logprobs)
        finished()
    return results


def spread_seed(seed: int) -> int:
    """Return a number from 0 to 2^63 - 1 in which every bit of a 64-bit seed changes the low bits.

    torch's generator on a CPU uses the low 32 bits only: without this, the seeds 0, 2^32 and 2^62
    would sample the same response. It is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    vLLM takes -1 for "no seed", so the result is not negative.
    """
    mixed = (seed + 0x9E3779B97F4A7C15) & _64_BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return (mixed ^ (mixed >> 31)) >> 1


def _stopped_at(
    tokens: Sequence[int], known: int, earliest: int, stop_strings: StopStrings
) -> int | None:
    """Return the length at which a stop string is complete, looking behind `known` tokens."""
    for count in range(known + 1, len(tokens) + 1):
        if count >= earliest and stop_strings.completed_by_last(tokens[:count]):
            return count
    return None


def _steps(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    requests: Sequence[VLLMSamplingParams],
    deadline: Deadline,
    adapter: LoRARequest | None,
) -> Iterator[tuple[int, RequestOutput, Callable[[], None]]]:
    """Yield (row, output, function that ends the row) until every row has been ended.

    When it ends, for whatever reason, no request is left in the engine.
    """
    deadline.check(0, len(prompts))
    running = {str(row): row for row in range(len(prompts))}
    try:
        for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            tokens = {"prompt_token_ids": prompt}
            engine.add_request(str(row), tokens, request, lora_request=adapter)
        while running:
            for output in engine.step():
                # A row that was ended here can still have an output of the step before.
                if output.request_id in running:
                    end = partial(_end_row, engine, running, output)
                    yield running[output.request_id], output, end
            deadline.check(len(prompts) - len(running), len(prompts))
    finally:
        engine.abort_request(list(running))


def _end_row(engine: LLMEngine, running: dict[str, int], output: RequestOutput) -> None:
    del running[output.request_id]
    if not output.finished:
        engine.abort_request([output.request_id])


def _set_log_probs(engine: LLMEngine, sampling: SamplingParams) -> None:
    if sampling.log_probs == "sampled":
        _set_sampler(engine, "processed_logprobs", 1.0)
    elif sampling.log_probs == "policy" and not sampling.greedy:
        _set_sampler(engine, "raw_logprobs", sampling.temperature)
    else:
        _set_sampler(engine, "raw_logprobs", 1.0)


def _set_sampler(engine: LLMEngine, mode: str, temperature: float) -> None:
    """Choose which log-probabilities the sampler returns, for requests from now on."""

    def compute_logprobs(logits: Tensor) -> Tensor:
        scaled = logits if temperature == 1 else logits.float() / temperature
        return scaled.log_softmax(dim=-1, dtype=torch.float32)

    sampler = engine.model_executor.driver_worker.model_runner.sampler
    sampler.logprobs_mode = mode
    sampler.topk_topp_sampler.logprobs_mode = mode
    sampler.compute_logprobs = compute_logprobs
