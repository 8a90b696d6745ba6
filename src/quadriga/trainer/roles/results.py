"""Check what the method of an added stage has returned, before the step goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from quadriga.errors import FieldError, LengthError, WorkerError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.ops import describe
from quadriga.trainer.roles.registry import PlacedStage

_DTYPES = {
    "int64": ("int64", "int32", "int16", "int8", "uint8"),
    "float32": ("float32", "float64", "bfloat16", "float16"),
}
"""Declared dtype → those that the stages of a step take."""


def check_result(placed: PlacedStage, batch: DataProto, result: DataProto, *, rows: int) -> None:
    """Check the fields of a result: names, rows, and the shapes and dtypes of declared fields.

    Args:
        batch: the batch of the step.
        result: what the stage has returned.
        rows: rows that it was given, with those that pad the batch.

    Raises:
        FieldError: a field is missing, is not among `writes`, or is not what `protocol.fields`
            declares.
        LengthError: it has other rows than the batch.
    """
    found = describe.shapes(result.contents)
    writes = set(placed.stage.writes)
    if set(found) != writes:
        raise FieldError(
            f"stage {placed.name} declares writes {', '.join(sorted(writes))}, but returned "
            f"{', '.join(sorted(found)) or 'no field'}; make both equal",
            field=min(set(found) ^ writes),
        )
    if len(result) != rows:
        raise LengthError(
            f"stage {placed.name} got {rows} rows and returned {len(result)}; expected one row "
            "for each row of the batch"
        )
    sizes = {"B": rows, **_columns(batch)}
    arrays = set(result.non_tensor_batch)
    for key, (shape, dtype) in found.items():
        declared = fields.BY_NAME.get(key)
        if declared is None:
            continue
        is_array = declared in fields.ARRAYS
        fits = is_array or (dtype in _DTYPES.get(declared.dtype, (declared.dtype,)))
        if is_array != (key in arrays) or not fits or not _has_shape(shape, declared.shape, sizes):
            kind = "an array" if is_array else "a tensor"
            got = "an array" if key in arrays else "a tensor"
            letters = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            raise FieldError(
                f"stage {placed.name} returned {key} as {got} {shape} of {dtype}, expected {kind} "
                f"{declared.shape} of {declared.dtype} ({letters}): {declared.unit}",
                field=key,
            )


def check_metrics(placed: PlacedStage, result: DataProto) -> None:
    """Check that every metric of a result is a number, or a list with a number for each rank.

    Raises:
        WorkerError: names the one that is not.
    """
    metrics = result.meta_info.get("metrics", {})
    if not isinstance(metrics, Mapping):
        raise _no_metric(placed, f"{metrics!r} as metrics, expected a dict from name to number")
    for name, value in metrics.items():
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        values = value if listed else [value]
        if not isinstance(name, str) or not all(map(_is_number, values)):
            raise _no_metric(placed, f"the metric {name!r}: {value!r}, expected a number")


def _no_metric(placed: PlacedStage, what: str) -> WorkerError:
    return WorkerError(
        f"stage {placed.name} returned {what[:300]}", role=placed.role, method=placed.stage.method
    )


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | np.number | np.bool_)


def _columns(batch: DataProto) -> dict[str, int]:
    """Return {"R": columns of a response}; {} before there are responses."""
    shapes = describe.shapes(batch.contents)
    if fields.RESPONSE_MASK not in shapes:
        return {}
    shape, _ = shapes[fields.RESPONSE_MASK]
    return {"R": int(shape.strip("[]").split(", ")[1])}


def _has_shape(shape: str, declared: str, sizes: Mapping[str, int]) -> bool:
    """Whether a shape such as "[8, 12]" is one of "[B, P], then [B, P+R]" for these sizes."""
    found = shape.strip("[]").split(", ")
    for alternative in declared.split(", then "):
        letters = alternative.strip("[]").split(", ")
        pairs = list(zip(letters, found, strict=False))
        if len(letters) == len(found) and all(
            letter not in sizes or size == str(sizes[letter]) for letter, size in pairs
        ):
            return True
    return False
