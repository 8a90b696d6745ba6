"""`JsonlFile` leaves whole lines, also after a full disk or a killed process."""

import json
import os
import shutil
from contextlib import closing

import numpy as np
import pytest

from quadriga.errors import DataError, InputError
from quadriga.observability.jsonl import JsonlFile, read_jsonl


def test_numpy_values_and_non_finite_numbers_are_converted(tmp_path):
    file = JsonlFile(tmp_path / "a.jsonl")
    file.write({"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": -float("inf")})
    line = (tmp_path / "a.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "a": 0.5,
        "b": [0, 1],
        "c": "NaN",
        "d": "-Infinity",
    }


def test_reopening_removes_an_incomplete_line_and_appends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x')
    file = JsonlFile(path)
    file.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_raises_an_error_with_the_path_and_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = JsonlFile(path)
    file.write({"step": 1})
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:4]))
    with pytest.raises(InputError) as caught:
        file.write({"step": 2, "reward": 0.25})
    assert f"cannot write {path}: No space left on device" in str(caught.value)
    assert caught.value.path == str(path)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("happens", "kept"),
    [
        (lambda path: path.unlink(), [1, 2, 3]),
        (lambda path: shutil.rmtree(path.parent), [1, 2, 3]),
        (lambda path: path.rename(path.with_name("moved")), [1, 2, 3]),
        (lambda path: (path.unlink(), path.write_text('{"step": 9}\n')), [9, 2, 3]),
    ],
    ids=["removed", "folder removed", "moved", "replaced"],
)
def test_a_file_that_is_removed_while_it_is_written_keeps_its_rows(tmp_path, caplog, happens, kept):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with closing(JsonlFile(path)) as file:
        file.write({"step": 1})
        happens(path)
        file.write({"step": 2})
        file.write({"step": 3})
    assert [row["step"] for row in read_jsonl(path)] == kept
    assert caplog.messages == [f"{path} was removed or replaced by another process"]


def test_reading_skips_an_incomplete_line_and_names_a_bad_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    assert list(read_jsonl(path)) == [{"a": 1}]
    path.write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        list(read_jsonl(path))
    path.write_text("[1]\n")
    with pytest.raises(DataError, match="not a JSON object"):
        list(read_jsonl(path))
    with pytest.raises(DataError, match="cannot read"):
        list(read_jsonl(tmp_path / "absent"))
