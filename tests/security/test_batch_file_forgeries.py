"""Batch files with a valid digest whose structure, header or values were forged.

Each is refused with a `DataError` before memory is allocated for what the file does not have.
"""

from __future__ import annotations

import json

import pytest
from batch_file_parts import Parts, refused, with_tensor, with_value

from quadriga.protocol import DataProto


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "batch"


def nest(depth: int, before: str, after: str) -> str:
    return before * depth + "1" + after * depth


TENSOR = ["uint8", [2, 2], "cpu", "0 x"]
WITHIN = {
    "too few parts": {"tensor": ["uint8", [2]]},
    "unknown tag": {"eval": "1"},
    "two tags": {"tuple": [], "list": []},
    "no tag": {},
    "class as a tag": {"builtins.eval": ["1"]},
    "object dtype": {"array": ["|O", [1], None]},
    "object dtype by another name": {"array": ["O", [1], None]},
    "object within a structure": {"array": [
        {"fields": [["a", "|O", [], 0]], "size": 8, "aligned": False}, [1], None]},
    "fields that overlap the end": {"array": [
        {"fields": [["a", "<i8", [], 4]], "size": 8, "aligned": False}, [1], None]},
    "fields that overlap": {"array": [
        {"fields": [["a", "<i8", [], 0], ["b", "<i8", [], 0]], "size": 8, "aligned": False},
        [2], None]},
    "a field beyond the structure whose end overflows": {"array": [
        {"fields": [["a", "|b1", [], 2**31 - 1]], "size": 8, "aligned": False}, [1], None]},
    "a text beyond the structure whose end overflows": {"array": [
        {"fields": [["a", "|V1", [], 4], ["b", "<U2", [], 2**31 - 1]], "size": 29,
         "aligned": True}, [1], None]},
    "long double": {"array": ["<f16", [1], None]},
    "a dtype with a comma": {"array": ["i4,O", [1], None]},
    "a dtype without a size": {"array": ["<U0", [10**9], None]},
    "a dtype of gigabytes": {"array": ["|V999999999", [1], None]},
    "a dtype of torch that is a function": {"tensor": ["load", [2], "cpu", None]},
    "a quantized dtype": {"tensor": ["qint8", [2], "cpu", None]},
    "a device that is a module": {"tensor": ["uint8", [2], "os", None]},
    "huge shape": {"tensor": ["float32", [2**40], "cpu", None]},
    "huge array": {"array": ["<f8", [2**20, 2**20], None]},
    "huge object array": {"objects": [[2**40], []]},
    "huge object array without items": {"objects": [[0, 2**62, 2**62], []]},
    "overflowing shape": {"tensor": ["float32", [2**32, 2**32], "cpu", None]},
    "overflowing shape of no items": {"array": ["<f8", [0, 2**62, 2**62], None]},
    "negative shape": {"tensor": ["uint8", [-1], "cpu", None]},
    "two negative dimensions": {"array": ["|u1", [-1, -16], None]},
    "a shape of floats": {"array": ["|u1", [16.0], None]},
    "a shape of booleans": {"array": ["|u1", [True], None]},
    "a shape of text": {"array": ["|u1", "16", None]},
    "65 dimensions": {"array": ["|u1", [1] * 65, None]},
    "a million dimensions": {"tensor": ["uint8", [1] * 10**6, "cpu", None]},
    "negative length": {"bytes": -1},
    "huge length": {"bytes": 2**62},
    "more bytes than there are": {"bytes": 17},
    "fewer bytes than there are": {"bytes": 15},
    "an entry that does not exist": {"tensor": ["uint8", [16], "cpu", "0 y"]},
    "the structure as an entry": {"tensor": ["uint8", [16], "cpu", "structure"]},
    "the bytes of rows as an entry": {"tensor": ["uint8", [16], "cpu", "nested"]},
    "the digest as an entry": {"tensor": ["uint8", [32], "cpu", "sha256"]},
    "booleans of other bytes": {"tensor": ["bool", [16], "cpu", None]},
    "booleans of other bytes in an array": {"array": ["|b1", [16], None]},
    "text outside Unicode": {"array": ["<U4", [1], None]},
    "text outside Unicode, big-endian": {"array": [">U4", [1], None]},
    "text outside Unicode in a structure": {"array": [
        {"fields": [["a", "<U4", [], 0]], "size": 16, "aligned": False}, [1], None]},
    "text outside Unicode in a scalar": {"scalar": ["<U1", "ffffffff"]},
    "offsets that decrease": {"jagged": ["uint8", [0], "cpu", 1, 1, None, None]},
    "a ragged dimension that does not exist": {"jagged": ["uint8", [8], "cpu", 9, 0, None, None]},
    "rows of the smallest integer": {"jagged": ["uint8", [8], "cpu", 1, -(2**63), None, None]},
    "a key twice": {"pairs": [[1, 1], [True, 2]]},
    "a tensor as a key": {"pairs": [[{"tensor": ["uint8", [16], "cpu", None]}, 1]]},
    "a list as a key": {"pairs": [[[1], 1]]},
    "a dict in a set": {"set": [{"dict": {}}]},
    "a set with one element twice": {"set": [1, 1.0]},
    "an integer that is no number": {"int": "__import__('os')"},
    "an integer as a number": {"int": 5},
    "a fraction of zero": {"fraction": ["0x1", "0x0"]},
    "a fraction of a million digits": {"fraction": ["1" * 10**6, "0x3"]},
    "a decimal that is none": {"decimal": "1 + 1"},
    "a decimal beyond its exponent": {"decimal": "1e" + "9" * 30},
    "a date in year 0": {"date": [0, 1, 1]},
    "a date in year 10^12": {"date": [10**12, 1, 1]},
    "a time zone of a year": {"timezone": [[365, 0, 0], None]},
    "a time zone of another module": {"timezone": "os"},
    "a fold of 2": {"time": [1, 1, 1, 1, 2, None]},
    "a UUID that is too long": {"uuid": ["0" * 40, 0]},
    "a range with step 0": {"range": ["0x0", "0x1", "0x0"]},
    "a float of four bytes": {"float": "00000000"},
    "a slice of two": {"slice": [1, 2]},
    "an image of a class that is none": {"image": [["Popen", "L", 1, 1, None], [{"dict": {}}]]},
    "an image of a lazy class": {"image": [["EpsImageFile", "L", 4, 4, None], [{"dict": {}}, ""]]},
    "an image of 10^18 pixels": {"image": [["Image", "L", 10**9, 10**9, None], [{"dict": {}}]]},
    "an image of a height without width": {"image": [["Image", "L", 0, 10**9, None],
                                                     [{"dict": {}}]]},
    "an image of negative size": {"image": [["Image", "L", -4, -4, None], [{"dict": {}}]]},
    "an image of an unknown mode": {"image": [["Image", "XYZ", 4, 4, None], [{"dict": {}}]]},
    "an image without its palette": {"image": [["Image", "P", 4, 4, None], [{"dict": {}}]]},
    "a palette of a megabyte": {"image": [["Image", "P", 4, 4, ["RGB", "00" * 2**20]],
                                          [{"dict": {}}]]},
    "an image with other attributes": {"image": [["Image", "L", 4, 4, None], [5]]},
    "a TensorDict whose entry is longer": {"tensordict": [[3], None, None, [
        ["a", {"tensor": ["uint8", [16], "cpu", None]}]]]},
    "a TensorDict with an array": {"tensordict": [[16], None, None, [
        ["a", {"array": ["|u1", [16], None]}]]]},
    "a TensorDict with a key twice": {"tensordict": [[8], None, None, [
        ["a", {"tensor": ["uint8", [8], "cpu", None]}],
        ["a", {"tensor": ["uint8", [8], "cpu", None]}]]]},
    "a TensorDict with a key that is a number": {"tensordict": [[16], None, None, [
        [1, {"tensor": ["uint8", [16], "cpu", None]}]]]},
    "a TensorDict of a negative size": {"tensordict": [[-1], None, None, []]},
    "a TensorDict of 2^70 rows": {"tensordict": [[2**70], None, None, []]},
    "a stack that is a number": {"stack": 3},
    "stacks of very many rows": [{"stack": [0] * 70_000}, {"stack": [0] * 70_000}],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_a_forged_value_is_refused(name, path):
    """16 bytes of `nested`, all 0xff: values of the right length reach the check of their bytes."""
    refused(path, with_value(WITHIN[name], b"\xff" * 16), "is damaged: ")


def test_a_value_of_these_bytes_is_loaded(path):
    """The forged values fail for what they say, not for how the file is written."""
    path.write_bytes(with_value({"array": ["|u1", [4, 4], None]}, b"\xff" * 16))
    assert DataProto.load_from_disk(path).meta_info["v"].tolist() == [[255] * 4] * 4
    path.write_bytes(with_tensor({"tensor": TENSOR}, "U8", [2, 2], bytes(4)))
    assert DataProto.load_from_disk(path).batch["x"].tolist() == [[0, 0], [0, 0]]


FIELDS = {
    "another length": (["uint8", [3, 2], "cpu", "0 x"], "U8", [2, 2], bytes(4)),
    "another dtype": (["float32", [2], "cpu", "0 x"], "I32", [2], bytes(8)),
    "a field that is text": ("text", "U8", [4], bytes(4)),
    "an array as a tensor": ({"array": ["|u1", [2, 2], "0 x"]}, "U8", [2, 2], bytes(4)),
    "an entry without a field": ({"tensor": ["uint8", [2, 0], "cpu", None]}, "U8", [4], bytes(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_forged_field_is_refused(name, path):
    value, *entry = FIELDS[name]
    value = {"tensor": value} if isinstance(value, list) else value
    refused(path, with_tensor(value, *entry), "is damaged: ")


def test_an_entry_is_read_once(path):
    """One entry for many fields would be a small file that fills the memory."""
    tree = {"tensordict": [[2], None, None, [["a", {"tensor": TENSOR}], ["b", {"tensor": TENSOR}]]]}
    parts = Parts({"tensors": tree, "arrays": [], "meta_info": {"dict": {}}},
                  [("0 x", "U8", [2, 2], bytes(4))])  # fmt: skip
    refused(path, parts.content(), "read twice")


LENGTHS = {
    "objects": ({"objects": [[3], [1, 2, 3]]}, b""),
    "numbers": ({"array": ["|u1", [3], None]}, b"abc"),
    "no dimension": ({"array": ["|u1", [], None]}, b"a"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_fields_of_different_lengths_are_refused(name, path):
    array, nested = LENGTHS[name]
    tree = {"tensordict": [[2], None, None, []]}
    structure = {"tensors": tree, "arrays": [["a", array]], "meta_info": {"dict": {}}}
    refused(path, Parts(structure, nested=nested).content(), "have the same length")


STRUCTURES = {
    "no JSON": "{",
    "empty": "",
    "a list": "[]",
    "another key": '{"tensors": null, "arrays": [], "meta_info": {"dict": {}}, "code": 1}',
    "a key twice": '{"tensors": null, "arrays": [], "arrays": [], "meta_info": {"dict": {}}}',
    "settings that are a list": '{"tensors": null, "arrays": [], "meta_info": []}',
    "a field twice": '{"tensors": null, "arrays": [["a", {"objects": [[0], []]}], '
                     '["a", {"objects": [[0], []]}]], "meta_info": {"dict": {}}}',
    "100,000 lists": nest(100_000, "[", "]"),
    "100,000 objects": nest(100_000, '{"a":', "}"),
    "600 lists in a setting": '{"tensors": null, "arrays": [], "meta_info": {"dict": {"a": '
                              + nest(600, "[", "]") + "}}}",
    "101 lists in a setting": '{"tensors": null, "arrays": [], "meta_info": {"dict": {"a": '
                              + nest(101, "[", "]") + "}}}",
    "an integer of 100,000 digits": "9" * 100_000,
    "NaN": '{"tensors": null, "arrays": [], "meta_info": {"dict": {"a": NaN}}}',
    "Infinity": '{"tensors": null, "arrays": [], "meta_info": {"dict": {"a": -Infinity}}}',
    "bytes that are no text": b'{"tensors": "\xff\xfe"}',
    "UTF-16": '{"tensors": null}'.encode("utf-16"),
    "two values": "{} {}",
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_forged_structure_is_refused(name, path):
    text = STRUCTURES[name]
    content = Parts(None).content(structure=text if isinstance(text, bytes) else text.encode())
    refused(path, content, "is damaged: ")


EMPTY = b'{"tensors": null, "arrays": [], "meta_info": {"dict": {}}}'.ljust(64)
"""The structure of a batch without fields, 64 bytes."""


def header_of(**changes: object) -> bytes:
    header = Parts(None).header(EMPTY)
    for name, entry in changes.items():
        header[name] = {**header.get(name, {}), **entry} if isinstance(entry, dict) else entry
    return json.dumps(header).encode()


META = b'{"__metadata__": {"format": "quadriga batch", "version": "2"}, '
HEADERS = {
    "an overlap": header_of(nested={"data_offsets": [60, 60]}),
    "a gap": header_of(nested={"data_offsets": [68, 68]}),
    "offsets beyond the file": header_of(nested={"data_offsets": [64, 10**15], "shape": [10**15]}),
    "negative offsets": header_of(nested={"data_offsets": [-64, 64]}),
    "reversed offsets": header_of(nested={"data_offsets": [64, 0]}),
    "offsets of floats": header_of(nested={"data_offsets": [64.0, 64.0]}),
    "three offsets": header_of(nested={"data_offsets": [64, 64, 64]}),
    "a shape that is larger than its bytes": header_of(nested={"shape": [2**40]}),
    "a shape that overflows": header_of(nested={"shape": [2**40, 2**40]}),
    "a negative shape": header_of(structure={"shape": [-64]}),
    "an unknown dtype": header_of(nested={"dtype": "O"}),
    "a structure of floats": header_of(structure={"dtype": "F64", "shape": [8]}),
    "an entry that is a number": header_of(nested=5),
    "an entry with another key": header_of(nested={"code": 1}),
    "an entry behind the digest": header_of(more={"dtype": "U8", "shape": [0],
                                                  "data_offsets": [96, 96]}),
    "no entries": META[:-2] + b"}",
    "a key twice": header_of()[:-1] + b', "nested": {"dtype": "U8", "shape": [0], '
                   b'"data_offsets": [64, 64]}}',
    "100,000 lists": META + b'"a": ' + nest(100_000, "[", "]").encode() + b"}",
    "no JSON": b"{" * 64,
    "a million digits": META + b'"a": ' + b"9" * 10**6 + b"}",
    "no text": b"{" + b"\xff" * 64,
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_forged_header_is_refused(name, path):
    refused(path, Parts(None).content(structure=EMPTY, header=HEADERS[name]), "is damaged: ")


def test_the_header_that_is_not_forged_is_valid(path):
    """The others are refused for what they say."""
    path.write_bytes(Parts(None).content(structure=EMPTY, header=header_of()))
    assert len(DataProto.load_from_disk(path)) == 0


DTYPES = [
    "|O",
    "O",
    "object",
    "<f16",
    "i4,O",
    "<U0",
    "|V0",
    "T",
    "f8",
    "<M8[0s]",
    "<M8[s]x",
    "(2,)O",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_come_from_a_list(dtype, path):
    """Before numpy reads them."""
    structure = {"fields": [["a", dtype, [], 0]], "size": 8, "aligned": False}
    for value in (dtype, structure):
        content = with_value({"array": [value, [1], None]}, b"\xff" * 16)
        refused(path, content, "no numpy dtype .* in a batch file")
