"""One row of a `DataProto`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataProtoItem:
    """What `data[3]` gives: the tensors of the row without their batch dimension (None when the
    batch has no tensors), the objects of the row, and the batch's `meta_info`."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
