"""Padding in the library's functions where a program calls them with a group, as verl's do it.

    args, kwargs = dispatch_dp_compute_data_proto(group, batch)    kwargs[PADDING]: rows added
    count = kwargs.pop(PADDING, 0)
    output = collect_dp_compute_data_proto(group, run(*args, **kwargs))
    output = without_padding(output, count)

The functions for a mesh add no rows then: their parts are uneven. In a call of a group, the view of
the call keeps the padding, and the collect function removes it.
"""

from __future__ import annotations

from typing import cast

import torch

from quadriga.protocol import DataProto
from quadriga.single_controller.call import GroupView, Split
from quadriga.single_controller.padding import Padding

PADDING = "_padding_size_key_x123d"
"""verl's key."""


def with_count(view: GroupView, split: Split) -> Split:
    """Return split arguments without the field that marks padding, and with the rows added."""
    padding = view.memo.get("padding")
    if not isinstance(padding, Padding):
        return split
    args, kwargs = split
    for parts in (*args, *kwargs.values()):
        for part in parts:
            if isinstance(part, DataProto):
                part.non_tensor_batch.pop(padding.field, None)
    added: object = padding.parts * padding.part_rows - padding.rows
    return cast(Split, (args, {**kwargs, PADDING: added}))


def with_uneven_parts(view: GroupView, split: Split) -> Split:
    """Return split arguments without the rows that are padding."""
    padding = view.memo.get("padding")
    if not isinstance(padding, Padding):
        return split
    real: dict[int, object] = {}  # ranks that receive the same part still do

    def of(part: object) -> object:
        if not isinstance(part, DataProto) or padding.field not in part.non_tensor_batch:
            return part
        if id(part) not in real:
            marked = torch.from_numpy(part.non_tensor_batch[padding.field].astype(bool))
            kept = part[~marked]
            kept.non_tensor_batch.pop(padding.field)
            real[id(part)] = kept
        return real[id(part)]

    args, kwargs = split
    return (
        tuple([of(part) for part in parts] for parts in args),
        {name: [of(part) for part in parts] for name, parts in kwargs.items()},
    )


def without_padding(output: object, count: int) -> object:
    """Return a batch or a list of results without its last `count` entries."""
    if not count or not isinstance(output, DataProto | list):
        return output
    return output[:-count]
