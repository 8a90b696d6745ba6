"""The modules that replace Megatron-core's: a norm, and attention over packed rows.

Shapes: N packed tokens of the context-parallel rank, H heads and G key heads of this rank, D head
size.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import sliding_window_causal_mask_function

from quadriga.engines.attention.masks import LocalMask
from quadriga.engines.attention.packed import AttentionRows, packed_attention
from quadriga.engines.megatron.families import Family, expert_count, windows

if not hasattr(moe_utils, "te_general_gemm"):
    # Version 0.16.1 asks whether it is None, and does not define it without Transformer Engine.
    moe_utils.te_general_gemm = None


class RowsInFlight:
    """The rows of the last micro-batches, by number.

    Layers receive the number as a tensor in place of an attention mask, because Megatron-core
    keeps tensors only for activations that are computed again.

    Args:
        kept: micro-batches whose layers can be computed again before the backward pass of the first
            of them.
    """

    def __init__(self, kept: int = 1) -> None:
        self._kept = kept
        self._numbers = count()
        self._rows: dict[int, AttentionRows] = {}

    def add(self, rows: AttentionRows) -> Tensor:
        """Keep the rows of a micro-batch, and return their number, on the CPU."""
        kept = self._kept if torch.is_grad_enabled() else 1
        for number in list(self._rows)[: max(0, len(self._rows) + 1 - kept)]:
            del self._rows[number]
        number = next(self._numbers)
        self._rows[number] = rows
        return torch.tensor(number)

    def of(self, number: Tensor) -> AttentionRows:
        """Return the rows with this number."""
        return self._rows[int(number)]

    def clear(self) -> None:
        """Drop all rows, after a step."""
        self._rows.clear()


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · weight, computed in float32 (arXiv 1910.07467).

    Megatron-core's own needs Transformer Engine or Apex for sequence parallelism.
    """

    def __init__(self, config: object, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=getattr(config, "params_dtype", None))
        )
        self.eps = eps
        # Each rank has seen its part of the tokens only, so gradients are summed over ranks.
        self.weight.sequence_parallel = (  # type: ignore[attr-defined]  # read by Megatron-core
            getattr(config, "sequence_parallel", False)
        )

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.itemsize < 4 else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedAttention(nn.Module):
    """The attention of a layer over packed rows, by the kernels of the FSDP engine."""

    def __init__(
        self,
        in_flight: RowsInFlight,
        of_layers: list[int | None],
        *,
        layer_number: int,
        **_: object,
    ) -> None:
        super().__init__()
        self.in_flight = in_flight
        window = of_layers[layer_number - 1]
        self.mask: LocalMask | None = None
        if window is not None:
            self.mask = LocalMask(sliding_window_causal_mask_function(window), window)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object
    ) -> Tensor:
        """Attend: [N, 1, H, D], twice [N, 1, G, D] -> [N, 1, H · D].

        Args:
            attention_mask: the number of the rows; see `RowsInFlight`.
        """
        rows = self.in_flight.of(attention_mask)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = packed_attention(self, q, k, v, self.mask, attention_rows=rows)[0]
        return out[0].flatten(1)[:, None]  # [1, N, H, D] -> [N, 1, H · D]


def block_parts(
    config: PreTrainedConfig, family: Family, in_flight: RowsInFlight, layers: int
) -> object:
    """Return what Megatron-core builds the layers of a stage from.

    Args:
        layers: of the stage.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=expert_count(config) or None,
        qk_layernorm=family.qk_norm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = partial(PackedAttention, in_flight, windows(config))
    if family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)
