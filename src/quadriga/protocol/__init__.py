"""Batches, and how they are sent: `DataProto`, `DataProtoFuture`, field names, padding. No Ray.

- `storage.py`: handles and stores. `rows.py`: row maps. `values.py`: one local value.
- `encoding.py`: a value as it is sent. `columns.py`: remote fields. `contents.py`: the halves of
  a batch. `operations.py`, `disk.py`: other operations on them; a batch in a file.
- `message.py`, `dataproto.py`, `boundary.py`: a batch as it is sent; the container; values at the
  process boundary, and results of calls that have not returned.
- `fields.py`, `containers.py`, `threads.py`: names of all fields; nested containers; waiting in a
  thread.

Each file imports only from those before it in this order: `storage`, `rows`, `values`, `encoding`,
`columns`, `contents`, `operations`, `disk`, `message`, `dataproto`, `boundary`.
Of the rest of quadriga only `errors`, `files` and `lazy` are imported. Public names load when they
are first used, so that importing this package imports neither torch nor tensordict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "DataProto": "dataproto",
    "DataProtoConfig": "dataproto",
    "DataProtoFuture": "boundary",
    "DataProtoItem": "contents",
    "Origin": "storage",
    "as_completed": "boundary",
    "collate_fn": "dataproto",
    "current_store": "storage",
    "fold_batch_dim": "dataproto",
    "pad_dataproto_to_divisor": "dataproto",
    "parallel_put": "storage",
    "unfold_batch_dim": "dataproto",
    "union_numpy_dict": "contents",
    "union_tensor_dict": "contents",
    "unpad_dataproto": "dataproto",
    "use_store": "storage",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.protocol.boundary import DataProtoFuture as DataProtoFuture
    from quadriga.protocol.boundary import as_completed as as_completed
    from quadriga.protocol.contents import DataProtoItem as DataProtoItem
    from quadriga.protocol.contents import union_numpy_dict as union_numpy_dict
    from quadriga.protocol.contents import union_tensor_dict as union_tensor_dict
    from quadriga.protocol.dataproto import DataProto as DataProto
    from quadriga.protocol.dataproto import DataProtoConfig as DataProtoConfig
    from quadriga.protocol.dataproto import collate_fn as collate_fn
    from quadriga.protocol.dataproto import fold_batch_dim as fold_batch_dim
    from quadriga.protocol.dataproto import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from quadriga.protocol.dataproto import unfold_batch_dim as unfold_batch_dim
    from quadriga.protocol.dataproto import unpad_dataproto as unpad_dataproto
    from quadriga.protocol.storage import Origin as Origin
    from quadriga.protocol.storage import current_store as current_store
    from quadriga.protocol.storage import parallel_put as parallel_put
    from quadriga.protocol.storage import use_store as use_store
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
