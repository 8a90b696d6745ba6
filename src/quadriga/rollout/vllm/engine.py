"""`VLLMRollout`: generation with vLLM in the process of the rank.

One call of `generate` or `score`:

consumes      token ids of each row, sampling settings, seeds
produces      token ids and log-probabilities of each row, in the order of the rows
waits for     vLLM's steps

Which log-probabilities vLLM returns is set on its sampler for each call:

    kind            mode of the sampler     log-softmax of
    policy          raw                     logits / temperature
    temperature_1   raw                     logits
    sampled         processed               what is left after temperature and filters

vLLM has these modes, but one for the life of an engine, and none for "policy" with filters.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from quadriga.config.schema import ModelConfig
from quadriga.errors import ConfigError, ModelError, QuadrigaError, RolloutError
from quadriga.models.adapters import Adapter, plan_adapter
from quadriga.models.folder import local_folder
from quadriga.models.limits import context_window
from quadriga.models.loading import model_without_weights
from quadriga.models.routes import Routers
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import init_distributed, local_device, rank, world_size
from quadriga.parallel.layouts import Box
from quadriga.rollout.base import (
    Continued,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    UpdateForm,
)
from quadriga.rollout.responses import (
    Response,
    StopStrings,
    padded_output,
    stop_strings_of,
    token_rows,
)
from quadriga.rollout.vllm.options import (
    ADAPTER_RANKS,
    CPU_CACHE_MB,
    VLLM,
    VLLMOptions,
    check_ranks,
    check_temperature,
    engine_window,
)
from quadriga.rollout.vllm.routes import RecordedRoutes
from quadriga.rollout.vllm.weights import EngineWeights, adapter_request, load_adapter

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams as VLLMSamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from quadriga.models.images import MultiModalRows

ResultT = TypeVar("ResultT")
_64_BITS = (1 << 64) - 1
_CPU_STEP_TOKENS = 4096

_engines: set[int] = set()
"""`id` of the engines of this process, which share vLLM's process groups."""

_order_of_ranks: list[int] = []
"""The ranks of all copies, one copy after another; empty: in the order of their numbers."""


_Copies = Sequence[tuple[int, ...]] | None
"""The ranks that hold each copy together, in ascending order; None: neighbours."""


class VLLMRollout(RolloutEngine):
    """See `RolloutEngine`. `rollout.settings.micro_batch_size` rows are generated at once.

    Each rank has an engine in its own process, with a whole copy of the weights or, with
    `tensor_parallel_size`, a part of one. `copies` are the ranks that hold each copy together, in
    ascending order, which is that of their parts; None: neighbouring ranks. On a GPU `release`
    moves the weights to host memory and drops the key-value cache; on a CPU it frees nothing.

    In float32 the log-probabilities agree with transformers' to about 1e-5, and the response of a
    row is drawn with random numbers of its own. The rounding of a row depends a little on the rows
    that are computed with it. This changes a token only if two tokens come closer than that.

    Raises:
        ConfigError: an option does not fit.
        ModelError: vLLM cannot load the model, or does not hold its weights by their names.
        RolloutError: vLLM did not start.
    """

    name = "vllm"
    _refusals: tuple[type[Exception], ...] = (ValueError,)  # what vLLM raises of a request

    def __init__(
        self,
        rollout: VLLM,
        model: ModelConfig,
        device: str | torch.device,
        *,
        releasable: bool,
        copies: _Copies,
    ) -> None:
        self.options = rollout.options
        self.device = local_device(device)
        seeds = self.options.seeds
        self._row_seeds = self.device.type == "cpu" if seeds is None else seeds
        dtype = compute_dtype(rollout.settings.dtype, self.device)
        folder = local_folder(model.path)
        plain = replace(model, path=str(folder), attn_implementation="sdpa")
        reference = model_without_weights(plain, dtype=dtype)
        window = engine_window(self.options, model.path, context_window(reference.config))
        self.abilities = replace(
            rollout.abilities(reference.config.get_text_config().vocab_size, window),
            batch_invariant=dtype == torch.float32 and self._row_seeds,
        )
        self._releasable = releasable or self.device.type == "cpu"
        changed = {type(m) for m in reference.modules() if isinstance(m, PreTrainedModel)}
        self._isolation, self._weights_awake = Isolation(changed), True
        self._routes: RecordedRoutes | None = None
        self._resets_caches = rollout.resets_caches
        self._model = model
        planned = plan_adapter(reference, model.lora) if model.lora.enabled else None
        mixture = any(".experts." in name for name, _ in reference.named_parameters())
        if planned is not None and mixture and self.device.type == "cpu":
            raise ModelError(
                "vLLM computes adapters of a mixture of experts by Triton, which a CPU lacks; set "
                "actor_rollout_ref.rollout.load_adapters=false, which merges them into the weights",
                path=model.path,
            )
        self.holds_adapters = planned is not None
        self._owns_group = not dist.is_initialized()
        init_distributed(self.device.type)
        check_ranks(self.options, world_size())
        arguments: dict[str, object] = {
            "model": str(folder),
            "trust_remote_code": model.trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            # `score` generates one token behind the window, whose log-probability is not used.
            "max_model_len": window + 1,
            "max_num_seqs": rollout.settings.micro_batch_size,
            "enable_sleep_mode": releasable and self.device.type != "cpu",
            **_adapters(planned),
        }
        try:
            with self._isolation.inside():
                self._engine = _start(self.options, self.device, copies, arguments)
                from vllm.exceptions import VLLMClientError

                self._refusals = ValueError, VLLMClientError
                held = self._engine.model_executor.driver_worker.get_model()
                adapters = {} if planned is None else load_adapter(self._engine, held, planned)
                group = None  # the ranks that hold one copy together; None: this rank alone
                if self.options.tensor_parallel_size > 1:
                    from vllm.distributed import parallel_state

                    group = parallel_state.get_tp_group().device_group
                self._weights = EngineWeights(held, reference, model.path, group, adapters)
                self._weights.check_files(folder)
                if rollout.records_routes:
                    runner = self._engine.model_executor.driver_worker.model_runner
                    self._routes = RecordedRoutes(runner, Routers(reference))
        except BaseException:
            self.close()
            raise

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None = None,
        continued: Continued | None = None,
    ) -> RolloutOutput:
        self._check_generates("generate", images)
        begun = self.check_request(prompt_ids, attention_mask, sampling, sample_seeds, continued)
        check_temperature(sampling.temperature)
        with self._inside("generate"):
            stops = stop_strings_of(self._model, sampling.stop_strings)
            prompts = token_rows(prompt_ids, attention_mask)
            responses = self._sample(prompts, sampling, sample_seeds.tolist(), stops, begun)
        return padded_output(responses, sampling, self.version, begun, attention_mask)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_generates("score")
        self.check_sequences(ids, attention_mask)
        with self._inside("score"):
            results = self._scores(token_rows(ids, attention_mask))
        log_probs = torch.zeros(ids.shape)
        for row, result in enumerate(results):
            columns = attention_mask[row].nonzero()[1:, 0].cpu()
            log_probs[row, columns] = torch.tensor(result)
        return log_probs

    def _sample(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        stop_strings: StopStrings | None,
        begun: Continued,
    ) -> list[Response]:
        """Sample a response for each prompt, or its next tokens."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams as VLLMSamplingParams

        scaled = sampling.log_probs == "policy" and not sampling.greedy
        mode = "processed_logprobs" if sampling.log_probs == "sampled" else "raw_logprobs"
        _set_sampler(self._engine, mode, sampling.temperature if scaled else 1.0)
        watch = stop_strings is not None
        ends = [token for token in sampling.end_token_ids if token < self.abilities.vocabulary]
        sampled = begun.sampled.tolist()
        most = [min(begun.at_most, sampling.max_new_tokens - count) for count in sampled]
        least = [max(0, sampling.min_new_tokens - count) for count in sampled]
        own_seeds = [seed_from(seed, count) for seed, count in zip(seeds, sampled, strict=True)]
        if not self._row_seeds:
            torch.manual_seed(seed_of_call(own_seeds))

        def request(row: int) -> VLLMSamplingParams:
            return VLLMSamplingParams(
                temperature=sampling.temperature,
                top_p=1.0 if sampling.greedy else sampling.top_p,
                top_k=0 if sampling.greedy or sampling.top_k < 0 else sampling.top_k,
                min_p=0.0 if sampling.greedy else sampling.min_p,
                seed=None if sampling.greedy or not self._row_seeds else own_seeds[row],
                max_tokens=most[row],
                min_tokens=min(least[row], most[row]) if ends else 0,
                stop_token_ids=ends,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE if watch else RequestOutputKind.FINAL_ONLY,
            )

        try:
            requests = [request(row) for row in range(len(prompts))]
        except self._refusals as error:
            raise self._error("generate", f"vLLM refuses the settings: {error}") from error
        known = [0] * len(prompts)
        before = [
            prompt[max(0, len(prompt) - n) :] for prompt, n in zip(prompts, sampled, strict=True)
        ]

        def read(row: int, output: RequestOutput) -> Response | None:
            sample = output.outputs[0]
            tokens, end = [int(token) for token in sample.token_ids], None
            if stop_strings is not None:
                first = len(before[row]) + max(known[row] + 1, least[row])
                end = stop_strings.completed_at([*before[row], *tokens], first)
                end = end and end - len(before[row])
            known[row] = len(tokens)
            if end is None and not output.finished:
                return None
            log_probs = list(sample.logprobs.logprobs)[:end]
            stopped = end is not None or sample.finish_reason == "stop"
            routes = None
            if self._routes is not None:
                routes = self._routes.of(output.request_id, len(prompts[row]) + len(tokens) - 1)
            return Response(tokens[:end], log_probs, "stop" if stopped else "length", routes)

        return self._run(prompts, requests, read, self._caches(begun))

    def _scores(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Compute the log-probability at temperature 1 of each token but the first."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams as VLLMSamplingParams

        _set_sampler(self._engine, "raw_logprobs", 1.0)
        request = VLLMSamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._run(
            sequences,
            [request] * len(sequences),
            lambda row, output: list(output.prompt_logprobs.logprobs),
        )

    def _run(
        self,
        prompts: Sequence[list[int]],
        requests: Sequence[VLLMSamplingParams],
        read: Callable[[int, RequestOutput], ResultT | None],
        caches: Sequence[str] = (),
    ) -> list[ResultT]:
        """Return what `read` makes of the outputs of each row; None: the row goes on.

        When it ends, for whatever reason, no request is left in the engine.

        Args:
            caches: of each row, see `RolloutEngine._caches`.
        """
        found: dict[int, ResultT] = {}
        running = {str(row): row for row in range(len(prompts))}
        engine = self._engine
        loaded = adapter_request("in memory") if self._weights.adapters else None
        try:
            for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
                tokens: dict[str, list[int] | str] = {"prompt_token_ids": prompt}
                if caches:
                    tokens["cache_salt"] = caches[row]
                try:
                    engine.add_request(str(row), tokens, request, lora_request=loaded)
                except self._refusals as error:  # nothing has run yet, so the engine can go on
                    raise self._error("generate", f"vLLM refuses row {row}: {error}") from error
            while running:
                for output in engine.step():
                    # A row that was ended here can still have an output of the step before.
                    number = output.request_id
                    result = read(running[number], output) if number in running else None
                    if result is not None:
                        found[running.pop(number)] = result
                        if not output.finished:
                            engine.abort_request([number])
        finally:
            engine.abort_request(list(running))
        return [found[row] for row in range(len(prompts))]

    # Weights

    def weight_boxes(self) -> Mapping[str, Box]:
        self._check("weight_boxes", "ready", "released")
        return self._weights.boxes()

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        self._check("update_weights", "ready", "released")
        method, held = "update_weights", self._weights
        names, write = held.names_that_are_sent, held.write_box if form == "parts" else held.write
        with self._isolation.inside(), self._writing(stream, version, names) as weights:
            with self._failures(method):
                self._wake_weights()
            try:
                for name, tensor in weights:
                    with self._failures(method):
                        write(name, tensor)
            finally:  # keys and values in the prefix cache are of the old weights
                with self._failures(method):
                    if self._resets_caches and self._engine.reset_prefix_cache() is False:
                        self._state = "failed"
                        raise self._error(
                            method,
                            "a request still uses keys and values of old weights; restart the "
                            "worker",
                        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._weights
        return ((name, weights.read(name)) for name in weights.names())

    def weights_digest(self) -> dict[str, int]:
        self._check("weights_digest", "ready", "released")
        with self._inside("weights_digest"):
            self._wake_weights()
            return super().weights_digest()

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check("weight_dtypes", "ready", "released")
        return self._weights.dtypes()

    # Memory and end

    def _free(self) -> None:
        with self._inside("release"):
            self._engine.reset_prefix_cache()
            if self.device.type != "cpu":
                self._engine.sleep(level=self.options.sleep_level)
                self._weights_awake = False
        if self.options.sleep_level == 2:  # on a CPU too, where nothing is freed
            self._unknown = frozenset(self._weights.names_that_are_sent())

    def lacks_weights(self) -> bool:
        return bool(self._unknown)

    def _get_back(self) -> None:
        with self._inside("resume"):
            if self.device.type != "cpu":
                self._wake_weights()
                self._engine.wake_up(tags=["kv_cache"])

    def _wake_weights(self) -> None:
        """Move the weights of a released engine back to the device. The cache stays released."""
        if not self._weights_awake:
            self._engine.wake_up(tags=["weights"])
            self._weights_awake = True
            if self._unknown:
                self._weights.clear_adapters()

    def close(self) -> None:
        if self._state == "closed":
            return
        self._state = "closed"
        with self._isolation.inside():
            engine: LLMEngine | None = self.__dict__.pop("_engine", None)
            if engine is not None:
                self.__dict__.pop("_weights", None)
                _end(engine)
            if not _engines:  # also after a start that failed half way
                _leave_groups()
                if self._owns_group and dist.is_initialized():
                    dist.destroy_process_group()

    @contextmanager
    def _inside(self, method: str) -> Iterator[None]:
        """Call vLLM in its isolation."""
        with self._failures(method), self._isolation.inside():
            yield

    @contextmanager
    def _failures(self, method: str) -> Iterator[None]:
        """Turn an error of vLLM into a typed one. The engine is not used again after it."""
        try:
            yield
        except QuadrigaError:
            raise
        except Exception as error:
            self._state = "failed"
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise self._error(
                method,
                f"{cause}. Restart the worker; if it happens again, lower "
                "actor_rollout_ref.rollout.micro_batch_size",
            ) from error


# The start and the end of vLLM in this process


def _start(
    options: VLLMOptions, device: torch.device, copies: _Copies, given: Mapping[str, object]
) -> LLMEngine:
    on_cpu = device.type == "cpu"
    if on_cpu:
        _keep_weights_unpacked()
    if options.tensor_parallel_size > 1:
        _set_groups(copies)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    cache_mb = options.kv_cache_mb or (CPU_CACHE_MB if on_cpu else None)
    if world_size() > 1:
        # vLLM then uses the ranks' process group and joins nothing of its own.
        os.environ.update(launcher_variables(device))
    arguments: dict[str, object] = {
        **given,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": cache_mb << 20 if cache_mb else None,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "logprobs_mode": "raw_logprobs",
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher" if world_size() > 1 else "uni",
        # A batch in flight would still use the weights that are being replaced.
        "async_scheduling": False,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **options.engine_args,
        **_compiled_for(copies, options.engine_args),
    }
    if on_cpu:
        # vLLM draws a token after each step and discards it if the prompt is not complete. It then
        # sets the random numbers of the row back, which a generator on a CPU cannot do.
        least = max(_CPU_STEP_TOKENS, int(str(given["max_model_len"])))
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": least}
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (ModelError, ConfigError):
        raise
    except Exception as error:
        raise RolloutError(
            f"rollout engine 'vllm' on rank {rank()} did not start with the model in "
            f"{given['model']}: {' '.join(str(error).split())}. Check "
            "actor_rollout_ref.rollout.options, or set actor_rollout_ref.rollout.name=hf",
            engine="vllm",
            rank=rank(),
        ) from error
    # vLLM would end the process group of the training engine with its own.
    engine.engine_core._finalizer.detach()
    _engines.add(id(engine))
    return engine


def launcher_variables(device: torch.device) -> dict[str, str]:
    """Return the variables from which vLLM takes its rank and its device.

    LOCAL_RANK is the index of the device in this process. Under Ray a process sees one device, so
    it is 0 on every rank, where the worker group has numbered the ranks of the node.
    """
    return {"RANK": str(rank()), "LOCAL_RANK": str(device.index or 0)}


def _adapters(planned: Adapter | None) -> dict[str, object]:
    """Return the arguments for the adapters of the model."""
    if planned is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min((r for r in ADAPTER_RANKS if r >= planned.rank), default=planned.rank),
        "lora_dtype": "auto",
        # Not the output layer: on a CPU vLLM cannot score a prompt with an adapter of it.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in planned.modules}),
    }


def _compiled_for(copies: _Copies, engine_args: Mapping[str, object]) -> dict[str, object]:
    """Return the argument that keeps compiled models of other copies apart.

    vLLM names a compiled model in its cache by the number of the rank, and the model has constants
    of the rank's part of the vocabulary. With other copies the same rank has another part.
    """
    if not copies:
        return {}
    given = engine_args.get("additional_config") or {}
    ranks = [list(copy) for copy in copies]
    return {"additional_config": {**cast("Mapping[str, object]", given), "copies": ranks}}


def _keep_weights_unpacked() -> None:
    """Let vLLM compute linear layers and experts on a CPU by torch, from the parameters themselves.

    Its other kernels repack a weight and drop the parameter. Then weights cannot be read back, and
    with tied embeddings the output head keeps a copy of the old weights. Also let its small
    functions run uncompiled, because compiling them takes longer than a short run.
    """
    import vllm._custom_ops
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"
    vllm._custom_ops._supports_onednn = False
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda self, layer: None
    experts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    cpu_moe.cpu_fused_moe = _experts_by_torch


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def _experts_by_torch(
    out: Tensor,
    inputs: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    act: str,
    isa: str,
    skip_weighted: bool = False,
) -> None:
    """Compute a layer of experts as vLLM's `cpu_fused_moe` does, into `out` [tokens, D]."""
    out.zero_()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        rows, choice = (topk_ids == expert).nonzero(as_tuple=True)
        both = F.linear(inputs[rows], w13[expert], None if w13_bias is None else w13_bias[expert])
        gate, up = both.chunk(2, -1)
        hidden = _ACTIVATIONS[act](gate) * up
        result = F.linear(hidden, w2[expert], None if w2_bias is None else w2_bias[expert])
        if not skip_weighted:
            result = result * topk_weights[rows, choice, None]
        out.index_add_(0, rows, result.to(out.dtype))


def _set_groups(copies: _Copies) -> None:
    """Let the ranks of `copies` hold a copy together, where vLLM would take neighbouring ranks, and
    communicate through their process group only.

    A segment of shared memory outlives a rank that is killed. On a CPU all engines of a machine
    would also use segments of the same name.
    """
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    global _order_of_ranks
    _order_of_ranks = [rank for copy in copies or () for rank in copy]
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
    original = parallel_state.init_model_parallel_group
    if isinstance(original, partial):
        return  # an earlier engine of this process
    parallel_state.init_model_parallel_group = partial(_group_of_ranks, original)


def _group_of_ranks(
    original: Callable[..., object], groups: list[list[int]], *args: object, **settings: object
) -> object:
    # With the copies (0, 2) and (1, 3), vLLM's group [0, 1] has the ranks 0 and 2.
    order = _order_of_ranks
    placed = [[order[rank] for rank in group] if order else group for group in groups]
    return original(placed, *args, **{**settings, "use_message_queue_broadcaster": False})


def _end(engine: LLMEngine) -> None:
    """End an engine. vLLM's own `shutdown` would also end the process group of the ranks."""
    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    _engines.discard(id(engine))
    del core, engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _leave_groups() -> None:
    """End vLLM's process groups, in a process that has no engine."""
    parallel_state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if parallel_state is None:
        return
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


# What vLLM changes in the process is undone outside its calls

VARIABLES: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `engine` sets the sampler of the first model runner
    # One token more than the window is requested, because `score` has to generate a token.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables that vLLM reads. A log level that the user has set is kept."""

_REPLACED: tuple[tuple[object, str], ...] = (
    (torch, "set_num_threads"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
)
_OF_CLASSES = "__bases__", "__init__", "__call__"
"""What vLLM replaces in a class of transformers that it has no model of its own for."""


class Isolation:
    """Remembers what vLLM changed, from one call to the next.

    vLLM is written for a process of its own. In the process of a rank the training engine runs too,
    so each call of vLLM is made within `inside`:

        what                        inside                          outside
        environment variables       those of `VARIABLES`, and       as before
                                    what vLLM set itself
        torch.set_num_threads,      vLLM's replacements, which      torch's
        torch.accelerator.*         do nothing (on a CPU)
        classes of transformers     compile what they compute       transformers'
        random states, threads      vLLM seeds them                 as before
        frozen garbage collection   vLLM freezes what it made       not frozen

    Args:
        classes: of transformers' model, which vLLM may take.
    """

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self._places = [*_REPLACED, *product(classes, _OF_CLASSES)]
        name = "VLLM_LOGGING_LEVEL"
        level = os.environ.get(name, VARIABLES[name])
        self._variables: dict[str, str | None] = {**VARIABLES, name: level}
        self._replaced: list[object] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within the block, vLLM's changes are in effect; afterwards they are undone."""
        environment, threads = dict(os.environ), torch.get_num_threads()
        replaced = [getattr(owner, name) for owner, name in self._places]
        python_random, numpy_random = random.getstate(), np.random.get_state()
        frozen = gc.get_freeze_count()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        _set_environment({**environment, **self._variables})
        self._replace(self._replaced or replaced)
        try:
            with torch.random.fork_rng(devices), warnings.catch_warnings():
                # vLLM looks at every attribute of torch, the deprecated ones included.
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                yield
        finally:
            self._replaced = [getattr(owner, name) for owner, name in self._places]
            self._variables = _difference(environment, os.environ)
            _set_environment(environment)
            self._replace(replaced)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            random.setstate(python_random)
            np.random.set_state(numpy_random)
            if gc.get_freeze_count() > frozen:
                gc.unfreeze()

    def _replace(self, values: Iterable[object]) -> None:
        for (owner, name), value in zip(self._places, values, strict=True):
            if getattr(owner, name) is not value:
                setattr(owner, name, value)


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ, with their value in `after`; None if it has none."""
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _set_environment(variables: Mapping[str, str | None]) -> None:
    """Make `os.environ` equal to `variables`. Only the variables that differ are written."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    for name, value in _difference(os.environ, wanted).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


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


def seed_from(seed: int, position: int) -> int:
    """Return the seed of a row whose first new token has this position in its response.

    A generator of vLLM begins anew with each call, so each call has a seed of its own.
    """
    return spread_seed(spread_seed(seed) + position) if position else spread_seed(seed)


def seed_of_call(seeds: Iterable[int]) -> int:
    """Return one seed for a call with rows of these seeds, in which every one of them counts."""
    mixed = 0
    for seed in seeds:
        mixed = spread_seed(mixed ^ seed)
    return mixed


def _set_sampler(engine: LLMEngine, mode: str, temperature: float) -> None:
    """Choose which log-probabilities the sampler returns, for requests from now on."""

    def compute_logprobs(logits: Tensor) -> Tensor:
        scaled = logits if temperature == 1 else logits.float() / temperature
        return scaled.log_softmax(dim=-1, dtype=torch.float32)

    sampler = engine.model_executor.driver_worker.model_runner.sampler
    sampler.logprobs_mode = mode
    sampler.topk_topp_sampler.logprobs_mode = mode
    sampler.compute_logprobs = compute_logprobs
