"""Which kernel computes which call of attention.

- `sdpa`: every call on every device. On accelerators it computes a shared prompt in each of its
  rows, because its fastest kernel takes no mask.
- `varlen`: one launch for all rows, prompts once. CUDA, 16 bits, plain or window.
- `flex`: capped scores, sinks, chunks and float32 too; prompts once. CUDA, compiled.

A kernel is compared with `sdpa` on the device on which it will run, before the first step. Kernels
differ between devices and versions of libraries: in the end of rows at which queries and keys are
aligned, in the tokens that a window counts, in the dtypes that they round to. A difference would
change every log-probability without an error.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from quadriga.config.schema import AttentionName
from quadriga.engines.attention.kernels import (
    AttentionCall,
    AttentionRows,
    Kernel,
    KernelOf,
    LocalMask,
    Scoring,
    attend,
    sdpa_only,
)
from quadriga.errors import ConfigError
from quadriga.parallel.attention_blocks import PackedRows
from quadriga.parallel.model_ranks import ModelRanks, Subgroup
from quadriga.parallel.packing import pack_rows

FASTEST_FIRST: tuple[Kernel, ...] = ("varlen", "flex", "sdpa")

CAPABILITY = (8, 0)
"""The first CUDA compute capability (Ampere) for which the flash kernel and bfloat16 exist."""

MAX_SIZE = 256
"""The largest head size of the flash kernel."""

MIN_FLEX_SIZE = 16
"""The smallest head size of the compiled flex kernel."""

_log = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)


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


def kernels_of(
    calls: Callable[[], Collection[AttentionCall]],
    setting: AttentionName,
    device: torch.device,
    device_type: str,
) -> KernelOf:
    """Return the kernel of each call of a model.

    Args:
        calls: returns the calls that the model makes.
        device_type: for a model on the meta device, the type of device that it stands for.

    Raises:
        ConfigError: `setting` names a kernel that cannot compute one of the calls.
    """
    if setting == "sdpa" or (setting == "auto" and device_type != "cuda"):
        return sdpa_only
    on_cuda = device.type == "cuda"
    chosen = choose_kernels(
        calls(),
        setting,
        device_type=device_type,
        capability=torch.cuda.get_device_capability(device) if on_cuda else CAPABILITY,
        # Without a device there is nothing to run a kernel on.
        check=partial(kernel_problem, device=device) if on_cuda else lambda kernel, call: None,
    )
    return lambda call: chosen.get(call, "sdpa")


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


TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4, torch.float64: 1e-9}
"""The largest difference of two kernels, relative to the largest number: several times the rounding
of the dtype. Another alignment or window gives differences of about 1."""

_RESULTS = ("outputs", "queries", "keys", "values", "sinks")

_LENGTHS = ((150, 3), (150, 140), (150, 1), (2, 4), (1, 9))  # (prompt, response) of each row
_LOCAL = 7  # tokens of a window or a chunk


def kernel_problem(kernel: Kernel, call: AttentionCall, device: torch.device) -> str | None:
    """Return why `kernel` is wrong on this device, in outputs or gradients; None: it is right."""
    if kernel == "sdpa":
        return None
    expected = _compute(sdpa_only, call, device, wide=True)
    try:
        found = _compute(lambda _: kernel, call, device, wide=False)
    except RuntimeError as error:  # no such kernel in this build, or it cannot be compiled
        return f"it fails on this device: {type(error).__name__}: {str(error)[:200]}"
    for name, a, b in zip(_RESULTS, found, expected, strict=False):  # sinks are not always there
        difference = float((a.float() - b.float()).abs().max() / b.float().abs().max())
        if not difference <= TOLERANCES[call.dtype]:  # NaN is a problem
            what = name if name == "outputs" else f"gradients of {name}"
            return f"its {what} differ by {difference:.2g} of the largest one on this device"
    return None


def _compute(
    kernel_of: KernelOf, call: AttentionCall, device: torch.device, *, wide: bool
) -> list[Tensor]:
    """Return the outputs and the gradients of an example. `wide`: in float32 at least."""
    dtype = torch.promote_types(call.dtype, torch.float32) if wide else call.dtype
    packed = _rows()
    # The first of two ranks of context parallelism has half of the queries, but all keys.
    ranks = ModelRanks(context=Subgroup(size=2)) if call.part else ModelRanks()
    rows = AttentionRows(packed, device, kernel_of, split=True, ranks=ranks)
    tokens = len(packed.row)
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        # Rounded to the dtype of the call, so that both kernels read the same numbers.
        values = torch.randn(*shape, generator=random).to(call.dtype)
        return values.to(device, dtype).requires_grad_()

    queries = tokens if rows.queries is None else len(rows.queries)
    query = numbers(queries, call.heads, call.size)
    key = numbers(tokens, call.key_heads, call.size)
    value = numbers(tokens, call.key_heads, call.value_size)
    sinks = numbers(call.heads) if call.sinks else None
    weights = numbers(queries, call.heads, call.value_size).detach()
    with torch.enable_grad():
        scoring = Scoring(_mask(call, device), softcap=2.0 if call.softcap else None, sinks=sinks)
        out = attend(query, key, value, rows, scoring)
        trained = [query, key, value, *([] if sinks is None else [sinks])]
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), trained)]


def _mask(call: AttentionCall, device: torch.device) -> LocalMask | None:
    if call.mask == "causal":
        return None
    if call.mask == "window":
        return LocalMask(sliding_window_causal_mask_function(_LOCAL), _LOCAL)
    no_padding = torch.zeros(1, dtype=torch.int64, device=device)
    return LocalMask(chunked_causal_mask_function(_LOCAL, no_padding), _LOCAL)


def _rows() -> PackedRows:
    """Return rows of which the first three share their prompt."""
    width = tuple(max(sizes) for sizes in zip(*_LENGTHS, strict=True))
    ids = torch.zeros(len(_LENGTHS), sum(width), dtype=torch.int64)
    attention, targets = torch.zeros_like(ids), torch.zeros_like(ids[:, width[0] :])
    for row, (prompt, response) in enumerate(_LENGTHS):
        attention[row, width[0] - prompt : width[0] + response] = 1
        targets[row, :response] = 1
    return pack_rows(ids, attention, targets).rows
