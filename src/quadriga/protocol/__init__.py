"""Batches, and how they are sent: `DataProto`, `DataProtoFuture`, field names, padding. No Ray.

- `storage.py`: handles, stores and row maps. `values.py`: one local value, and indexes of its rows.
- `columns.py`: a value as it is sent, and remote fields. `contents.py`: the halves of a batch, and
  the operations on them. `disk.py`: a batch in a file.
- `message.py`, `dataproto.py`, `boundary.py`: a batch as it is sent; the container; values at the
  process boundary, and results of calls that have not returned.
- `fields.py`, `threads.py`: names of all fields; results that may not exist yet.

`tensordicts.py` imports the classes of tensordict. Each file imports only from it and from those
before it in this order: `storage`, `values`, `columns`, `contents`, `disk`, `message`, `dataproto`,
`boundary`.
Of the rest of quadriga only `errors`, `files` and `lazy` are imported. Public names load when they
are first used, so that importing this package imports neither torch nor tensordict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.protocol.boundary import (
        DataProtoFuture as DataProtoFuture,
        as_completed as as_completed,
    )
    from quadriga.protocol.contents import (
        DataProtoItem as DataProtoItem,
        union_numpy_dict as union_numpy_dict,
        union_tensor_dict as union_tensor_dict,
    )
    from quadriga.protocol.dataproto import (
        DataProto as DataProto,
        DataProtoConfig as DataProtoConfig,
        collate_fn as collate_fn,
        fold_batch_dim as fold_batch_dim,
        pad_dataproto_to_divisor as pad_dataproto_to_divisor,
        unfold_batch_dim as unfold_batch_dim,
        unpad_dataproto as unpad_dataproto,
    )
    from quadriga.protocol.storage import (
        Origin as Origin,
        current_store as current_store,
        parallel_put as parallel_put,
        use_store as use_store,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
