"""The error that names a lost field: which rows, and who produced them."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.errors import LostObjectError
from quadriga.protocol.values.rows import RowMap
from quadriga.protocol.values.storage import Handle


def named(
    fields: Sequence[tuple[str, RowMap, tuple[Handle, ...]]], error: LostObjectError
) -> LostObjectError:
    """Return the error that names field, role, rank and method of the first value that is lost."""
    late: Sequence[str] = getattr(error, "late", ())
    reason = (
        f"did not arrive ({error})"
        if late
        else "that node, or the process that called for them, no longer runs. Read a field before "
        "that, or compute it again"
    )
    for key, row_map, handles in fields:
        for shard, handle in zip(row_map.shards, handles, strict=True):
            # A value that is late is not waited for a second time.
            if handle.key in late if late else _is_lost(handle):
                origin = shard.origin
                return LostObjectError(
                    f"field '{key}' is lost: its {shard.rows} rows were produced by {origin.role} "
                    f"rank {origin.rank} in {origin.method or 'the controller'} on node "
                    f"{origin.node or 'unknown'}, and {reason}",
                    field=key, role=origin.role, rank=origin.rank,
                    method=origin.method, node=origin.node,
                )  # fmt: skip
    return error


def _is_lost(handle: Handle) -> bool:
    try:
        handle.fetch()
    except LostObjectError:
        return True
    return False
