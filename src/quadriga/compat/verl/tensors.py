"""verl's functions on tensors: masked statistics, padding, sizes of models, tensors as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quadriga import protocol
from quadriga.algorithms import tensors
from quadriga.algorithms.tensors import masked_var, masked_whiten
from quadriga.compat.verl.controller.decorator import DataProtoFuture
from quadriga.compat.verl.controller.references import is_reference
from quadriga.compat.verl.tensordicts import chunk_tensordict, concat_tensordict
from quadriga.errors import FieldError, InputError, LengthError
from quadriga.models import log_probs
from quadriga.models.log_probs import entropy_from_logits
from quadriga.protocol.tensordicts import TensorDict

if TYPE_CHECKING:
    from torch.nn import Module

__all__ = ["entropy_from_logits", "masked_var", "masked_whiten"]

# verl.utils.torch_functional


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the selected values over `axis`; None: over all positions."""
    return tensors.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the selected values over `axis`; 0 where the mask selects nothing."""
    return tensors.masked_mean(values, mask, axis)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Return `x` between two tensors that broadcast to it."""
    return x.clamp(min=tensor_min, max=tensor_max)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return log softmax(logits)[labels]; [..., V] and [...] give [...].

    `inplace_backward` is ignored: the backward pass never writes into the logits.
    """
    return log_probs.log_probs_from_logits(logits, labels)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return 1 for each token up to the first end token, and for that token; [B, R]."""
    ends = torch.as_tensor(eos_token, device=response_id.device).view(-1)
    is_end_BR = torch.isin(response_id, ends).int()
    # Ends to the left of each position: 0 0 1 0 1 → 0 0 0 1 1, so the mask is 1 1 1 0 0.
    before_BR = is_end_BR.cumsum(1) - is_end_BR
    return (before_BR == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Return the rows with at least `max_seq_len` columns, filled with `pad_token_id`."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return torch.nn.functional.pad(
        tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id
    )


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> Tensor:
    """Return lists of numbers as one tensor, filled on the right to the longest of them, or to
    `max_length` if that is longer."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response])


# verl.utils.model


class RatioError(InputError, AssertionError):
    """The ratios of a random mask do not fit into a row. verl asserts the same."""


class UnsupportedScaleError(InputError, NotImplementedError):
    """A number of parameters has no such unit. verl raises NotImplementedError."""


_SCALES = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Return an attention mask [B, T] int64: left padding, tokens, right padding in each row.

    The numbers are drawn uniformly with torch's generator: 0 to `max_ratio_of_left_padding · T` of
    left padding, and at least 1 token between the two ratios of valid tokens. Raises `RatioError`
    for ratios that do not fit into a row.
    """
    rows, length = input_ids.shape
    most = int(length * max_ratio_of_valid_token)
    least = max(1, int(length * min_ratio_of_valid_token))
    padding = int(length * max_ratio_of_left_padding)
    if not 1 <= least <= most or padding < 0 or most + padding > length:
        raise RatioError(
            f"create_random_mask: {least} to {most} tokens and up to {padding} tokens of left "
            f"padding do not fit into rows of {length}; use smaller ratios"
        )
    start_B = torch.randint(0, padding + 1, (rows, 1), device=input_ids.device)
    count_B = torch.randint(least, most + 1, (rows, 1), device=input_ids.device)
    position_T = torch.arange(length, device=input_ids.device)
    return ((position_T >= start_B) & (position_T < start_B + count_B)).long()


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among the tokens of its row, 0 for left padding.

    `mask`: [B, T]. A position to the right of the last token keeps the position of that token.
    """
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def get_model_size(model: Module, scale: str = "auto") -> tuple[float, str]:
    """Return (number of parameters, unit): (0.6, "B"). `scale`: "B", "M", "K", "" or "auto"."""
    total = sum(parameter.numel() for parameter in model.parameters())
    if scale == "auto":
        scale = next((name for name, size in _SCALES.items() if total > size), "")
    if scale not in _SCALES:
        raise UnsupportedScaleError(
            f"get_model_size: scale must be 'auto' or one of {list(_SCALES)}, got {scale!r}"
        )
    return total / _SCALES[scale], scale


# verl.protocol: tensors as bytes, and a wrapper of all kinds of batches. Quadriga does not use
# them: it sends tensors as handles and out-of-band buffers.

TensorBytes: TypeAlias = tuple[str, Sequence[int], NDArray[np.uint8]]
"""(name of the dtype, shape, bytes)."""
TableBytes: TypeAlias = tuple[tuple[int, ...], str | None, Mapping[str, Any]]
"""(batch size, device, key → `TensorBytes`, or (layout, one `TensorBytes` per row) if nested)."""


def serialize_single_tensor(obj: Tensor) -> TensorBytes:
    """Return dtype, shape and bytes of a tensor on the CPU."""
    # `flatten` gives a tensor without dimensions one, which `view` needs.
    data: NDArray[np.uint8] = obj.detach().contiguous().flatten().view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data


def deserialize_single_tensor(arr: TensorBytes) -> Tensor:
    """Return the tensor of `serialize_single_tensor`, in memory of its own.

    Raises `FieldError` for a dtype that torch does not have.
    """
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FieldError(f"expected the name of a dtype of torch, such as 'float32', got {name!r}")
    if not len(data):
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(*shape)


def serialize_tensordict(batch: TensorDict) -> TableBytes:
    """Return batch size, device and the bytes of each tensor, row by row for a nested one."""
    items: dict[str, object] = {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise FieldError(f"field {key!r}: expected a tensor, got {type(value).__name__}")
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            items[key] = layout, [serialize_single_tensor(row) for row in value.unbind()]
        else:
            items[key] = serialize_single_tensor(value)
    return tuple(batch.batch_size), str(batch.device) if batch.device else None, items


def deserialize_tensordict(arr: TableBytes) -> TensorDict:
    """Return the TensorDict of `serialize_tensordict`."""
    size, device, items = arr
    tensors: dict[str, Any] = {}
    for key, item in items.items():
        if len(item) == 2:
            layout, rows = item
            tensors[key] = torch.nested.as_nested_tensor(
                [deserialize_single_tensor(row) for row in rows], layout=getattr(torch, layout)
            )
        else:
            tensors[key] = deserialize_single_tensor(item)
    return TensorDict(tensors, batch_size=list(size), device=device)


class BatchData:
    """A batch of any kind, or a list of batches: `chunk` splits one, `concat` joins several.

    A batch is a `DataProto`, a `DataProtoFuture`, a `TensorDict` or, in a list, a reference of Ray.
    """

    _KINDS = (protocol.DataProto, protocol.DataProtoFuture, TensorDict)

    def __init__(self, data: Any) -> None:  # a value of any kind, which the questions are about
        self._data = data

    def is_chunkable(self) -> bool:
        """Return whether `chunk` can split the value."""
        return isinstance(self._data, self._KINDS)

    def is_concatable(self) -> bool:
        """Return whether `concat` can join the list."""
        data = self._data
        if not isinstance(data, list | tuple) or not data:
            return False
        return isinstance(data[0], self._KINDS) or is_reference(data[0])

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Return the parts of the batch, of its own type. Raises `FieldError` for another value."""
        if isinstance(self._data, TensorDict):
            return tuple(chunk_tensordict(self._data, chunks))
        if not self.is_chunkable():
            raise FieldError(f"expected a batch to split, got {type(self._data).__name__}")
        return list(self._data.chunk(chunks))

    def concat(self) -> Any:
        """Return the joined batch. Raises `LengthError` for an empty list, `FieldError` for one of
        other values."""
        data = self._data
        if not data:
            raise LengthError("expected at least one batch to join, got an empty list")
        if not self.is_concatable():
            raise FieldError(f"expected a list of batches to join, got {type(data[0]).__name__}")
        if isinstance(data[0], TensorDict):
            return concat_tensordict(list(data))
        if is_reference(data[0]) or isinstance(data[0], protocol.DataProtoFuture):
            return DataProtoFuture.concat(list(data))
        return protocol.DataProto.concat(list(data))
