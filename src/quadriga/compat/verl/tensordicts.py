"""verl's helpers for TensorDicts that also hold jagged tensors and other objects.

Objects of a row are kept in a `NonTensorStack`, objects of the whole batch in a `NonTensorData`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol import DataProto, union_tensor_dict
from quadriga.protocol.values import jagged
from quadriga.protocol.values.row_selection import RowOp, from_index, from_slice

_NON_TENSOR = (NonTensorData, NonTensorStack)


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: Any) -> None:
    """Store one object for the whole batch."""
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: list[Any]) -> None:
    """Store one object a row, lists and dicts included."""
    tensor_dict[key] = NonTensorStack(*[NonTensorData(item) for item in val])


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> None:
    """Store lists one object a row, anything else for the whole batch."""
    for key, value in kwargs.items():
        if isinstance(value, _NON_TENSOR):
            tensor_dict[key] = value
        elif isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)


def unwrap_non_tensor_data(data: Any) -> Any:
    """The object itself."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: Any) -> Any:
    """One object of the batch, or `default`."""
    return unwrap_non_tensor_data(data.get(key, default))


def nested_tensor_from_tensor_list(
    tensors: Sequence[torch.Tensor], ragged_idx: int | None = None
) -> torch.Tensor:
    """A jagged tensor of these rows. Their lengths may differ in dimension `ragged_idx` - 1,
    the last one by default."""
    if not tensors:
        raise LengthError("A jagged tensor needs at least one row.")
    dims = tensors[0].dim()
    ragged = dims if ragged_idx is None else ragged_idx
    if not 1 <= ragged <= dims:
        raise FieldError(f"ragged_idx must lie in 1..{dims}, got {ragged}.")
    if ragged == 1:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
    lengths = torch.tensor([row.shape[ragged - 1] for row in tensors])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.cat(list(tensors), dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets.to(values.device), jagged_dim=ragged
    )


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all, one after the other."""
    return jagged.concat(tensors)


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """Batches without a batch dimension are settings: the first one's count."""
    return data[0]


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Rows of all; jagged fields and objects included. Objects of a whole batch: the first's."""
    if not data:
        raise LengthError("concat_tensordict needs at least one TensorDict.")
    first = data[0]
    if not first.batch_size:
        return concat_tensordict_with_none_bsz(data)
    keys = set(first.keys())
    for other in data[1:]:
        if set(other.keys()) != keys:
            raise FieldError(
                f"TensorDicts to be joined must have the same keys: {sorted(keys)} and "
                f"{sorted(other.keys())}."
            )
    joined = {key: _concat([part.get(key) for part in data]) for key in _keys(first)}
    return _made(joined, sum(len(part) for part in data))


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Equal parts by rows. Raises LengthError if the rows do not divide."""
    if len(td) % chunks:
        raise LengthError(f"{len(td)} rows do not divide into {chunks} parts.")
    size = len(td) // chunks
    return [_rows(td, slice(i * size, (i + 1) * size)) for i in range(chunks)]


def index_select_tensor_dict(
    batch: TensorDict | None, indices: torch.Tensor | Sequence[int]
) -> TensorDict | None:
    """The chosen rows, in that order."""
    return None if batch is None else _rows(batch, torch.as_tensor(indices))


def get_tensordict(
    tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """Tensors, lists with one object a row, and objects of the whole batch, as one TensorDict.

    Raises LengthError if their lengths differ.
    """
    fields: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for key, value in tensor_dict.items():
        lengths[key] = value.shape[0] if isinstance(value, torch.Tensor) else len(value)
        if isinstance(value, torch.Tensor | NonTensorStack):
            fields[key] = value
        else:
            fields[key] = NonTensorStack(*[NonTensorData(item) for item in value])
    if len(set(lengths.values())) > 1:
        raise LengthError(f"Fields of one TensorDict must be of one length, got {lengths}.")
    rows = next(iter(lengths.values()), None)
    fields.update({key: NonTensorData(value) for key, value in (non_tensor_dict or {}).items()})
    return _made(fields, rows)


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of rows, epoch by epoch, shuffled if `dataloader_kwargs` say so."""
    data = DataProto.from_tensordict(tensordict)
    for part in data.make_iterator(mini_batch_size, epochs, seed, dict(dataloader_kwargs or {})):
        yield part.to_tensordict()


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raises ConflictError naming the first field that differs."""
    if set(tensordict1.keys()) != set(tensordict2.keys()):
        raise ConflictError(
            f"The keys differ: {sorted(tensordict1.keys())} and {sorted(tensordict2.keys())}."
        )
    for key in _keys(tensordict1):
        if not _equal(tensordict1.get(key), tensordict2.get(key)):
            raise ConflictError(f"The field {key!r} differs.", field=key)


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """A tensor as it is, one object a row as a list, an object of the batch as itself."""
    if key not in _keys(tensordict):
        return default
    value = tensordict.get(key)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return unwrap_non_tensor_data(value)


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Some fields, as a TensorDict. Raises FieldError for one that is missing."""
    chosen = {key: _field(tensordict, key) for key in keys}
    return _made(chosen, len(tensordict) if tensordict.batch_size else None)


def pop(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, and the field is gone."""
    value = get(tensordict, key, default)
    if key in _keys(tensordict):
        del tensordict[key]
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """As `get_keys`, and the fields are gone."""
    chosen = list(keys)
    taken = get_keys(tensordict, chosen)
    for key in chosen:
        del tensordict[key]
    return taken


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Filled up with its own first rows until `size_divisor` divides it; how many were added."""
    pad = -len(data) % size_divisor
    if not pad:
        return data, 0
    rows = [*range(len(data)), *(i % len(data) for i in range(pad))]
    return _rows(data, torch.tensor(rows)), pad


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Without the last `pad_size` rows."""
    return _rows(data, slice(0, len(data) - pad_size)) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """Every tensor contiguous, jagged ones included."""
    fields = {
        key: value.contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in ((key, data.get(key)) for key in _keys(data))
    }
    return _made(fields, len(data) if data.batch_size else None)


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> TensorDict:
    """One row a dict. Tensors of one shape are stacked, of different lengths made jagged."""
    fields: dict[str, Any] = {}
    for key in list_of_dicts[0]:
        values = [row[key] for row in list_of_dicts]
        if not all(isinstance(value, torch.Tensor) for value in values):
            fields[key] = values
        elif len({value.shape for value in values}) == 1:
            fields[key] = torch.stack(values)
        else:
            fields[key] = nested_tensor_from_tensor_list(values, ragged_idx=1)
    return get_tensordict(fields)


def _keys(td: TensorDict) -> list[str]:
    """Its keys; iterating over a TensorDict itself gives rows."""
    return [str(key) for key in td.keys()]  # noqa: SIM118


def _made(fields: Mapping[str, Any], rows: int | None) -> TensorDict:
    made = TensorDict({}, batch_size=[] if rows is None else [rows])
    for key, value in fields.items():
        made[key] = value
    return made


def _field(tensordict: TensorDict, key: str) -> Any:
    if key not in _keys(tensordict):
        raise FieldError(f"No field {key!r}; there are {sorted(tensordict.keys())}.", field=key)
    return tensordict.get(key)


def _rows(td: TensorDict, index: slice | torch.Tensor) -> TensorDict:
    rows = len(td)
    op: RowOp = from_slice(index, rows) if isinstance(index, slice) else from_index(index, rows)
    fields: dict[str, Any] = {}
    for key in _keys(td):
        value = td.get(key)
        if jagged.is_jagged(value):
            fields[key] = jagged.take(value, op)
        elif isinstance(value, NonTensorStack):
            items = value.tolist()
            numbers = range(rows)[index] if isinstance(index, slice) else index.tolist()
            fields[key] = NonTensorStack(*[NonTensorData(items[i]) for i in numbers])
        elif isinstance(value, NonTensorData):
            fields[key] = NonTensorData(value.data)
        else:
            fields[key] = value[index]
    size = len(range(rows)[index]) if isinstance(index, slice) else len(index)
    return _made(fields, size)


def _concat(values: list[Any]) -> Any:
    first = values[0]
    if jagged.is_jagged(first):
        return jagged.concat(values)
    if isinstance(first, NonTensorStack):
        items = [item for value in values for item in value.tolist()]
        return NonTensorStack(*[NonTensorData(item) for item in items])
    if isinstance(first, NonTensorData):
        return NonTensorData(first.data)
    return torch.cat(values, dim=0)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, NonTensorStack) and isinstance(b, NonTensorStack):
        return bool(a.tolist() == b.tolist())
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return bool(a.data == b.data)
    if jagged.is_jagged(a) and jagged.is_jagged(b):
        return jagged.equal(a, b)
    return a.shape == b.shape and jagged.same_dense(a, b)


__all__ = ["union_tensor_dict"]
