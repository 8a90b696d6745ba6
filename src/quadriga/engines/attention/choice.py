"""Which kernel computes which call of attention.

- `sdpa` (`blocks.py`): every call on every device. On accelerators it computes a shared prompt in
  each of its rows, because its fastest kernel takes no mask.
- `varlen` (`varlen.py`): one launch for all rows, prompts once. CUDA, 16 bits, plain or window.
- `flex` (`flex.py`): capped scores, sinks, chunks and float32 too; prompts once. CUDA, compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadriga.config.schema import AttentionName
from quadriga.engines.attention.masks import LocalMask, MaskKind
from quadriga.errors import ConfigError

Kernel = Literal["sdpa", "varlen", "flex"]

FASTEST_FIRST: tuple[Kernel, ...] = ("varlen", "flex", "sdpa")

CAPABILITY = (8, 0)
"""The first CUDA compute capability (Ampere) for which the flash kernel and bfloat16 exist."""

MAX_SIZE = 256
"""The largest head size of the flash kernel."""

MIN_FLEX_SIZE = 16
"""The smallest head size of the compiled flex kernel."""

_log = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCall:
    """What a call computes, as far as a kernel may not support it.

    Attributes:
        dtype: of queries, keys and values.
        heads, key_heads: of queries, of keys and values.
        size, value_size: elements of a query or key, and of a value, in one head.
        mask: the kind of mask.
        softcap: whether scores are capped.
        sinks: whether there are attention sinks.
        part: whether the queries are a part of the tokens (context parallelism).
    """

    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    value_size: int
    mask: MaskKind = "causal"
    softcap: bool = False
    sinks: bool = False
    part: bool = False

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: LocalMask | None,
        softcap: float | None,
        sinks: Tensor | None,
        *,
        part: bool = False,
    ) -> AttentionCall:
        """Describe the call with these arguments ([1, H, N, D] three times)."""
        return AttentionCall(
            dtype=query.dtype,
            heads=query.shape[1],
            key_heads=key.shape[1],
            size=query.shape[-1],
            value_size=value.shape[-1],
            mask="causal" if mask is None else mask.kind,
            softcap=softcap is not None,
            sinks=sinks is not None,
            part=part,
        )


KernelOf = Callable[[AttentionCall], Kernel]


def sdpa_only(call: AttentionCall) -> Kernel:
    """Compute every call by `sdpa`."""
    return "sdpa"


def unsupported(
    kernel: Kernel, call: AttentionCall, device_type: str, capability: tuple[int, int]
) -> str | None:
    """Return why `kernel` cannot compute `call` exactly on a device; None: it can.

    Args:
        capability: of a CUDA device.
    """
    if kernel == "sdpa":
        return None
    if device_type != "cuda":
        return f"it needs a CUDA device, and the device of this role is {device_type!r}"
    if capability < CAPABILITY:
        return f"it needs compute capability {_dotted(CAPABILITY)}, got {_dotted(capability)}"
    dtypes = _HALF if kernel == "varlen" else (*_HALF, torch.float32)
    if call.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it computes {names}, and attention is in {str(call.dtype).removeprefix('torch.')}"
    if kernel == "flex":
        return _unsupported_by_flex(call)
    if max(call.size, call.value_size) > MAX_SIZE:
        return f"it computes heads of at most {MAX_SIZE} elements, this model has {call.size}"
    if call.softcap or call.sinks:
        return f"it cannot compute {'capped scores' if call.softcap else 'attention sinks'}"
    if call.mask not in ("causal", "window"):
        return "it computes causal attention with or without a window; this model has another mask"
    return None


def _unsupported_by_flex(call: AttentionCall) -> str | None:
    size = min(call.size, call.value_size)
    if size < MIN_FLEX_SIZE:
        return f"it computes heads of at least {MIN_FLEX_SIZE} elements, this model has {size}"
    if call.mask == "other":
        return "it computes causal attention, windows and chunks; this model has another mask"
    if call.part:
        return (
            "its queries and keys are the same tokens, and context parallelism splits the queries"
        )
    return None


def choose_kernels(
    calls: Collection[AttentionCall],
    setting: AttentionName,
    *,
    device_type: str,
    capability: tuple[int, int],
    check: Callable[[Kernel, AttentionCall], str | None],
) -> Mapping[AttentionCall, Kernel]:
    """Choose a kernel for each call of a model.

    Args:
        setting: "auto" is the fastest kernel that is exact. A kernel's name is this kernel.
        check: returns why a kernel gives wrong numbers on this device; None: it does not. It runs
            the kernel.

    Raises:
        ConfigError: `setting` names a kernel that cannot compute one of the calls.
    """
    chosen: dict[AttentionCall, Kernel] = {}
    for call in calls:
        for kernel in FASTEST_FIRST if setting == "auto" else (setting,):
            refused = unsupported(kernel, call, device_type, capability)
            problem = refused or check(kernel, call)
            if problem is None:
                chosen[call] = kernel
                break
            if refused is None:
                _log.warning("the attention kernel %s is not used: %s", kernel, problem)
            if kernel == setting:
                raise ConfigError(
                    f"engine.attention={setting} cannot compute this model: {problem}; set it to "
                    "auto or sdpa"
                )
    return chosen


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
