"""Reading rows; errors name the file and the row."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data.rows import Row, read_rows
from quadriga.errors import DataError


def test_rows_of_several_files_in_order_with_file_and_number(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"a": 1}, {"a": 2}]), tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_text('\ufeff{"a": 3}\n\n{"a": 4}\n')
    rows = read_rows([tmp_path / "x.parquet", tmp_path / "y.jsonl"])
    assert [row.values["a"] for row in rows] == [1, 2, 3, 4]
    assert [row.number for row in rows] == [0, 1, 0, 1]
    assert rows[3].path.endswith("y.jsonl")


def test_dotted_access_names_the_missing_key():
    row = Row({"extra_info": {"answer": "7", "empty": None}}, "f.parquet", 4)
    assert row.at("extra_info.answer") == "7"
    with pytest.raises(DataError, match=r"f.parquet, row 4: no 'reward' in 'extra_info'") as caught:
        row.at("extra_info.reward")
    assert (caught.value.path, caught.value.row) == ("f.parquet", 4)
    with pytest.raises(DataError, match="no value of 'empty'"):
        row.at("extra_info.empty")
    with pytest.raises(DataError, match=r"no 'more' in 'extra_info.answer'; found str"):
        row.at("extra_info.answer.more")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a.jsonl, row 1: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl, row 0: expected a JSON object, got list"),
        ("a.jsonl", "\n", r"a.jsonl has no rows"),
        ("a.parquet", "no", r"a.parquet cannot be read as parquet"),
        ("a.csv", "a,b", r"a.csv must end in one of .parquet, .jsonl"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_rows([tmp_path / name])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.parquet does not exist"):
        read_rows([tmp_path / "gone.parquet"])
    with pytest.raises(DataError, match="is a folder"):
        read_rows([tmp_path])
    with pytest.raises(DataError, match="no data files"):
        read_rows([])
