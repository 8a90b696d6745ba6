"""CPU time of the controller per call and rank, with simulated results: no processes, no tensors.

One call: unpack and concatenate the results of N ranks, union with an earlier result, split for N
ranks, pack every part, pickle every part as Ray does. The figures are means over many calls,
garbage collection included; full collections are as rare as in the controller of a group on Ray.
"""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

from quadriga.backends.ray.calls import FULL_EVERY
from quadriga.backends.ray.rank_process import collect_rarely
from quadriga.protocol import DataProto, Origin, use_store
from quadriga.protocol.boundary import pack_argument, unpack_result
from quadriga.protocol.columns import RemoteColumn
from quadriga.protocol.contents import RemoteArrays, RemoteBatch
from quadriga.protocol.storage import RowMap, Shard
from quadriga.protocol.values import FieldSpec


class FakeHandle:
    """A handle of a value that does not exist."""

    __slots__ = ("key", "nbytes")

    def __init__(self, key: str, nbytes: int) -> None:
        self.key, self.nbytes = key, nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return FakeHandle, (self.key, self.nbytes)

    @staticmethod
    def fetch_many(handles: Any) -> list[Any]:
        raise AssertionError("the controller fetched a field")


class NoStore:
    """A store that raises: the controller must not store anything in this benchmark."""

    in_process = False

    def put_many(self, values: Any) -> Any:
        raise AssertionError("the controller stored a field")


def result_of_rank(rank: int, rows: int, width: int, fields: list[str]) -> DataProto:
    layout = RowMap.of_shard(Shard.new(rows, Origin("actor", rank, "rollout", "node")))
    spec = FieldSpec("tensor", "float32", (width,))
    columns = {
        key: RemoteColumn(
            spec, layout, (FakeHandle(f"{rank}-{key}-{layout.shards[0].uid:x}", rows * width * 4),)
        )
        for key in fields
    }
    return DataProto(RemoteBatch(columns, [rows]), RemoteArrays(), {})


def one_call(results: list[DataProto], earlier: DataProto) -> tuple[float, float]:
    """Return (CPU seconds of bookkeeping, CPU seconds of pickling the parts)."""
    ranks = len(results)
    start = time.process_time()
    joined = DataProto.concat([unpack_result(part) for part in results])
    batch = earlier.select().union(joined)
    packed = [pack_argument(part) for part in batch.chunk(ranks)]
    middle = time.process_time()
    for part in packed:
        pickle.dumps(part, protocol=5)
    return middle - start, time.process_time() - middle


CALLS_TIMES_RANKS = 8192
"""The number of calls is this divided by the ranks, so that each mean covers as much work."""


def scaling(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    """Return microseconds per rank at 8 … `ranks` ranks, for 64 and for 1024 rows per rank."""
    found = {}
    collect_rarely(FULL_EVERY)
    with use_store(NoStore()):  # type: ignore[arg-type]
        for rows in (64, 1024):
            n = 8
            while n <= ranks:
                names = ["input_ids", "attention_mask", "position_ids", "responses"]
                earlier = DataProto.concat([result_of_rank(r, rows, 2048, names) for r in range(n)])
                runs = [
                    one_call([result_of_rank(r, rows, 2048, ["values"]) for r in range(n)], earlier)
                    for _ in range(max(times, CALLS_TIMES_RANKS // n))
                ]
                key = f"{n} ranks, {rows} rows per rank"
                found[key] = {
                    "bookkeeping_us_per_rank": statistics.mean(a for a, _ in runs) / n * 1e6,
                    "pickling_us_per_rank": statistics.mean(b for _, b in runs) / n * 1e6,
                }
                n *= 2
    return found


CASES = {"scaling": scaling}
