"""Batches in files: equal when they are loaded; files of another origin execute no code."""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from protocol_cases import shard
from tensordict import TensorDict

from quadriga.errors import DataError, FieldError
from quadriga.protocol import DataProto
from quadriga.protocol.values import operations


def full() -> DataProto:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    return DataProto.from_dict(
        {
            "half": torch.randn(3, 2).bfloat16(),
            "rag": torch.nested.nested_tensor(
                [torch.ones(i + 1, dtype=torch.complex64) for i in range(3)], layout=torch.jagged
            ),
            "sub": TensorDict({"k": torch.arange(3)}, [3]),
        },
        {
            "o": [{"t": torch.ones(2).bfloat16(), "s": {1, 2}}, None, datetime.date(2026, 1, 2)],
            "mixed": [np.float32(0.5), np.arange(3), picture],
            "n": np.arange(6).reshape(3, 2),
        },
        {"deep": [{"t": torch.tensor(1.5)}], "name": "run", "array": np.arange(3)},
    )


def test_a_saved_batch_is_loaded_equal(tmp_path, store):
    original = full()
    for data in (full, lambda: shard(full(), 2)):
        path = tmp_path / "batch.bin"
        saved = data()
        saved.batch["half"] = original.batch["half"]
        saved.save_to_disk(path)
        back = DataProto.load_from_disk(str(path))
        assert len(back) == 3 and len(back.union(original)) == 3
        assert back.batch["half"].dtype == torch.bfloat16
        back.batch["half"].zero_()
        back.non_tensor_batch["n"][0] = 5
        assert operations.same(back.meta_info, original.meta_info)
    assert sorted(os.listdir(tmp_path)) == ["batch.bin"]


@pytest.mark.parametrize("data", [DataProto(), DataProto.from_dict(non_tensors={"s": ["a"]})])
def test_batches_without_tensors_and_without_fields(tmp_path, data):
    data.save_to_disk(tmp_path / "x")
    back = DataProto.load_from_disk(tmp_path / "x")
    assert back.batch is None and len(back) == len(data)


WRITTEN_EARLIER = (
    b"c-o~>O-sW-6ik|apsfcHs>dGNOF%8+LFl32!9Wx}m#|4TCXi;gn+;e{@ses`Z+-fE{Aaq`rqWhK(09n&"
    b"<vnI*XEMr=&!St@auN5!*5US3<#ktE)BuEj2S_ynXac63Rf?Hq<nz0(FYaQ0R3Mp@5l%c3n>0pI0-}0_"
    b"n1^GSfoOhTN-6e0Y@J6q_HWdA25nL0I7tZuQHc_M(gnpP43B2e;cyLNFUf{<Y&src*pz3?A_-D=0!D^z"
    b"76h0nn70FMy$Y>bspt}a4kWwJ#}q4xrRWr<FVB*tZ5cv81KYMQK4i^5md3%gbjz4XQ~IF9Sh`wPUOX<n"
    b"Xs*f|W-*TtV@T389ELrTq?~0QS8PlETH-HOW?*SK^mP{&5_I+S&{!3CxhC*_Ltsw|oDQUiKL=7L6ekW{"
    b"rV{S`E23Hu6U2{?p!0`>%3s;M_aJPDQqcX~{d~jwToFpgY%Iqrh@ArS0Yo|Fn9BbrH9rCO1{34"
)


def test_files_of_earlier_versions_are_loaded(tmp_path):
    """The classes in the file have since moved to other modules."""
    path = tmp_path / "batch.bin"
    path.write_bytes(zlib.decompress(base64.b85decode(WRITTEN_EARLIER)))
    back = DataProto.load_from_disk(path)
    assert back.batch["x"].tolist() == [0, 1, 2] and back.meta_info == {"step": 3}
    assert list(back.non_tensor_batch["o"]) == [torch.tensor(1.5), "b", None]


class Custom:
    pass


def test_unsupported_types_are_refused_at_saving(tmp_path):
    data = DataProto.from_dict(non_tensors={"o": [1, Custom()]})
    path = tmp_path / "x"
    DataProto().save_to_disk(path)
    with pytest.raises(FieldError, match=r"field 'o' contains a .*Custom"):
        data.save_to_disk(path)
    assert len(DataProto.load_from_disk(path)) == 0 and os.listdir(tmp_path) == ["x"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_files_of_another_origin_execute_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    full().save_to_disk(path)
    whole = path.read_bytes()
    head = whole[: whole.index(b"\n") + 1]
    cases = {
        "posix.mkdir": head + pickle.dumps(Evil()),
        "not a file of": pickle.dumps(Evil()),
        "damaged or truncated": whole[: len(whole) // 2],
    }
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            DataProto.load_from_disk(path)
    assert not (tmp_path / "evil").exists()
    with pytest.raises(DataError, match="no batch file"):
        DataProto.load_from_disk(tmp_path / "absent")
