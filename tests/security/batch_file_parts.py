"""Batch files in parts, so that tests can forge one part and compute the digest again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quadriga.errors import DataError
from quadriga.protocol import DataProto

METADATA = {"format": "quadriga batch", "version": "2"}


def sample_batch() -> DataProto:
    """A small batch with every kind of field and value that has bytes."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.jagged)
    return DataProto.from_dict(
        {"x": torch.arange(6).reshape(2, 3), "b": torch.tensor([True, False]), "rag": ragged},
        {
            "o": [{"t": torch.ones(2).bfloat16(), "s": {1, 2}}, (b"bytes", None, 2.5)],
            "n": np.array(["ab", "c"]),
            "image": [Image.new("RGB", (3, 2), (1, 2, 3)), Image.new("P", (2, 2))],
        },
        {"lr": 0.1, "deep": [{"a": np.arange(2)}], "big": 2**70, "text": "für"},
    )


@dataclass
class Parts:
    """A batch file in parts. `structure`: JSON; `fields`: (name, dtype, shape, bytes)."""

    structure: object
    fields: list[tuple[str, str, list[int], bytes]] = field(default_factory=list)
    nested: bytes = b""
    metadata: dict[str, str] = field(default_factory=lambda: dict(METADATA))

    @staticmethod
    def of(content: bytes) -> Parts:
        """Return the parts of a valid file."""
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        data = content[8 + length :]
        metadata = header.pop("__metadata__")
        found = {
            name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }
        structure = json.loads(found.pop("structure")[2])
        nested, _ = found.pop("nested")[2], found.pop("sha256")
        return Parts(structure, [(name, *entry) for name, entry in found.items()], nested, metadata)

    def header(self, structure: bytes) -> dict[str, dict]:
        """Return the header that describes these parts."""
        entries = [
            ("structure", "U8", [len(structure)], structure),
            *self.fields,
            ("nested", "U8", [len(self.nested)], self.nested),
            ("sha256", "U8", [32], bytes(32)),
        ]
        header: dict[str, dict] = {"__metadata__": self.metadata}
        at = 0
        for name, dtype, shape, data in entries:
            offsets = [at, at := at + len(data)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        return header

    def content(self, structure: bytes | None = None, header: bytes | None = None) -> bytes:
        """Return a file with a valid digest; of another structure or header if they are given."""
        if structure is None:
            structure = json.dumps(self.structure).encode("utf-8", "surrogatepass")
        if header is None:
            header = json.dumps(self.header(structure)).encode()
        data = structure + b"".join(entry[3] for entry in self.fields) + self.nested
        return signed(len(header).to_bytes(8, "little") + header + data + bytes(32))


def signed(content: bytes) -> bytes:
    """Return the content with the digest of everything before its last 32 bytes."""
    return content[:-32] + hashlib.sha256(content[:-32]).digest()


def saved(data: DataProto, path: Path) -> bytes:
    """Return the bytes of a saved batch."""
    data.save_to_disk(path)
    return path.read_bytes()


def with_value(value: object, nested: bytes = b"") -> bytes:
    """Return the file of a batch without fields, whose setting `v` has this JSON."""
    return Parts({"tensors": None, "arrays": [], "meta_info": {"dict": {"v": value}}},
                 nested=nested).content()  # fmt: skip


def with_tensor(value: object, dtype: str = "U8", shape: list[int] | None = None,
                data: bytes = b"") -> bytes:  # fmt: skip
    """Return the file of a batch of two rows with one field, whose JSON is given."""
    tree = {"tensordict": [[2], None, None, [["x", value]]]}
    return Parts({"tensors": tree, "arrays": [], "meta_info": {"dict": {}}},
                 [("0 x", dtype, shape or [len(data)], data)]).content()  # fmt: skip


def refused(path: Path, content: bytes, match: str | None = None) -> None:
    """Check that a file is refused in one line that names it, and that nothing else was written."""
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        DataProto.load_from_disk(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.path == str(path) and "\n" not in str(caught.value)
    assert sorted(path.parent.iterdir()) == [path]
