"""A batch in one file of the format that `batch_file` describes. No pickle is written or read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
from tensordict import TensorDict

from quadriga.errors import FieldError
from quadriga.protocol.batch_file.container import Input, Output, opened, write_file
from quadriga.protocol.batch_file.decode_values import Decoder
from quadriga.protocol.batch_file.encode_values import Encoder
from quadriga.protocol.batch_file.limits import (
    Json,
    MalformedError,
    expect_object,
    expect_pairs,
    expect_text,
)
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.column import local_value
from quadriga.protocol.columns.contents import ArrayHalf, Contents, MetaInfo


def save(contents: Contents, filepath: str | Path) -> None:
    """Write all fields and `meta_info`; fetches remote fields.

    The file appears complete or not at all. Raises `FieldError` naming the field and the type that
    a file does not support, `InputError` if the file cannot be written.
    """
    batch, arrays, meta = contents
    halves.prefetch(batch, arrays, None)
    output = Output()
    encoder = Encoder(output)
    tensors: Json = None
    if batch is not None:
        fields = {key: local_value(c) for key, c in halves.tensor_columns(batch).items()}
        device = None if batch.device is None else batch.device.type
        pairs = [[_name(key), encoder.field(key, value)] for key, value in fields.items()]
        tensors = {"tensordict": [list(batch.batch_size), device, None, pairs]}
    columns = {key: local_value(c) for key, c in halves.array_columns(arrays).items()}
    structure: Json = {
        "tensors": tensors,
        "arrays": [[_name(key), encoder.field(key, value)] for key, value in columns.items()],
        "meta_info": _settings(encoder, meta),
    }
    write_file(Path(filepath), structure, output)


def _settings(encoder: Encoder, meta: MetaInfo) -> Json:
    if type(meta) not in (dict, OrderedDict):
        raise FieldError(
            f"meta_info is a {type(meta).__qualname__}; a batch file expects a dict",
            field="meta_info",
        )
    pairs = [[encoder.setting_key(key), encoder.setting(key, meta[key])] for key in meta]
    return {"pairs" if type(meta) is dict else "ordered": pairs}


def _name(key: object) -> str:
    if type(key) is not str:
        raise FieldError(
            f"field {key!r} has a name of type {type(key).__name__}; a batch file expects a str",
            field=str(key),
        )
    return key


def load(filepath: str | Path) -> Contents:
    """Read a file of `save`.

    Tensors are placed on the type of device that they had, if this process has one. Raises
    `DataError` for a file of another format, of an earlier version, and for one that is damaged.
    """
    with opened(Path(filepath)) as source:
        contents = _contents(source)
        source.check_read()
        halves.check(contents)
    return contents


def _contents(source: Input) -> Contents:
    tensors, arrays, meta = expect_object(source.structure, "tensors", "arrays", "meta_info")
    decoder = Decoder(source)
    batch = None if tensors is None else decoder.field(tensors)
    if batch is not None and not isinstance(batch, TensorDict):
        raise MalformedError("the tensors of the batch are no TensorDict")
    columns: ArrayHalf = {}
    for key, raw in expect_pairs(arrays):
        value = decoder.field(raw)
        if not isinstance(value, np.ndarray) or key in columns:
            raise MalformedError("a field of non_tensor_batch occurs twice or is no array")
        columns[expect_text(key)] = value
    settings = decoder.value(meta)
    if not isinstance(settings, dict):
        raise MalformedError("meta_info is no dict")
    return Contents(batch, columns, settings)
