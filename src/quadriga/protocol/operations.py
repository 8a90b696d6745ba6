"""What a batch can do besides selecting and concatenating rows.

Checked construction, conversion from and to dicts and `TensorDict`; columns split into rows, rows
into mini-batches; text that describes the fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.utils.data import DataLoader

from quadriga.errors import FieldError, LengthError
from quadriga.protocol import columns, contents as halves
from quadriga.protocol.columns import Column, Columns, is_remote, local_value
from quadriga.protocol.contents import ArrayHalf, Contents, MetaInfo, Tensors
from quadriga.protocol.rows import RowIndices
from quadriga.protocol.storage import Array, LocalHandle, Origin, origins_of
from quadriga.protocol.values import (
    LocalValue,
    as_tensordict,
    build_jagged,
    describe_value,
    dtype_name,
    is_jagged,
    jagged_parts,
    nbytes_of,
    object_array,
    ragged_dim,
    tensors_of,
)


def check_dicts(
    tensors: Mapping[str, Tensors], non_tensors: Mapping[str, object], num_batch_dims: int
) -> tuple[TensorDict | None, ArrayHalf]:
    """Return the two halves of a batch from plain dicts. Types and lengths are checked."""
    if num_batch_dims < 1:
        raise LengthError(f"expected at least one batch dimension, got {num_batch_dims=}")
    if num_batch_dims > 1 and non_tensors:
        raise LengthError(
            f"non-tensors have one batch dimension, got {num_batch_dims=} "
            f"with non-tensors {list(non_tensors)}"
        )
    _check_mapping("tensors", tensors)
    _check_mapping("non_tensors", non_tensors)
    for key, value in tensors.items():
        _check_tensor(key, value, num_batch_dims)
    batch_size = _common_size(tensors, num_batch_dims)
    batch = None if batch_size is None else as_tensordict(tensors, batch_size, None)
    return batch, {key: as_array(key, value) for key, value in non_tensors.items()}


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise FieldError(f"{name}: expected a dict of fields by name, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise FieldError(f"{name}: expected field names, got {key!r} ({type(key).__name__})")


def _check_tensor(key: str, value: object, num_batch_dims: int) -> None:
    if not isinstance(value, torch.Tensor | TensorDictBase):
        raise FieldError(
            f"field '{key}' in tensors is a {type(value).__name__}, not a tensor; "
            "lists and arrays go into non_tensors",
            field=key,
        )
    if len(value.shape) < num_batch_dims:
        raise FieldError(
            f"field '{key}' has shape {list(value.shape)}; "
            f"it needs at least {num_batch_dims} batch dimension(s)",
            field=key,
        )


def _common_size(tensors: Mapping[str, Tensors], num_batch_dims: int) -> tuple[int, ...] | None:
    first: tuple[str, tuple[int, ...]] | None = None
    for key, value in tensors.items():
        size = tuple(value.shape[:num_batch_dims])
        if first is None:
            first = (key, size)
        elif size != first[1]:
            raise LengthError(
                f"all fields of a batch have the same length: '{first[0]}' has {list(first[1])}, "
                f"'{key}' has {list(size)}",
                field=key,
            )
    return None if first is None else first[1]


def as_array(key: str, value: object) -> Array:
    """Return a numpy array as it is, a list or tuple as a one-dimensional object array."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return object_array(value)
    hint = "it goes into tensors" if isinstance(value, torch.Tensor) else "wrap it in a list"
    raise FieldError(
        f"field '{key}' in non_tensors is a {type(value).__name__}, "
        f"not a numpy array or a list; {hint}",
        field=key,
    )


def sort_by_type(
    data: Mapping[str, object],
) -> tuple[dict[str, Tensors], dict[str, object]]:
    """Separate tensors from everything else that can be a field."""
    _check_mapping("data", data)
    tensors: dict[str, Tensors] = {}
    arrays: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor | TensorDictBase):
            tensors[key] = value
        elif isinstance(value, np.ndarray | list | tuple):
            arrays[key] = value
        else:
            raise FieldError(
                f"field '{key}': expected a tensor, a numpy array or a list, got "
                f"{type(value).__name__}. Settings belong in meta_info",
                field=key,
            )
    return tensors, arrays


def split_tensordict(
    tensor_dict: TensorDictBase | None, meta_info: MetaInfo | None, num_batch_dims: int
) -> Contents:
    """Return the contents of a `TensorDict` that may have non-tensors."""
    meta = dict(meta_info or {})
    if tensor_dict is None:
        return Contents(None, {}, meta)
    tensors: dict[str, Tensors] = {}
    arrays: ArrayHalf = {}
    for key, value in tensors_of(tensor_dict).items():
        if isinstance(value, NonTensorStack):
            arrays[key] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            meta[key] = value.data
        else:
            tensors[key] = value
    batch, _ = check_dicts(tensors, {}, num_batch_dims)
    if batch is None and not arrays and tensor_dict.batch_size:
        batch = TensorDict({}, batch_size=tensor_dict.batch_size[:num_batch_dims])
    return Contents(batch, arrays, meta)


def join_tensordict(contents: Contents) -> TensorDict:
    """Return one `TensorDict`: tensors, arrays as `NonTensorStack`, settings as `NonTensorData`.

    Raises `FieldError` when two of them have the same name.
    """
    fields: dict[str, object] = {} if contents.batch is None else dict(contents.batch.items())
    size = [contents.rows] if contents.batch is None else list(contents.batch.batch_size)
    for key, array in contents.arrays.items():
        _check_free(key, fields)
        fields[key] = NonTensorStack(*[NonTensorData(item) for item in array])
    for key, value in contents.meta.items():
        _check_free(key, fields)
        fields[key] = NonTensorData(value, batch_size=size)
    return TensorDict(fields, batch_size=size)


def _check_free(key: str, taken: Mapping[str, object]) -> None:
    if key in taken:
        raise FieldError(
            f"'{key}' names two fields of different kinds; a TensorDict has one name space",
            field=key,
        )


LoaderSettings: TypeAlias = Mapping[str, Any]
"""Keyword arguments of `torch.utils.data.DataLoader`."""


def unfold_column_chunks(contents: Contents, n_split: int, split_keys: Sequence[str]) -> Contents:
    """Turn every row into `n_split` rows.

    Fields in `split_keys` are fetched and split along dimension 1, rows of all others are repeated;
    remote ones stay remote. Raises `FieldError` for an unknown key, `LengthError` where dimension 1
    does not divide.
    """
    if n_split < 1:
        raise LengthError(f"expected at least 1 part to split columns into, got {n_split}")
    batch, arrays, meta = contents
    tensors, objects = halves.tensor_columns(batch), halves.array_columns(arrays)
    known = [*tensors, *objects]
    for key in split_keys:
        if key not in known:
            raise halves.missing(key, known, "the batch")
    halves.prefetch(batch, arrays, split_keys)
    selection = columns.Selections(
        [RowIndices(np.repeat(np.arange(contents.rows, dtype=np.int64), n_split))]
    )

    def unfold(half: Columns) -> dict[str, Column]:
        others = {key: column for key, column in half.items() if key not in split_keys}
        (taken,) = columns.take(others, selection)
        return {
            key: taken[key] if key in taken else _split_value(key, local_value(column), n_split)
            for key, column in half.items()
        }

    new_batch = None
    if batch is not None:
        new_batch = halves.make_batch(batch, unfold(tensors), contents.rows * n_split)
    return Contents(new_batch, halves.make_arrays(unfold(objects)), dict(meta))


def _split_value(key: str, value: LocalValue, n_split: int) -> LocalValue:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _split_jagged(key, value, n_split)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object:
        return _split_objects(key, value, n_split)
    if isinstance(value, TensorDictBase):
        raise FieldError(f"field '{key}' is a nested TensorDict and has no columns", field=key)
    if len(value.shape) < 2 or value.shape[1] % n_split:
        raise LengthError(
            f"field '{key}' with shape {list(value.shape)} has no dimension 1 that divides into "
            f"{n_split} columns",
            field=key,
        )
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _split_objects(key: str, value: NDArray[Any], n_split: int) -> NDArray[Any]:
    """Split every row, a list, tuple or array, into `n_split` rows of the same type."""
    pieces: list[object] = []
    for row, entries in enumerate(value):
        if not isinstance(entries, list | tuple | np.ndarray) or np.ndim(entries) == 0:
            raise LengthError(
                f"row {row} of field '{key}' is a {type(entries).__name__} and has no columns; "
                "only rows that are lists, tuples or arrays can be split",
                field=key,
            )
        if len(entries) % n_split:
            raise LengthError(
                f"row {row} of field '{key}' has {len(entries)} columns, which do not divide into "
                f"{n_split}",
                field=key,
            )
        size = len(entries) // n_split
        pieces += [entries[i * size : (i + 1) * size] for i in range(n_split)]
    # `np.array(pieces)` would make columns of entries of equal length.
    result = np.empty(len(pieces), dtype=object)
    result[:] = pieces
    return result


def _split_jagged(key: str, value: torch.Tensor, n_split: int) -> torch.Tensor:
    """Split every row into `n_split` rows: the same values with more offsets."""
    if ragged_dim(value) > 1:
        raise FieldError(
            f"field '{key}' is ragged in dimension {ragged_dim(value)}; only columns of "
            "fields that are dense or ragged in dimension 1 can be split",
            field=key,
        )
    # Rows of 2, 0 and 4 numbers have offsets 0 2 2 6; split in two they have 0 1 2 2 2 4 6.
    values, offsets = jagged_parts(value)
    lengths = offsets.diff()
    odd = torch.nonzero(lengths % n_split).flatten().tolist()
    if odd:
        raise LengthError(
            f"row {odd[0]} of jagged field '{key}' has {int(lengths[odd[0]])} columns, which do "
            f"not divide into {n_split}",
            field=key,
        )
    # lengths 2 0 4, n_split 2: starts [[0, 0 + 1], [2, 2 + 0], [2, 2 + 2]] → 0 1 2 2 2 4, then 6.
    steps = torch.arange(n_split, device=offsets.device)
    starts = offsets[:-1, None] + (lengths // n_split)[:, None] * steps
    return build_jagged(values, torch.cat([starts.flatten(), offsets[-1:]]).to(offsets.dtype))


def mini_batch_rows(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: LoaderSettings
) -> Iterator[list[int]]:
    """Yield `length // size * epochs` lists of row numbers.

    Raises `LengthError` at the call, not at the first iteration, unless `size` divides `length`.
    """
    if size < 1 or length % size:
        raise LengthError(
            f"{length} rows do not divide into mini-batches of {size}: "
            f"{length} = {size} × {length // max(size, 1)} + {length % max(size, 1)}"
        )
    return _draw(length, size, epochs, seed, loader_kwargs)


def _draw(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: LoaderSettings
) -> Iterator[list[int]]:
    if length == 0:
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[list[int]] = DataLoader(
        cast(Any, range(length)),  # a range has the two methods that a DataLoader calls
        batch_size=size,
        collate_fn=list,
        generator=generator,
        **loader_kwargs,
    )
    for _ in range(epochs):
        yield from loader


_GB = 2**30
_HEAD = ("field", "shape", "dtype", "bytes", "stored", "written by")
_LOCAL = "local"


def table(contents: Contents) -> str:
    """Return one line per field: name, shape, dtype, bytes, where it is stored, who wrote it.

    Bytes of local object arrays count the references only.
    """
    fields = _columns(contents)
    lines = [_HEAD, *(_line(key, column) for key, column in fields)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    total = sum(_nbytes(column) for _, column in fields)
    remote = sum(_nbytes(column) for _, column in fields if _stored(column) != _LOCAL)
    head = f"{contents.rows} rows, {len(fields)} fields, {total:,} bytes, {remote:,} of them remote"
    meta = f"meta_info: {', '.join(map(str, contents.meta)) or 'nothing'}"
    return "\n".join([head, *(line.rstrip() for line in text), meta])


def shapes(contents: Contents) -> dict[str, tuple[str, str]]:
    """Return field → (shape, dtype) as text, `("[8, *, 2]", "float32")`; `*` is a ragged size."""
    return {key: _shape_of_column(column) for key, column in _columns(contents)}


def _columns(contents: Contents) -> list[tuple[str, Column]]:
    tensors = halves.tensor_columns(contents.batch)
    return [*tensors.items(), *halves.array_columns(contents.arrays).items()]


def _line(key: str, column: Column) -> tuple[str, ...]:
    origins: Iterable[Origin]
    if is_remote(column):
        origins = (shard.origin for shard in column.row_map.shards)
    else:
        origins = origins_of(local_value(column))
    shape, dtype = _shape_of_column(column)
    return key, shape, dtype, f"{_nbytes(column):,}", _stored(column), writers(origins)


def _shape_of_column(column: Column) -> tuple[str, str]:
    if is_remote(column):
        return column.spec.describe(len(column.row_map))
    return _shape(local_value(column))


def _shape(value: LocalValue) -> tuple[str, str]:
    dtype = dtype_name(getattr(value, "dtype", None) or type(value).__name__)
    if isinstance(value, torch.Tensor) and is_jagged(value):
        dims = ["*" if i == ragged_dim(value) else str(n) for i, n in enumerate(value.shape)]
        return f"[{', '.join(dims)}]", dtype
    return str(list(value.shape)), dtype


def _nbytes(column: Column) -> int:
    return column.nbytes() if is_remote(column) else nbytes_of(local_value(column))


def _stored(column: Column) -> str:
    if not is_remote(column) or all(type(handle) is LocalHandle for handle in column.handles):
        return _LOCAL
    origins = [shard.origin for shard in column.row_map.shards]
    nodes = sorted({origin.node for origin in origins if origin.node})
    return ranks(origins) + (f" on {', '.join(nodes)}" if nodes else "")


def ranks(origins: Iterable[Origin]) -> str:
    """Return `actor[0-3,6], critic[0]`."""
    return ", ".join(_by_name((origin.role, origin.rank) for origin in origins))


def _by_name(pairs: Iterable[tuple[str, int]]) -> list[str]:
    """Return `name[ranks]` of each name."""
    found: dict[str, set[int]] = {}
    for name, rank in pairs:
        found.setdefault(name, set()).add(rank)
    return [f"{name}[{_ranges(sorted(numbers))}]" for name, numbers in found.items()]


def _ranges(numbers: list[int]) -> str:
    # 0 1 2 3 6 → [0, 3], [6] → "0-3,6"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, pair)) for pair in ranges)


def writers(origins: Iterable[Origin]) -> str:
    """Return `actor.compute_log_prob[0-3]`, or "controller" for values that no worker wrote."""
    listed = list(origins)
    methods = _by_name((f"{o.role}.{o.method}", o.rank) for o in listed if o.method)
    roles = dict.fromkeys(origin.role for origin in listed if not origin.method)
    return ", ".join([*methods, *roles]) or "controller"


def data_info(contents: Contents) -> str:
    """Return the fields of each half with shape and dtype, and the types in `meta_info`."""
    lines = []
    named_halves: dict[str, Mapping[str, Column]] = {
        "batch": halves.tensor_columns(contents.batch),
        "non_tensor_batch": halves.array_columns(contents.arrays),
    }
    for name, half in named_halves.items():
        lines.append(name)
        for key, column in half.items():
            _, shape, dtype, _, stored, _ = _line(key, column)
            lines.append(f"  {key}: {shape} ({dtype}) {stored}")
    lines.append("meta_info")
    lines += [f"  {key}: {_type_of(value)}" for key, value in contents.meta.items()]
    return "\n".join(lines)


def _type_of(value: object) -> str:
    if isinstance(value, list):
        inner = sorted({_type_of(v) for v in value[:3]})
        return f"list[{' | '.join(inner)}]" if inner else "list"
    if isinstance(value, tuple):
        return f"tuple[{', '.join(_type_of(v) for v in value)}]"
    if isinstance(value, dict) and value:
        key, first = next(iter(value.items()))
        return f"dict[{_type_of(key)}, {_type_of(first)}]"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} {describe_value(value)}"
    return type(value).__name__


def size_line(contents: Contents, prefix: str) -> str:
    """Return the sizes of both halves in GB (2**30 bytes)."""
    sizes = [
        sum(_nbytes(column) for column in half.values()) / _GB
        for half in (halves.tensor_columns(contents.batch), halves.array_columns(contents.arrays))
    ]
    text = f"tensors {sizes[0]:.6f} GB, non-tensors {sizes[1]:.6f} GB"
    return f"{prefix}, {text}" if prefix else text
