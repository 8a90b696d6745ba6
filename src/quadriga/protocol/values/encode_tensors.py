"""Tensors as plain buffers; decode.py holds the inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.errors import FieldError
from quadriga.protocol.values import jagged
from quadriga.protocol.values.field_spec import CARRIER_OF_SIZE, NUMPY_KNOWS, FieldSpec, Payload


def encode_tensors(value: Any, key: str) -> tuple[FieldSpec, Payload, int]:
    """`(spec, payload, payload bytes)` of a dense or jagged tensor, or of a `TensorDict` of them.
    Payloads of CPU tensors share memory with `value` where its layout allows.

    Tensors travel detached, from CUDA through host memory. Raises `FieldError` naming `key` for
    sparse and quantized tensors, and for anything else.
    """
    if isinstance(value, torch.Tensor):
        return _freeze_jagged(value, key) if value.is_nested else _freeze_dense(value, key)
    if isinstance(value, TensorDictBase):
        return _freeze_tree(value, key)
    raise FieldError(
        f"field '{key}' is a {type(value).__name__}; what travels as a field is a tensor, "
        "an array, or a TensorDict of tensors",
        field=key,
    )


def _freeze_dense(value: torch.Tensor, key: str) -> tuple[FieldSpec, Payload, int]:
    if value.layout != torch.strided or value.is_quantized:
        raise FieldError(
            f"field '{key}' is a tensor of layout {value.layout}; dense and jagged tensors travel, "
            "so convert it first (to_dense)",
            field=key,
        )
    data = host_array(value)
    spec = FieldSpec("tensor", _name(value.dtype), data.shape[1:], value.device.type)
    return spec, data, int(data.nbytes)


def host_array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous numpy array with the bytes of a dense tensor; a view where possible."""
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.resolve_conj().resolve_neg().contiguous()
    if value.dtype not in NUMPY_KNOWS:
        value = value.view(CARRIER_OF_SIZE[value.element_size()])
    return value.numpy()


def _freeze_jagged(value: torch.Tensor, key: str) -> tuple[FieldSpec, Payload, int]:
    try:
        values, offsets = jagged.parts(value)
    except FieldError as error:
        raise FieldError(f"field '{key}': {error}", field=key) from None
    data, ends = host_array(values), host_array(offsets).astype(np.int64)
    spec = FieldSpec("jagged", _name(values.dtype), data.shape[1:], values.device.type)
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


def _freeze_tree(value: TensorDictBase, key: str) -> tuple[FieldSpec, Payload, int]:
    frozen = {str(k): encode_tensors(v, f"{key}.{k}") for k, v in value.items()}
    spec = FieldSpec(
        "tree",
        tail=tuple(value.batch_size[1:]),
        children=tuple((k, child) for k, (child, _, _) in frozen.items()),
    )
    payload = {k: child for k, (_, child, _) in frozen.items()}
    return spec, payload, sum(size for _, _, size in frozen.values())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
