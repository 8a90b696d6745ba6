"""The controller's own time per call as ranks grow, with simulated replies: no process, no bytes.

One call is: unpack and join the replies of N ranks, union with an earlier result, split for N
ranks, pack every part, pickle every part as Ray would. Means over many calls, in which Python's
collector of garbage has its share; the heap is frozen first, as the start of a group on Ray does.
"""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

from quadriga.backends.ray.process.heap import freeze_heap
from quadriga.protocol import DataProto, Origin, use_store
from quadriga.protocol.boundary import pack_argument, unpack_result
from quadriga.protocol.columns.column import RemoteColumn
from quadriga.protocol.columns.remote_arrays import RemoteArrays
from quadriga.protocol.columns.remote_batch import RemoteBatch
from quadriga.protocol.values.field_spec import FieldSpec
from quadriga.protocol.values.row_map import Block, Rows, new_uid


class FakeHandle:
    """A reference to bytes that do not exist."""

    __slots__ = ("key", "nbytes")

    def __init__(self, key: str, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeHandle, (self.key, self.nbytes)

    @staticmethod
    def fetch_many(handles: Any) -> list[Any]:
        raise AssertionError("the controller fetched")


class NoStore:
    """Refuses to keep anything: the controller has no bytes to store."""

    in_process = False

    def put_many(self, values: Any) -> Any:
        raise AssertionError("the controller stored")


def reply(rank: int, rows: int, width: int, fields: list[str]) -> DataProto:
    layout = Rows.whole(Block(new_uid(), rows, Origin("actor", rank, "rollout", "node")))
    spec = FieldSpec("tensor", "float32", (width,))
    columns = {
        key: RemoteColumn(
            spec, layout, (FakeHandle(f"{rank}-{key}-{new_uid():x}", rows * width * 4),)
        )
        for key in fields
    }
    return DataProto(RemoteBatch(columns, [rows]), RemoteArrays(), {})


def one_call(replies: list[DataProto], earlier: DataProto) -> tuple[float, float]:
    """CPU seconds of bookkeeping, and of pickling the parts."""
    ranks = len(replies)
    start = time.process_time()
    joined = DataProto.concat([unpack_result(part) for part in replies])
    batch = earlier.select().union(joined)
    packed = [pack_argument(part) for part in batch.chunk(ranks)]
    middle = time.process_time()
    for part in packed:
        pickle.dumps(part, protocol=5)
    return middle - start, time.process_time() - middle


CALLS_TIMES_RANKS = 8192
"""Few ranks are called more often, so that each mean holds as much work."""


def scaling(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    """Microseconds per rank at 8 … `ranks` ranks, for one size and for one 16 times as large."""
    found = {}
    freeze_heap()
    with use_store(NoStore()):  # type: ignore[arg-type]
        for rows in (64, 1024):
            n = 8
            while n <= ranks:
                names = ["input_ids", "attention_mask", "position_ids", "responses"]
                earlier = DataProto.concat([reply(r, rows, 2048, names) for r in range(n)])
                runs = [
                    one_call([reply(r, rows, 2048, ["values"]) for r in range(n)], earlier)
                    for _ in range(max(times, CALLS_TIMES_RANKS // n))
                ]
                key = f"{n} ranks, {rows} rows a rank"
                found[key] = {
                    "bookkeeping_us_per_rank": statistics.mean(a for a, _ in runs) / n * 1e6,
                    "pickling_us_per_rank": statistics.mean(b for _, b in runs) / n * 1e6,
                }
                n *= 2
    return found


CASES = {"scaling": scaling}
