"""The experts that vLLM chooses for each token (`rollout.replay_routes`).

vLLM's own option, `enable_return_routed_experts`, needs its second model runner, which has no CPU
and whose sampler `engine` does not set. Here its recorder of one step is bound to the first runner:

    routers of the layers ─► experts of the step's tokens ─► place of each token's keys and values

Keys and values that another request finds in the prefix cache have their experts with them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.models.routes import Routers


class RecordedRoutes:
    """The experts of all tokens whose keys and values are in the cache of a vLLM engine.

    Args:
        runner: vLLM's model runner. Its `execute_model` is wrapped.
        routers: of the model, which may be without weights.

    Raises:
        ModelError: no layer of the model attends to all tokens, so vLLM frees the places of the
            first tokens while a response is generated.
    """

    def __init__(self, runner: Any, routers: Routers) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = runner.kv_cache_config.kv_cache_groups
        kinds = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups]
        if not any(kinds):
            raise ModelError(
                "vLLM keeps no place for every token of a model without full attention; set "
                "actor_rollout_ref.rollout.replay_routes=false, or name=hf"
            )
        self._runner, self._routers = runner, routers
        self._step = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.get_model(), self._step)
        self._table = runner.input_batch.block_table[kinds.index(True)]
        blocks = (
            runner.kv_cache_config.num_blocks * groups[kinds.index(True)].kv_cache_spec.block_size
        )
        self._places = torch.zeros(blocks, *self._step.shape_per_token, dtype=torch.int16)
        runner.execute_model = partial(self._execute, runner.execute_model)

    def _execute(self, execute: Any, scheduled: Any, *args: Any, **named: Any) -> Any:
        result = execute(scheduled, *args, **named)
        count = scheduled.total_num_scheduled_tokens
        slots = self._table.slot_mapping.gpu[:count].cpu()
        self._places[slots] = self._step.device_buffer[:count].cpu().to(self._places.dtype)
        return result

    def of(self, request: str, tokens: int) -> Tensor:
        """Return the experts of the first tokens of a request, [tokens, L, K] of `Routers.dtype`.

        Call it before the next step of vLLM, which gives the row of the request to another one.
        """
        batch, table = self._runner.input_batch, self._table
        # vLLM adds random characters to the name of a request.
        row = next(n for name, n in batch.req_id_to_index.items() if name.startswith(f"{request}-"))
        size = table.block_size
        blocks = torch.from_numpy(table.get_numpy_array()[row]).long()
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:tokens]
        return self._routers.of_decoder_layers(self._places[slots])
