"""Data files and chat templates that are made to exhaust time or memory are refused by name.

Every case has a row in the table of docs/security.md. One that is not refused in time exceeds the
deadline of its test.
"""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from processes import run_python
from quadriga.data import PromptDataset, SFTDataset, read_rows, rows
from quadriga.data.chat import OutOfTimeError, bounded
from quadriga.data.rows import count_rows
from quadriga.errors import DataError, ModelError
from quadriga.models import train_tokenizer
from quadriga.observability.jsonl import read_jsonl

pytestmark = pytest.mark.timeout(60)

ROW = {"prompt": "3+4", "extra_info": {"answer": "7"}}


@pytest.fixture
def tokenizer():
    return train_tokenizer(["3+4=7\n#### 7"])


@pytest.fixture
def tokenised(tokenizer, monkeypatch):
    """The texts that the tokenizer receives."""
    kind, texts = type(tokenizer), []
    call = kind.__call__

    def recorded(self, text, **options):
        texts.extend(text)
        return call(self, text, **options)

    monkeypatch.setattr(kind, "__call__", recorded)
    return texts


JSON_LINES = {
    "nested lists": "[" * 100_000 + "]" * 100_000,
    "nested below the limit of Python": '{"prompt": ' + "[" * 500 + "]" * 500 + "}",
    "a huge integer": '{"prompt": ' + "9" * 100_000 + "}",
    "half a surrogate pair": '{"prompt": "\\ud83d"}',
    "bytes that are no text": b'{"prompt": "\xff\xfe"}',
    "another encoding": '{"prompt": "a"}'.encode("utf-16"),
    "a null byte": b'{"prompt": "a\x00"}',
    "a list": "[1, 2]",
    "a line longer than the limit": '{"prompt": "' + "a" * 2_000_000 + '"}',
    "a line without an end": "a" * 3_000_000,
}


@pytest.mark.parametrize("name", JSON_LINES)
def test_a_json_line_is_refused_with_its_file_and_row(name, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW", 1 << 20)
    line = JSON_LINES[name]
    path = tmp_path / "a.jsonl"
    first = json.dumps(ROW).encode() + b"\n"
    path.write_bytes(first + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, (row 1|line 2): ") as caught:
        read_rows([path])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 100_000, "\xff", "[]"])
def test_a_damaged_line_of_a_run_folder_is_refused_by_name(line, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"samples\.jsonl:1 is not "):
        list(read_jsonl(path))


def test_too_many_json_lines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROWS", 10)
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n" * 11)
    with pytest.raises(DataError, match="the limit is 10 rows"):
        read_rows([path])


def repeated(value, count):
    """A column of equal values, which parquet stores once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


def lists(length):
    """One row with a list of zeros, which take some bytes in the file."""
    zeros = pa.array([0]).take(pa.array([0] * length))
    return pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), zeros)


PARQUET = {
    "many rows": lambda: repeated("a", 3_000_000),
    "a long text in every row": lambda: repeated("a" * 500_000, 5_000),
    "a long list": lambda: lists(5_000_000),
    "text that is no text": lambda: pa.array([b"\xff\xfe"], pa.binary()).view(pa.string()),
    "a date that Python cannot hold": lambda: pa.array([2**60]).view(pa.timestamp("ms")),
    "a long text in every message": lambda: pa.StructArray.from_arrays(
        [repeated("a" * 500_000, 5_000)], ["content"]
    ),
}


@pytest.mark.parametrize("name", PARQUET)
def test_a_parquet_file_is_refused_by_name(name, tmp_path, monkeypatch):
    for limit, value in {"MAX_ROW": 1 << 20, "MAX_ROWS": 10**6, "MAX_FILE": 1 << 24}.items():
        monkeypatch.setattr(rows, limit, value)
    path = tmp_path / "a.parquet"
    table = pa.Table.from_arrays([PARQUET[name]()], ["prompt"])
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 1_000_000
    with pytest.raises(DataError, match=r"data file .*a\.parquet") as caught:
        read_rows([path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["cut", "swapped", "zeros", "empty", "text"])
@pytest.mark.parametrize("command", [lambda path: read_rows([path]), count_rows])
def test_a_damaged_parquet_file_is_refused_by_name(change, command, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"]}), path)
    data = bytearray(path.read_bytes())
    if change == "swapped":
        data[-40:-8] = data[-40:-8][::-1]
    damaged = {"cut": data[:-20], "zeros": b"PAR1" + bytes(40) + b"PAR1", "empty": b"",
               "text": b"hello", "swapped": data}[change]  # fmt: skip
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet"):
        command(path)


# Prompts of megabytes


def test_a_long_prompt_is_left_out_without_tokenising_it(tokenizer, tokenised):
    values = [{"prompt": "3+4"}, {"prompt": "7" * 50_000_000}, {"prompt": "4+3"}]
    dataset = PromptDataset.from_rows(values, tokenizer, max_prompt_length=64)
    assert dataset.filtered == 1
    assert len(tokenised) == 2 and max(map(len, tokenised)) < 1000
    assert [item["index"] for item in [dataset[0], dataset[1]]] == [0, 2]


@pytest.mark.parametrize(
    "options", [{}, {"max_prompt_length": 64, "filter_overlong_prompts": False}]
)
def test_a_long_prompt_is_an_error_where_none_may_be_left_out(tokenizer, tokenised, options):
    values = [{"prompt": "3+4"}, {"prompt": "7" * 2_000_000}]
    with pytest.raises(DataError, match="given, row 1: the prompt has 2000000 characters"):
        PromptDataset.from_rows(values, tokenizer, **options)
    assert tokenised == []


def test_a_long_answer_is_left_out_without_tokenising_it(tokenizer, tokenised, tmp_path):
    path = tmp_path / "a.jsonl"
    long = {**ROW, "extra_info": {"answer": "7" * 5_000_000}}
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(long)}\n")
    dataset = SFTDataset([path], tokenizer, max_length=64)
    assert (len(dataset), dataset.filtered) == (1, 1)
    with pytest.raises(DataError, match="row 1: the conversation has 5000003 characters"):
        SFTDataset([path], tokenizer)
    assert tokenised and max(map(len, tokenised)) < 1000


# Chat templates

LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    "a syntax error": "{% for message in messages %}",
    "an unknown name": "{{ missing.name }}",
    "an exception of the template": "{{ raise_exception('roles must alternate') }}",
    "a call of Python code": "{{ ''.__class__.__base__.__subclasses__() }}",
    "a long range": "{% for i in range(10000000000) %}{% endfor %}",
    "loops that do not end": f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    "a text of gigabytes": "{{ 'x' * 40000000000 }}",
    "a text that doubles": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a huge power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_is_refused_by_name(name, tokenizer, monkeypatch):
    monkeypatch.setattr("quadriga.data.chat._TEMPLATE_S", 1.0)
    tokenizer.chat_template = TEMPLATES[name]
    with pytest.raises(ModelError, match="the chat template of the tokenizer") as caught:
        PromptDataset.from_rows([{"prompt": "3+4"}], tokenizer, max_prompt_length=64)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_the_prompt_that_a_template_cannot_write_is_named(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('no') }}{% endif %}x"
    )
    values = [{"prompt": "good"}, {"prompt": "bad"}]
    with pytest.raises(ModelError, match="fails on prompt 1: TemplateError: no"):
        PromptDataset.from_rows(values, tokenizer)


def test_bounds_end_with_their_block():
    with pytest.raises(OutOfTimeError), bounded(0.1, 1.0):
        while True:
            pass
    with pytest.raises(MemoryError), bounded(5.0, 0.1):
        bytearray(1 << 30)
    with bounded(1.0, 0.1):
        pass
    time.sleep(1.1)
    with bounded(0.1, 1.0):  # a machine with other work, or a stopped process
        time.sleep(0.5)
    assert len(bytearray(300 << 20)) == 300 << 20


@pytest.mark.parametrize("seconds", [30, 0.05], ids=["in time", "out of time"])
def test_a_profiler_works_after_bounded_code(seconds):
    """An exception that is left pending in a thread makes a traced call of CPython 3.11 endless."""
    code = f"""
import sys
from quadriga.data.chat import OutOfTimeError, bounded
def add(x):
    return x + 1
try:
    with bounded({seconds}, 1.0):
        while {seconds} < 1:
            add(1)
except OutOfTimeError:
    pass
calls = []
sys.setprofile(lambda frame, event, arg: calls.append(event))
add(1)
sys.setprofile(None)
print(calls[:2])
"""
    assert run_python("-c", code).stdout.strip() == "['call', 'return']"


def test_time_that_ends_with_the_block_leaves_no_exception_behind():
    for _ in range(200):
        try:
            with bounded(0.001, 1.0):
                time.sleep(0.001)
        except OutOfTimeError:
            pass
        for _ in range(50):
            pass
