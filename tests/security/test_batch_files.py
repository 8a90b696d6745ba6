"""Batch files from anyone: a valid batch or a `DataError` that names the file; no code runs.

Every case has a row in the table of docs/security.md.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from batch_file_parts import Parts, refused, sample_batch, saved, signed, with_value
from safetensors import safe_open

from quadriga.errors import DataError, FieldError, InputError
from quadriga.protocol import DataProto
from quadriga.protocol.batch_file import container, plain_values
from quadriga.protocol.ops import disk
from quadriga.protocol.values.decode import EncodedTensor
from quadriga.protocol.values.field_spec import FieldSpec


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "batch"


class Payload:
    """Unpickling it creates a folder."""

    def __reduce__(self):
        return os.system, ("mkdir executed",)


def parcel_of_objects() -> bytes:
    """A file of the former format, whose stream holds rows that were pickled on their own."""
    inner = np.frombuffer(pickle.dumps(Payload()), np.uint8)
    parcel = EncodedTensor(FieldSpec("objects", "object"), (inner, np.array([0, len(inner)])), 1)
    file = io.BytesIO(b"quadriga batch 1\n")
    file.seek(0, 2)
    for part in (([], []), None, {"x": parcel}):
        file.write(pickle.dumps(part, protocol=5))
    return file.getvalue()


PICKLES = {
    "the former format with a reducer": b"quadriga batch 1\n" + pickle.dumps(Payload()),
    "the former format with a parcel of objects": parcel_of_objects(),
    "a pickle": pickle.dumps(Payload()),
    "a pickle in `nested`": with_value({"bytes": 3}, pickle.dumps(Payload())),
    "a pickle as an object array": with_value(
        {"array": ["|O", [1], None]}, pickle.dumps(np.array([Payload()], dtype=object))
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_are_not_executed(name, path):
    refused(path, PICKLES[name])


def test_the_former_format_is_named_with_what_to_do(path):
    refused(path, PICKLES["the former format with a reducer"], "earlier version, which is a pickle")


def test_no_unpickler_runs_and_none_is_imported(path, monkeypatch):
    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("unpickled"))
    saved(sample_batch(), path)
    assert len(DataProto.load_from_disk(path)) == 2
    unsafe = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    modules = [*Path(container.__file__).parent.glob("*.py"), Path(disk.__file__)]
    assert len(modules) > 6
    for module in modules:
        nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
        names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not unsafe & names


def test_a_batch_file_is_a_safetensors_file(path):
    """The library reads it: lengths, offsets and dtypes of the header are correct."""
    saved(sample_batch(), path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "quadriga batch", "version": "2"}
        by_field = {name.partition(" ")[2]: name for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor(by_field["x"]).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor(by_field["b"]).tolist() == [True, False]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert (length + 8) % 64 == 0  # the items of every entry are aligned
    sizes = {"I64": 8, "F32": 4, "U8": 1, "BOOL": 1}
    for entry in list(header.values())[1:]:
        assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0


def test_every_flipped_byte_is_found(path):
    content = saved(sample_batch(), path)
    for at in range(0, len(content), 7):
        refused(path, content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])


def test_every_length_that_is_too_short_or_too_long_is_found(path):
    content = saved(sample_batch(), path)
    for length in [*range(0, 100), *range(100, len(content), 53), len(content) - 1]:
        refused(path, content[:length])
    refused(path, content + b"\0", "the header describes")
    refused(path, content + content)
    refused(path, content[:-32] + bytes(64) + content[-32:])


def test_parts_of_another_file_are_found(path):
    content = saved(sample_batch(), path)
    other = sample_batch()
    other.batch["x"] += 1
    twin = saved(other, path)
    assert len(twin) == len(content)
    refused(path, content[:-32] + twin[-32:], "SHA-256")
    refused(path, twin[:-32] + content[-32:], "SHA-256")
    middle = len(content) // 2
    refused(path, content[:middle] + content[middle + 64 :] + content[middle : middle + 64])


def test_other_formats_are_named_as_such(path):
    other = Parts(None, metadata={"format": "pt"}).content()
    refused(path, other, "is a safetensors file, but none of DataProto")
    later = Parts(None, metadata={"format": "quadriga batch", "version": "3"}).content()
    refused(path, later, "version 2 of the format")
    for content in (b"", b"\0" * 100, b"PAR1" * 9, b"{" * 20, b"\x93NUMPY\x01\x00v\x00{"):
        refused(path, content, r"is not a file of DataProto\.save_to_disk|it is truncated")
    for length in (0, 2**40, 2**64 - 1):
        content = length.to_bytes(8, "little") + b"{}" + bytes(64)
        refused(path, content, "a header of .* bytes")


def test_a_folder_a_pipe_and_nothing_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (".", "pipe", "absent", "nul\0l"):
        with pytest.raises(DataError, match="no batch file"):
            DataProto.load_from_disk(tmp_path / name)


def test_keys_of_one_hash_are_refused(path):
    """A dict of 100,000 such keys takes minutes: Python's hashes of numbers are known."""
    keys = [{"int": hex(7 + k * (2**61 - 1))} for k in range(2000)]
    refused(path, with_value({"set": keys}), "have one hash")
    refused(path, with_value({"pairs": [[key, 1] for key in keys]}), "have one hash")
    path.write_bytes(with_value({"set": list(range(5000))}))
    assert DataProto.load_from_disk(path).meta_info["v"] == {*range(5000)}


def test_a_fraction_within_the_limit_is_held_and_others_are_refused(path):
    largest = Fraction(2**plain_values.MAX_FRACTION_BITS - 1, 2)
    saved(DataProto(meta_info={"f": largest}), path)
    assert DataProto.load_from_disk(path).meta_info == {"f": largest}
    with pytest.raises(FieldError, match=r"meta_info\['f'\] contains a fraction"):
        DataProto(meta_info={"f": largest * 4}).save_to_disk(path)


def test_the_older_file_is_kept_when_the_disk_is_full(path, monkeypatch):
    before = saved(sample_batch(), path)

    def full(file, data):
        file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container, "_write_all", full)
    with pytest.raises(InputError, match=r"cannot write .*batch: No space left on device"):
        DataProto(meta_info={"new": 1}).save_to_disk(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*absent/x: No such file"):
        DataProto().save_to_disk(tmp_path / "absent" / "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*folder: "):
        DataProto().save_to_disk(tmp_path / "folder")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["", "/", "a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_file_can_have_is_an_input_error(name):
    with pytest.raises(InputError, match="cannot write"):
        DataProto().save_to_disk(name)
    with pytest.raises(DataError):
        DataProto.load_from_disk(name)


def test_a_file_can_have_the_longest_name(tmp_path):
    path = tmp_path / ("x" * 255)
    DataProto(meta_info={"a": 1}).save_to_disk(path)
    assert DataProto.load_from_disk(path).meta_info == {"a": 1}
    assert [*tmp_path.iterdir()] == [path]


NOT_READ_BACK = {
    "a tensor as a key": DataProto(meta_info={torch.ones(1): 1}),
    "a boolean that is neither 0 nor 1": DataProto.from_dict(
        {"x": torch.tensor([2], dtype=torch.uint8).view(torch.bool)}
    ),
    "a text with a character outside Unicode": DataProto.from_dict(
        {"y": torch.ones(1)}, {"x": np.array([0x7FFFFFFF], np.uint32).view("<U1")}
    ),
}


@pytest.mark.parametrize("reason", NOT_READ_BACK)
def test_what_cannot_be_read_back_is_not_written(reason, path):
    with pytest.raises(FieldError, match=f"contains {reason}"):
        NOT_READ_BACK[reason].save_to_disk(path)
    assert not path.exists()


def test_a_file_that_ends_while_it_is_read_is_refused(path, monkeypatch):
    """The digest was right; then another process cuts the file."""
    content = saved(sample_batch(), path)
    check = container._check_digest

    def cut(file, size):
        check(file, size)
        os.truncate(path, len(content) - 600)

    monkeypatch.setattr(container, "_check_digest", cut)
    refused(path, content, "it ends early")


def test_a_link_in_place_of_the_file_is_replaced(tmp_path):
    (tmp_path / "secret").write_text("kept")
    (tmp_path / "batch").symlink_to(tmp_path / "secret")
    DataProto().save_to_disk(tmp_path / "batch")
    assert (tmp_path / "secret").read_text() == "kept" and not (tmp_path / "batch").is_symlink()


def test_large_tensors_are_written_and_read_without_copies(path, monkeypatch):
    """One allocation for each tensor when it is read, none when it is written."""
    data = DataProto.from_dict({"x": torch.zeros(64, 1 << 14), "y": torch.ones(64, 1 << 14)})
    pieces, made = [], []
    write = container._write_all
    monkeypatch.setattr(container, "_write_all", lambda f, d: (pieces.append(d), write(f, d))[1])
    saved(data, path)
    addresses = {np.frombuffer(p, np.uint8).ctypes.data for p in pieces if len(p) > 1 << 20}
    assert addresses == {data.batch[key].data_ptr() for key in "xy"}
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(a) or empty(*a, **k))
    back = DataProto.load_from_disk(path)
    assert made == [(1 << 22,), (1 << 22,)] and int(back.batch["y"].sum()) == 1 << 20


def test_the_digest_is_that_of_all_bytes_before_it(path):
    content = saved(sample_batch(), path)
    assert signed(content) == content
    assert DataProto.load_from_disk(path).meta_info["text"] == "für"
