"""What runs in SGLang's scheduler process: reading its weights, and seeds on a CPU.

SGLang calls `answer` as a loader of weights (`custom_weight_loader`) with a question from
`weights.question`. A weight of a checkpoint is a parameter of SGLang, or a part of one:

    q_proj  [64, 64]                              the parameter has rows of padding for the
    k_proj  [32, 64]  → qkv_proj [128, 64]        vocabulary: embed_tokens [200, 64] → [256, 64]
    v_proj  [32, 64]    rows 0, 64, 96 on
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.files import atomic_write
from quadriga.rollout.base import tensor_digest

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameter of SGLang -> the weights of a checkpoint that are stacked in it along dimension 0."""
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def answer(model: torch.nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write dtype and digest of each weight that is asked for to the file of the question.

    With tensor parallelism each scheduler of SGLang is asked, and the answer of the last one is
    read. A divided weight has another shape in each of them, so none reports it.
    """
    question = json.loads(bytes(tensors[0][1].tolist()))
    file = Path(question["file"])
    try:
        shapes = {name: tuple(shape) for name, shape in question["shapes"].items()}
        parameters: dict[str, Tensor] = dict(model.named_buffers())
        parameters.update(model.named_parameters(remove_duplicate=False))
        held = {}
        for name in shapes:
            part = locate(parameters, name, shapes)
            if part is not None:
                held[name] = (str(part.dtype).removeprefix("torch."), str(tensor_digest(part)))
        content: dict[str, object] = {"held": held}
    except Exception as error:  # an exception would end the scheduler; the rank raises it
        content = {"error": f"{type(error).__name__}: {error}"}
    with atomic_write(file) as whole:
        whole.write(json.dumps(content).encode())


def locate(
    parameters: Mapping[str, Tensor], name: str, shapes: Mapping[str, tuple[int, ...]]
) -> Tensor | None:
    """Return the values of the weight `name` of a checkpoint; None if its place is not known."""
    if name in parameters:
        return _rows(parameters[name], 0, shapes[name], exact=True)
    for fused, parts in _FUSED.items():
        for part in parts:
            if f".{part}." in name:
                whole = parameters.get(name.replace(f".{part}.", f".{fused}."))
                siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
                if whole is None or not all(sibling in shapes for sibling in siblings):
                    return None
                rows = [shapes[sibling][0] for sibling in siblings]
                if sum(rows) != whole.shape[0]:
                    return None
                start = sum(rows[: parts.index(part)])
                return _rows(whole, start, shapes[name], exact=False)
    tied = _TIED.get(name)
    if tied is None or tied not in parameters:
        return None
    return locate(parameters, tied, {tied: shapes[name]})


def _rows(whole: Tensor, start: int, shape: tuple[int, ...], *, exact: bool) -> Tensor | None:
    """Return `shape[0]` rows from `start` on; None if the parameter has another shape.

    `exact`: the parameter holds this weight alone, perhaps with rows of padding behind it.
    """
    if tuple(whole.shape) == shape:
        return whole
    padded = exact and whole.ndim == 2 and whole.shape[0] > shape[0]
    if whole.ndim != len(shape) or whole.shape[1:] != shape[1:] or (exact and not padded):
        return None
    return whole[start : start + shape[0]]


# Seeds on a CPU. SGLang gives each sample a seed only in its deterministic inference, which also
# replaces kernels of the GPU and refuses to start on a CPU. Here the seeds are kept, and the
# kernels stay, so the response of a row can still depend on the other rows by rounding.


def allow_seeds() -> None:
    """Let deterministic inference start with the attention of torch."""
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def run_seeded(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler without kernels of the GPU."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.managers.scheduler import run_scheduler_process

    allow_seeds()
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None
    run_scheduler_process(*arguments, **named)
