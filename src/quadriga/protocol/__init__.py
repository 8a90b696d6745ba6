"""Batches, and how they are sent: `DataProto`, `DataProtoFuture`, field names, padding. No Ray.

- `dataproto.py`: the container; its operations call the folders below.
- `columns/`: the fields of a batch, local or remote.
- `values/`: one field: rows, encoding, storage.
- `ops/`: what a batch can do besides selecting and concatenating rows.
- `batch_file/`: the format of batch files.
- `message.py`, `boundary.py`, `future.py`: a batch as it is sent; values at the process boundary;
  results of calls that have not returned.
- `batch_shapes.py`, `fields.py`, `containers.py`: functions around a batch; the names of all
  fields; nested containers.
- `threads.py`: waiting in a thread, for programs with an event loop.

Imports: `values` ← `columns`, `batch_file` ← `ops`, `message.py` ← `dataproto.py` ← `boundary.py` ←
`future.py`.
Of the rest of quadriga only `errors` and `lazy` are imported. Public names load when they are first
used, so that importing this package imports neither torch nor tensordict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "DataProto": "dataproto",
    "DataProtoConfig": "config",
    "DataProtoFuture": "future",
    "DataProtoItem": "columns.contents",
    "Origin": "values.storage",
    "as_completed": "future",
    "collate_fn": "batch_shapes",
    "current_store": "values.storage",
    "fold_batch_dim": "batch_shapes",
    "pad_dataproto_to_divisor": "batch_shapes",
    "parallel_put": "values.storage",
    "unfold_batch_dim": "batch_shapes",
    "union_numpy_dict": "ops.join",
    "union_tensor_dict": "ops.join",
    "unpad_dataproto": "batch_shapes",
    "use_store": "values.storage",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.protocol.batch_shapes import collate_fn as collate_fn
    from quadriga.protocol.batch_shapes import fold_batch_dim as fold_batch_dim
    from quadriga.protocol.batch_shapes import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from quadriga.protocol.batch_shapes import unfold_batch_dim as unfold_batch_dim
    from quadriga.protocol.batch_shapes import unpad_dataproto as unpad_dataproto
    from quadriga.protocol.columns.contents import DataProtoItem as DataProtoItem
    from quadriga.protocol.config import DataProtoConfig as DataProtoConfig
    from quadriga.protocol.dataproto import DataProto as DataProto
    from quadriga.protocol.future import DataProtoFuture as DataProtoFuture
    from quadriga.protocol.future import as_completed as as_completed
    from quadriga.protocol.ops.join import union_numpy_dict as union_numpy_dict
    from quadriga.protocol.ops.join import union_tensor_dict as union_tensor_dict
    from quadriga.protocol.values.storage import Origin as Origin
    from quadriga.protocol.values.storage import current_store as current_store
    from quadriga.protocol.values.storage import parallel_put as parallel_put
    from quadriga.protocol.values.storage import use_store as use_store
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
