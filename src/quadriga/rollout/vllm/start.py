"""From settings to a running vLLM engine in this process, and its end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from quadriga.config.schema import ModelConfig
from quadriga.errors import ConfigError, ModelError, RolloutError
from quadriga.models.adapters import Adapter, plan_adapter
from quadriga.models.folder import local_folder
from quadriga.models.limits import context_window
from quadriga.models.loading import model_without_weights
from quadriga.parallel.distributed import init_distributed, rank, world_size
from quadriga.rollout.vllm.options import (
    CPU_CACHE_MB,
    VLLM,
    VLLMOptions,
    check_ranks,
    engine_window,
    space_for_rank,
)
from quadriga.rollout.vllm.weights import EngineWeights, LoadedAdapter

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


_CPU_STEP_TOKENS = 4096

_engines_in_process = 0
"""How many engines of this process share vLLM's process groups."""

_order_of_ranks: list[int] = []
"""The ranks of all copies, one copy after another; empty: in the order of their numbers."""


_Copies = Sequence[tuple[int, ...]] | None
"""The ranks that hold each copy together, in ascending order; None: neighbours."""


class RunningEngine:
    """vLLM's engine and what is known of its model. `inside` is that of `Isolation`.

    Attributes:
        engine: vLLM's engine.
        weights: its parameters by checkpoint name.
        adapter: the adapter beside them; None: the model has none.
        window: the most tokens of prompt and response together.
        vocabulary: token ids are below this number.

    Raises:
        ModelError: vLLM does not support the model, or the place of a weight is not known.
        ConfigError: the options do not fit the model or the device.
        RolloutError: vLLM did not start.
    """

    def __init__(
        self,
        rollout: VLLM,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        inside: Callable[[], AbstractContextManager[None]],
        *,
        releasable: bool,
        copies: _Copies,
    ) -> None:
        folder, options = local_folder(model.path), rollout.options
        reference = model_without_weights(
            folder,
            value_head=False,
            dtype=dtype,
            trust_remote_code=model.trust_remote_code,
        )
        self.window = engine_window(options, model.path, context_window(reference.config))
        self.vocabulary: int = reference.config.get_text_config().vocab_size
        self.adapter: LoadedAdapter | None = None
        self._owns_group = not dist.is_initialized()
        init_distributed(device.type)
        planned = plan_adapter(reference, model.lora) if model.lora.enabled else None
        check_ranks(options, world_size())
        arguments: dict[str, object] = {
            "model": str(folder),
            "trust_remote_code": model.trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            # `score` generates one token behind the window, whose log-probability is not used.
            "max_model_len": self.window + 1,
            "max_num_seqs": rollout.settings.micro_batch_size,
            "enable_sleep_mode": releasable and device.type != "cpu",
            **_adapters(planned),
        }
        try:
            with inside():
                self.engine = _start(options, device, copies, arguments)
                _joined(+1)
                group = _copy_group(options.tensor_parallel_size)
                if planned is not None:
                    self.adapter = LoadedAdapter(self.engine, planned)
                adapters = self.adapter.places() if self.adapter is not None else {}
                self.weights = EngineWeights(self.model(), reference, model.path, group, adapters)
                self.weights.check_files(folder)
        except BaseException:
            with inside():
                self.close()
            raise

    def model(self) -> torch.nn.Module:
        """Return vLLM's model on this rank."""
        model: torch.nn.Module = self.engine.model_executor.driver_worker.get_model()
        return model

    def close(self) -> None:
        """End the engine and leave every process group that it made."""
        engine: LLMEngine | None = getattr(self, "engine", None)
        if engine is not None:
            del self.engine
            self.__dict__.pop("weights", None)
            _end(engine)
        if self._owns_group and dist.is_initialized() and not _engines_in_process:
            dist.destroy_process_group()


def _copy_group(size: int) -> dist.ProcessGroup | None:
    """Return the ranks that hold one copy of the weights together; None: this rank alone."""
    if size == 1:
        return None
    from vllm.distributed import parallel_state

    coordinator = parallel_state.get_tp_group()
    group: dist.ProcessGroup = coordinator.device_group
    return group


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
        os.environ["RANK"] = str(rank())
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
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
    return engine


def _adapters(planned: Adapter | None) -> dict[str, object]:
    """Return the arguments for the adapters of the model."""
    if planned is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": space_for_rank(planned.rank),
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
    """Let vLLM compute linear layers on a CPU by torch, from the parameters themselves.

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
    from vllm.distributed import parallel_state

    core = engine.engine_core.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    del core, engine
    if _joined(-1) == 0:
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _joined(change: int) -> int:
    """Count an engine of this process and return how many there are."""
    global _engines_in_process
    _engines_in_process += change
    return _engines_in_process
