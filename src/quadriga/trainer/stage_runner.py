"""Run the stages of a step, and the stages of added roles before and after them.

    runner = StageRunner(added_stages, groups, record)
    batch = runner.run(stages.shape_scores, batch, config)

The second line runs the added stages that stand before `shape_scores`, then this function of
`trainer.stages`, then the added stages that stand after it, and logs the metrics of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quadriga.errors import FieldError, LengthError, WorkerError
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.protocol.contents import shape_and_dtype
from quadriga.trainer import stages
from quadriga.trainer.roles.places import PASSES
from quadriga.trainer.roles.registry import PlacedStage
from quadriga.trainer.stages import StageResult
from quadriga.workers.method_fields import GENERATE_SEQUENCES
from quadriga.workers.roles import GroupMethod

if TYPE_CHECKING:
    from quadriga.single_controller import WorkerGroup
    from quadriga.trainer.record import RunRecord

ArgumentsP = ParamSpec("ArgumentsP")


class StageRunner:
    """Runs stages with those of added roles beside them.

    Args:
        added: the stages of added roles.
        groups: role key → its worker group.
        record: where metrics and times of added stages and of updates are logged; needed for both.
        prefix: before the names of their metrics, "val/" in validation.
    """

    def __init__(
        self,
        added: Sequence[PlacedStage] = (),
        groups: Mapping[str, WorkerGroup] | None = None,
        record: RunRecord | None = None,
        prefix: str = "",
    ) -> None:
        self.added = tuple(added)
        self.groups = groups or {}
        self.record = record
        self.prefix = prefix

    def run(
        self,
        stage: Callable[Concatenate[DataProto, ArgumentsP], StageResult],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> DataProto:
        """Run a function of `trainer.stages` and the added stages beside it; log its metrics."""
        result = self.result(stage, batch, *args, **kwargs)
        assert self.record is not None, "metrics need a record"
        self.record.add(result.metrics)
        return result.batch

    def result(
        self,
        stage: Callable[Concatenate[DataProto, ArgumentsP], StageResult],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> StageResult:
        """Run a function as `run` does, but return its metrics in place of logging them."""
        # `stages.generate` calls the worker method that is the stage.
        name = GENERATE_SEQUENCES.name if stage is stages.generate else _name(stage)
        result = stage(self._beside("before", name, batch), *args, **kwargs)
        return StageResult(self._beside("after", name, result.batch), result.metrics)

    def update(
        self,
        method: GroupMethod[[DataProto], DataProto],
        batch: DataProto,
        order: NDArray[np.int64] | None = None,
    ) -> DataProto:
        """Run an update of a built-in role and the added stages beside it; log its metrics.

        `order`: in which the method gets the rows; None: as in the batch.
        """
        batch = self._beside("before", _name(method), batch)
        assert self.record is not None, "an update needs a record"
        self.record.log_update(method(batch if order is None else batch.select_idxs(order)))
        return self._beside("after", _name(method), batch)

    def without_updates(self) -> StageRunner:
        """Return a runner that leaves out added stages without `writes`.

        It is for rows that are not those of the batch: greedy responses for reward baselines.
        """
        added = [placed for placed in self.added if placed.stage.writes]
        return StageRunner(added, self.groups, self.record, self.prefix)

    def before_passes(self, batch: DataProto) -> DataProto:
        """Run the stages that stand before a pass: all of them before the first one."""
        for name in PASSES:
            batch = self._beside("before", name, batch)
        return batch

    def after_passes(self, batch: DataProto) -> DataProto:
        """Run the stages that stand after a pass: all of them when all passes have ended."""
        for name in PASSES:
            batch = self._beside("after", name, batch)
        return batch

    def _beside(self, side: str, name: str, batch: DataProto) -> DataProto:
        for placed in self.added:
            if getattr(placed.stage, side) == name:
                batch = self._beside("before", placed.name, batch)
                batch = self._run(placed, batch)
                batch = self._beside("after", placed.name, batch)
        return batch

    def _run(self, placed: PlacedStage, batch: DataProto) -> DataProto:
        """Call the method of an added stage. Return the batch with the fields that it writes."""
        assert self.record is not None, "added stages need a record"
        stage, group = placed.stage, self.groups[placed.role]
        present = {*_tensors(batch), *batch.non_tensor_batch}
        inputs = _select(
            batch, [*stage.reads, *(key for key in stage.reads_if_present if key in present)]
        )
        extra = 0
        if stage.writes:
            # Rows that are added are scored for nothing; in an update they would count.
            inputs, extra = pad_dataproto_to_divisor(inputs, group.world_size)
        with self.record.span(placed.name):
            result: object = getattr(group, stage.method)(inputs)
            if isinstance(result, DataProtoFuture):
                result = result.get()
        if result is None and not stage.writes:
            return batch
        if not isinstance(result, DataProto):
            raise WorkerError(
                f"stage {placed.name} returned {type(result).__name__}, expected a DataProto with "
                f"the fields {', '.join(stage.writes) or 'none'}",
                role=placed.role,
                method=stage.method,
            )
        check_metrics(placed, result)
        self.record.log_role(f"{self.prefix}{placed.role}/", result)
        if not stage.writes:
            return batch
        check_result(placed, batch, result, rows=len(inputs))
        return _written(placed, batch, unpad_dataproto(result, extra))


def _written(placed: PlacedStage, batch: DataProto, result: DataProto) -> DataProto:
    """Return the batch with the fields that a stage has returned, in place of its own."""
    writes = set(placed.stage.writes)
    present = (*_tensors(batch), *batch.non_tensor_batch)
    kept = _select(batch, [key for key in present if key not in writes])
    kept.meta_info = dict(batch.meta_info)
    added = _select(result, list(writes))
    added.meta_info = {key: value for key, value in result.meta_info.items() if key != "metrics"}
    return kept.union(added)


def _select(batch: DataProto, keys: Sequence[str]) -> DataProto:
    tensors = set(_tensors(batch))
    return batch.select(
        batch_keys=[key for key in keys if key in tensors],
        non_tensor_batch_keys=[key for key in keys if key not in tensors],
        meta_info_keys=[],
    )


def _tensors(batch: DataProto) -> list[str]:
    return [] if batch.batch is None else [str(key) for key in batch.batch.keys()]  # noqa: SIM118


def _name(function: object) -> str:
    return str(getattr(function, "__name__", ""))


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
    found = {k: shape_and_dtype(c) for k, c in result.contents.columns().items()}
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
    own, arrays = batch.contents.columns(), set(result.non_tensor_batch)
    # A response mask [B, R] tells the columns of all fields of this shape.
    mask = own.get(fields.RESPONSE_MASK)
    tokens = "" if mask is None else shape_and_dtype(mask)[0].split(", ")[-1]
    for key, (shape, dtype) in found.items():
        declared = fields.BY_NAME.get(key)
        if declared is None:
            continue
        is_array = declared.is_array
        fits = is_array or dtype in _DTYPES.get(declared.dtype, (declared.dtype,))
        if declared.shape == "[B, R]":
            fits &= not tokens or shape == f"[{rows}, {tokens}"
        if is_array != (key in arrays) or not fits:
            kind, got = ("an array" if x else "a tensor" for x in (is_array, key in arrays))
            raise FieldError(
                f"stage {placed.name} returned {key} as {got} {shape} of {dtype}, expected {kind} "
                f"{declared.shape} of {declared.dtype} (B = {rows}, R = {tokens.strip(']')}): "
                f"{declared.unit}",
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
