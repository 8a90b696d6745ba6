"""Batch files from anyone: a valid batch or a `DataError` that names the file; no code runs.

Every case has a row in the table of docs/security.md. Forged files have a valid digest.
"""

import copy
import hashlib
import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tensordict import TensorDict

from quadriga.errors import DataError, FieldError, InputError
from quadriga.protocol import DataProto

Entry = tuple[str, list[int], bytes]
METADATA = {"format": "quadriga batch", "version": "3"}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "batch"


def sample_batch() -> DataProto:
    """A small batch with every kind of field."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)], layout=torch.jagged)
    return DataProto.from_dict(
        {
            "x": torch.arange(6).reshape(2, 3),
            "b": torch.tensor([True, False]),
            "rag": ragged,
            "sub": TensorDict({"k": torch.arange(2).bfloat16()}, [2]),
        },
        {"o": [{"a": [1, None]}, "text"], "t": np.array(["ab", "c"]), "n": np.arange(2.0)},
        {"lr": 0.1, "deep": [{"a": [2.5]}], "text": "für"},
    )


def forge(
    structure: object, entries: dict[str, Entry] | None = None, header: dict | None = None
) -> bytes:
    """Return a file of these parts with a valid digest. `header`: entries of it to replace."""
    text = structure if isinstance(structure, bytes) else json.dumps(structure).encode()
    table: dict[str, object] = {"__metadata__": METADATA}
    data, at = b"", 0
    parts = {"structure": ("U8", [len(text)], text), **(entries or {}),
             "sha256": ("U8", [32], bytes(32))}  # fmt: skip
    for name, (dtype, shape, content) in parts.items():
        offsets = [at, at := at + len(content)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    for name, change in (header or {}).items():
        table[name] = {**table.get(name, {}), **change} if isinstance(change, dict) else change
    encoded = json.dumps(table).encode()
    return signed(len(encoded).to_bytes(8, "little") + encoded + data)


def signed(content: bytes) -> bytes:
    """Return the content with the digest of everything before its last 32 bytes."""
    return content[:-32] + hashlib.sha256(content[:-32]).digest()


def parts_of(content: bytes) -> tuple[dict, dict[str, Entry]]:
    """Return the structure and the entries of a file: the inverse of `forge`."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    entries = {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items() if name not in ("__metadata__", "sha256")
    }  # fmt: skip
    return json.loads(entries.pop("structure")[2]), entries


def with_field(field: object, entry: Entry = ("U8", [16], b"\xff" * 16)) -> bytes:
    """Return the file of a batch of two rows with one field, whose part of the structure is
    given."""
    tree = ["tree", [2], None, {"x": field}]
    return forge({"tensors": tree, "arrays": {}, "meta_info": {}}, {"0 x": entry})


def with_array(field: object, entry: Entry = ("U8", [16], b"\xff" * 16)) -> bytes:
    return forge({"tensors": None, "arrays": {"x": field}, "meta_info": {}}, {"0 x": entry})


def saved(data: DataProto, path: Path) -> bytes:
    data.save_to_disk(path)
    return path.read_bytes()


def refused(path: Path, content: bytes, match: str = "is damaged: ") -> None:
    """Check that a file is refused in one line that names it, and that nothing else was written."""
    path.write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        DataProto.load_from_disk(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.path == str(path) and "\n" not in str(caught.value)
    assert sorted(path.parent.iterdir()) == [path]


class Payload:
    """Unpickling it creates a folder."""

    def __reduce__(self):
        return os.system, ("mkdir executed",)


def test_pickles_are_not_executed(path):
    pickled = pickle.dumps(Payload())
    for content in (b"quadriga batch 1\n" + pickled, pickled):
        refused(path, content, "no file of save_to_disk")
    refused(path, with_array(["array", "0 x"], ("O", [len(pickled)], pickled)))


def test_a_batch_file_is_a_safetensors_file(path):
    """The library reads it: lengths, offsets and dtypes of the header are correct."""
    content = saved(sample_batch(), path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == METADATA
        by_field = {name.partition(" ")[2]: name for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor(by_field["x"]).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor(by_field["sub.k"]).dtype == torch.bfloat16
    length = int.from_bytes(content[:8], "little")
    sizes = {"I64": 8, "F64": 8, "F32": 4, "U32": 4, "BF16": 2, "U8": 1, "BOOL": 1}
    for entry in list(json.loads(content[8 : 8 + length]).values())[1:]:
        assert (length + 8 + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


def test_every_flipped_byte_is_found(path):
    content = saved(sample_batch(), path)
    for at in range(0, len(content), 7):
        refused(path, content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])


def test_every_length_that_is_too_short_or_too_long_is_found(path):
    content = saved(sample_batch(), path)
    for length in [*range(0, 100, 9), *range(100, len(content), 53), len(content) - 1]:
        refused(path, content[:length])
    refused(path, content + b"\0", "no file of save_to_disk")
    refused(path, content[:-32] + bytes(64) + content[-32:], "no file of save_to_disk")


def test_other_formats_are_named_as_such(path):
    for metadata in ({"format": "pt"}, METADATA | {"version": "2"}):
        refused(path, forge({}, header={"__metadata__": metadata}), "not of DataProto.save_to_disk")
    for content in (b"", b"\0" * 100, b"PAR1" * 9, b"{" * 20, (2**40).to_bytes(8, "little")):
        refused(path, content, "no file of save_to_disk")


def test_a_folder_a_pipe_and_nothing_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "absent", "nul\0l"):
        with pytest.raises(DataError, match="no batch file"):
            DataProto.load_from_disk(tmp_path / name)


def test_the_older_file_is_kept_when_the_disk_is_full(path, monkeypatch):
    before = saved(sample_batch(), path)

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quadriga.files.HashedFile.write", full)
    with pytest.raises(InputError, match=r"cannot write .*batch: No space left on device"):
        DataProto(meta_info={"new": 1}).save_to_disk(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "/", "a\0b", "\ud800", "x" * 300, "absent/x"])
def test_a_file_that_cannot_be_written_is_an_input_error(name, path):
    with pytest.raises(InputError, match="cannot write"):
        DataProto().save_to_disk(name)
    with pytest.raises(DataError):
        DataProto.load_from_disk(name)
    assert list(path.parent.iterdir()) == []


def test_a_link_in_place_of_the_file_is_replaced(tmp_path):
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "batch").symlink_to(tmp_path / "secret")
    DataProto().save_to_disk(tmp_path / "batch")
    assert (tmp_path / "secret").read_text() == "kept" and not (tmp_path / "batch").is_symlink()


def test_what_cannot_be_read_back_is_not_written(path):
    two = torch.tensor([2], dtype=torch.uint8).view(torch.bool)
    beyond = np.array([0x7FFFFFFF], np.uint32).view("<U1")
    for tensors, arrays, reason in (
        ({"x": two}, {}, "a boolean that is neither 0 nor 1"),
        ({}, {"x": two.numpy()}, "a boolean that is neither 0 nor 1"),
        ({}, {"x": beyond}, "a text with a character outside Unicode"),
    ):
        with pytest.raises(FieldError, match=f"'x' contains {reason}"):
            DataProto.from_dict(tensors, arrays).save_to_disk(path)
    assert not path.exists()


OFFSETS = ["jagged", "0 x", "1 o", 1, "cpu"]
FIELDS = {
    "an entry that does not exist": with_field(["tensor", "0 y", "cpu"]),
    "an entry without a field": with_field(["tree", [2], None, {}]),
    "a device that is a module": with_field(["tensor", "0 x", "os"], ("U8", [2], b"ab")),
    "another length": with_field(["tensor", "0 x", "cpu"]),
    "booleans of other bytes": with_field(["tensor", "0 x", "cpu"], ("BOOL", [2], b"\1\2")),
    "texts outside Unicode": with_array(["text", "0 x"], ("U32", [2, 2], b"\xff" * 16)),
    "fewer objects than the shape": with_array(["objects", [2**40], []]),
    "a shape that overflows": with_array(["objects", [0, 2**62, 2**62], []]),
    "lengths that differ": forge(
        {"tensors": ["tree", [2], None, {}], "arrays": {"a": ["objects", [1], [1]]},
         "meta_info": {}}
    ),
    "100,000 lists": forge(b"[" * 100_000 + b"]" * 100_000),
    "no JSON": forge(b"{"),
    "an integer of 100,000 digits": forge(b"9" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_forged_structure_is_refused(name, path):
    refused(path, FIELDS[name])


@pytest.mark.parametrize("ends", [[0, 3, 2], [1, 2], [0, 1], [0, -1, 2], []])
def test_forged_offsets_of_rows_are_refused(ends, path):
    offsets = ("I64", [len(ends)], np.array(ends, np.int64).tobytes())
    tree = ["tree", [len(ends) - 1], None, {"x": OFFSETS}]
    entries = {"1 o": offsets, "0 x": ("U8", [2], b"ab")}
    refused(path, forge({"tensors": tree, "arrays": {}, "meta_info": {}}, entries), "offsets")


def test_an_entry_is_read_once(path):
    """One entry for many fields would be a small file that fills the memory."""
    tensor = ["tensor", "0 x", "cpu"]
    tree = ["tree", [2], None, {"a": tensor, "b": tensor}]
    entries = {"0 x": ("U8", [2], b"ab")}
    refused(path, forge({"tensors": tree, "arrays": {}, "meta_info": {}}, entries))


EMPTY = {"tensors": None, "arrays": {}, "meta_info": {}}
SIZE = len(json.dumps(EMPTY))
HEADERS = {
    "an overlap": {"sha256": {"data_offsets": [SIZE - 1, SIZE + 31]}},
    "offsets beyond the file": {"more": {"dtype": "U8", "shape": [10**15],
                                         "data_offsets": [SIZE + 32, SIZE + 32 + 10**15]}},
    "reversed offsets": {"structure": {"data_offsets": [SIZE, 0]}},
    "a shape that is larger than its bytes": {"structure": {"shape": [2**40]}},
    "a shape that overflows": {"structure": {"shape": [2**40, 2**40]}},
    "a million dimensions": {"structure": {"shape": [SIZE, *[1] * 10**6]}},
    "the dtype object": {"structure": {"dtype": "O"}},
    "an entry behind the digest": {"more": {"dtype": "U8", "shape": [0],
                                            "data_offsets": [SIZE + 32, SIZE + 32]}},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_is_refused(name, path):
    refused(path, forge(EMPTY, header=HEADERS[name]))


def test_files_that_are_not_forged_are_valid(path):
    """The others are refused for what they say."""
    path.write_bytes(forge(EMPTY))
    assert len(DataProto.load_from_disk(path)) == 0
    path.write_bytes(with_array(["array", "0 x"]))
    assert DataProto.load_from_disk(path).non_tensor_batch["x"].tolist() == [255] * 16
    path.write_bytes(with_field(["tensor", "0 x", "cpu"], ("U8", [2, 2], bytes(4))))
    assert DataProto.load_from_disk(path).batch["x"].tolist() == [[0, 0], [0, 0]]
    content = saved(sample_batch(), path)
    path.write_bytes(forge(*parts_of(content)))
    assert len(DataProto.load_from_disk(path).union(sample_batch())) == 2


STRANGE = [None, True, -1, 0, 2, 2**63, 2**70, 1.5, "", "cpu", "0 x", "jagged", [], [2], {}, [[]]]


def places(value: object) -> Iterator[tuple[dict | list, object]]:
    """Yield the container and the key of each value within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def test_changed_files_give_a_batch_or_this_error(path):
    """A value of the structure or of the header is replaced at random, with a valid digest."""
    content = saved(sample_batch(), path)
    draw = random.Random(0)
    for _ in range(400):
        structure, entries = copy.deepcopy(parts_of(content))
        held = {name: [dtype, list(shape)] for name, (dtype, shape, _) in entries.items()}
        container, key = draw.choice([*places(structure), *places(held)])
        container[key] = draw.choice(STRANGE)
        header = {k: {"dtype": v[0], "shape": v[1]} for k, v in held.items() if
                  isinstance(v, list) and len(v) == 2}  # fmt: skip
        path.write_bytes(forge(structure, entries, header))
        try:
            assert len(DataProto.load_from_disk(path)) in (0, 2)
        except DataError as error:
            assert str(path) in str(error) and "\n" not in str(error)
