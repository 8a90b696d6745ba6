"""verl's helpers for TensorDicts that also hold jagged tensors and Python objects.

A field is one of three kinds:

    tensor           [B, ...] or jagged       one entry per row
    NonTensorStack   B Python objects         one entry per row
    NonTensorData    one Python object        belongs to the batch, not to a row
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import torch

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol import DataProto, pad_dataproto_to_divisor, union_tensor_dict
from quadriga.protocol.tensordicts import NonTensorData, NonTensorStack, TensorDict
from quadriga.protocol.values import concat_jagged, from_index, same

Field: TypeAlias = torch.Tensor | NonTensorStack | NonTensorData


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: object) -> None:
    """Store one object that belongs to the whole batch."""
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence[object]) -> None:
    """Store one object per row. The objects may be lists and dicts."""
    tensor_dict[key] = _stack(val)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: object) -> TensorDict:
    """Store a list as one object per row, any other value as one object of the whole batch.

    Returns `tensor_dict`, which is changed in place.
    """
    for key, value in kwargs.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            tensor_dict[key] = value
        elif isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def unwrap_non_tensor_data(data: object) -> object:
    """Return the object inside a `NonTensorData`; any other value unchanged."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: TensorDict, key: str, default: object) -> object:
    """Return the object of the whole batch under `key`, or `default`."""
    return unwrap_non_tensor_data(data.get(key, default))


def nested_tensor_from_tensor_list(
    tensors: Sequence[torch.Tensor], ragged_idx: int | None = None
) -> torch.Tensor:
    """Build a jagged tensor from its rows.

    The rows may differ in size along dimension `ragged_idx` of the result, which is dimension
    `ragged_idx` - 1 of a row; by default the last one.
    """
    if not tensors:
        raise LengthError("A jagged tensor needs at least one row.")
    dims = tensors[0].dim()
    ragged = dims if ragged_idx is None else ragged_idx
    if not 1 <= ragged <= dims:
        text = f"ragged_idx must be in 1..{dims} for rows of {dims} dimensions, got {ragged}."
        raise FieldError(text)
    if ragged == 1:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)
    # Rows [4, 2] and [4, 3] with ragged_idx=2: values [4, 5], offsets [0, 2, 5].
    lengths = torch.tensor([row.shape[ragged - 1] for row in tensors])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.cat(list(tensors), dim=ragged - 1)
    offsets = offsets.to(values.device)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def concat_nested_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate jagged tensors along the batch dimension."""
    return concat_jagged(tensors)


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """Return the first of several TensorDicts without a batch dimension."""
    return data[0]


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Concatenate TensorDicts along the batch dimension, jagged fields and objects included.

    Objects of a whole batch are taken from the first one. Raises `FieldError` if the keys differ.
    """
    if not data:
        raise LengthError("concat_tensordict needs at least one TensorDict.")
    first = data[0]
    if not first.batch_size:
        return concat_tensordict_with_none_bsz(data)
    keys = set(first.keys())
    for other in data[1:]:
        if set(other.keys()) != keys:
            raise FieldError(
                "TensorDicts to concatenate must have the same keys, got "
                f"{sorted(keys)} and {sorted(other.keys())}."
            )
    parts = [DataProto.from_tensordict(part) for part in data]
    joined = DataProto.concat([DataProto(p.batch, p.non_tensor_batch) for p in parts])
    joined.meta_info = parts[0].meta_info
    return joined.to_tensordict()


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Split into equal parts along the batch dimension.

    Raises `LengthError` if it does not divide.
    """
    if len(td) % chunks:
        text = f"{len(td)} rows do not divide into {chunks} parts."
        raise LengthError(f"{text} Pad the batch with pad_to_divisor.")
    size = len(td) // chunks
    return [select_rows(td, slice(i * size, (i + 1) * size)) for i in range(chunks)]


def index_select_tensor_dict(
    batch: TensorDict | None, indices: torch.Tensor | Sequence[int]
) -> TensorDict | None:
    """Return the rows of `indices`, in that order. None stays None."""
    return None if batch is None else select_rows(batch, torch.as_tensor(indices))


def get_tensordict(
    tensor_dict: Mapping[str, torch.Tensor | NonTensorStack | Sequence[object]],
    non_tensor_dict: Mapping[str, object] | None = None,
) -> TensorDict:
    """Build one TensorDict from all kinds of fields.

    `tensor_dict` holds tensors and lists with one object per row; `non_tensor_dict` holds objects
    of the whole batch. Raises `LengthError` if the fields differ in length.
    """
    fields: dict[str, Field] = {}
    lengths: dict[str, int] = {}
    for key, value in tensor_dict.items():
        lengths[key] = value.shape[0] if isinstance(value, torch.Tensor) else len(value)
        fields[key] = value if isinstance(value, torch.Tensor | NonTensorStack) else _stack(value)
    if len(set(lengths.values())) > 1:
        raise LengthError(f"The fields of a TensorDict must have the same length, got {lengths}.")
    rows = next(iter(lengths.values()), None)
    fields.update({key: NonTensorData(value) for key, value in (non_tensor_dict or {}).items()})
    return _build(fields, rows)


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, object] | None = None,
) -> Iterator[TensorDict]:
    """Yield mini-batches, epoch by epoch. `dataloader_kwargs={"shuffle": True}` shuffles rows."""
    data = DataProto.from_tensordict(tensordict)
    for part in data.make_iterator(mini_batch_size, epochs, seed, dict(dataloader_kwargs or {})):
        yield part.to_tensordict()


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raise ConflictError, which names the first field that differs."""
    if set(tensordict1.keys()) != set(tensordict2.keys()):
        raise ConflictError(
            f"The TensorDicts have different keys: {sorted(tensordict1.keys())} and "
            f"{sorted(tensordict2.keys())}."
        )
    for key in _keys(tensordict1):
        kinds = type(tensordict1.get(key)), type(tensordict2.get(key))
        if kinds[0] is not kinds[1] or not same(get(tensordict1, key), get(tensordict2, key)):
            raise ConflictError(f"The field {key!r} differs between the TensorDicts.", field=key)


def get(tensordict: TensorDict, key: str, default: object = None) -> object:
    """Return a tensor, a list with one object per row, or the object of the whole batch."""
    if key not in _keys(tensordict):
        return default
    value = tensordict.get(key)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return unwrap_non_tensor_data(value)


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Return a TensorDict of some fields. Raises `FieldError` if one is missing."""
    chosen = {key: _field(tensordict, key) for key in keys}
    return _build(chosen, len(tensordict) if tensordict.batch_size else None)


def pop(tensordict: TensorDict, key: str, default: object = None) -> object:
    """Remove a field and return what `get` returns for it."""
    value = get(tensordict, key, default)
    if key in _keys(tensordict):
        del tensordict[key]
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Remove some fields and return them as a TensorDict. Raises `FieldError` if one is missing."""
    chosen = list(keys)
    taken = get_keys(tensordict, chosen)
    for key in chosen:
        del tensordict[key]
    return taken


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Append the first rows again until `size_divisor` divides the length.

    Return (padded TensorDict, number of appended rows).
    """
    padded, pad = pad_dataproto_to_divisor(DataProto.from_tensordict(data), size_divisor)
    return (padded.to_tensordict(), pad) if pad else (data, 0)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Remove the last `pad_size` rows."""
    return select_rows(data, slice(0, len(data) - pad_size)) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """Make every tensor contiguous, jagged ones included."""
    fields = {
        key: value.contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in ((key, data.get(key)) for key in _keys(data))
    }
    return _build(fields, len(data) if data.batch_size else None)


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, object]]) -> TensorDict:
    """Build a TensorDict with one row per dict.

    Tensors of equal shape are stacked, tensors of different lengths become a jagged tensor, and
    other values are kept as one object per row.
    """
    fields: dict[str, torch.Tensor | Sequence[object]] = {}
    for key in list_of_dicts[0]:
        values = [row[key] for row in list_of_dicts]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) < len(values):
            fields[key] = values
        elif len({tensor.shape for tensor in tensors}) == 1:
            fields[key] = torch.stack(tensors)
        else:
            fields[key] = nested_tensor_from_tensor_list(tensors, ragged_idx=1)
    return get_tensordict(fields)


def select_rows(td: TensorDict, index: slice | torch.Tensor) -> TensorDict:
    """Return some rows of every field; `index` is a slice or an integer tensor [M]."""
    rows = DataProto.from_tensordict(td)
    return rows.take_rows(from_index(index, len(rows))).to_tensordict()


def _keys(td: TensorDict) -> list[str]:
    """The keys as strings. `iter(td)` would give rows."""
    return [str(key) for key in td.keys()]  # noqa: SIM118


def _stack(items: Iterable[object]) -> NonTensorStack:
    """One object per row. `NonTensorStack(*items)` alone would split lists and dicts."""
    return NonTensorStack(*[NonTensorData(item) for item in items])


def _build(fields: Mapping[str, Field], rows: int | None) -> TensorDict:
    """A TensorDict with `rows` rows; None: without a batch dimension."""
    built = TensorDict({}, batch_size=[] if rows is None else [rows])
    for key, value in fields.items():
        built[key] = value
    return built


def _field(tensordict: TensorDict, key: str) -> Field:
    if key not in _keys(tensordict):
        raise FieldError(
            f"The TensorDict has no field {key!r}, only {sorted(tensordict.keys())}.", field=key
        )
    return cast(Field, tensordict.get(key))


__all__ = ["union_tensor_dict"]
