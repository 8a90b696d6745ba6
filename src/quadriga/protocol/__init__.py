"""WHAT MOVES: `DataProto`, `DataProtoFuture`, references, field names, padding.

Names load when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.protocol.collating import collate_fn as collate_fn
    from quadriga.protocol.config import DataProtoConfig as DataProtoConfig
    from quadriga.protocol.dataproto import DataProto as DataProto
    from quadriga.protocol.folding import fold_batch_dim as fold_batch_dim
    from quadriga.protocol.folding import unfold_batch_dim as unfold_batch_dim
    from quadriga.protocol.future import DataProtoFuture as DataProtoFuture
    from quadriga.protocol.item import DataProtoItem as DataProtoItem
    from quadriga.protocol.ops.join import union_numpy_dict as union_numpy_dict
    from quadriga.protocol.ops.join import union_tensor_dict as union_tensor_dict
    from quadriga.protocol.padding import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from quadriga.protocol.padding import unpad_dataproto as unpad_dataproto
    from quadriga.protocol.values.storage import Origin as Origin
    from quadriga.protocol.values.storage import current_store as current_store
    from quadriga.protocol.values.storage import parallel_put as parallel_put
    from quadriga.protocol.values.storage import use_store as use_store

_HOME = {
    "DataProto": "dataproto",
    "DataProtoConfig": "config",
    "DataProtoFuture": "future",
    "DataProtoItem": "item",
    "Origin": "values.storage",
    "collate_fn": "collating",
    "current_store": "values.storage",
    "fold_batch_dim": "folding",
    "pad_dataproto_to_divisor": "padding",
    "parallel_put": "values.storage",
    "unfold_batch_dim": "folding",
    "union_numpy_dict": "ops.join",
    "union_tensor_dict": "ops.join",
    "unpad_dataproto": "padding",
    "use_store": "values.storage",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
