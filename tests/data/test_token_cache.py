"""Prompts of large files: rows and token ids stay on disk, and every prompt is the same."""

import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data import token_cache
from quadriga.data.prompts import PromptDataset
from quadriga.data.token_cache import tokenizer_digest
from quadriga.errors import DataError


def rows(count, start=0):
    return [
        {
            "prompt": [{"role": "user", "content": f"Tom has {i} apples." + " He buys." * (i % 4)}],
            "data_source": "s" if i % 3 else None,
            "reward_model": {"ground_truth": str(i)},
            "extra_info": {"index": i, "tags": ["a"] * (i % 3)},
        }
        for i in range(start, start + count)
    ]


def parquet(path, values):
    table = pa.Table.from_pylist(values)
    table = table.set_column(1, "data_source", table["data_source"].dictionary_encode())
    day = [datetime.date(2026, 1, 1 + i % 28) for i in range(len(values))]
    price = [Decimal(i) / 4 for i in range(len(values))]
    table = table.append_column("day", pa.array(day)).append_column("price", pa.array(price))
    pq.write_table(table, path, row_group_size=7)
    return path


def json_lines(path, values):
    path.write_text("\n\n".join(json.dumps(row) for row in values) + "\n")
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    """Every file counts as large, and pieces have a few rows."""
    monkeypatch.setattr(token_cache, "LARGE_FILE", 0)
    monkeypatch.setattr("quadriga.data.rows._LINES", 5)
    monkeypatch.setattr("quadriga.data.rows._MOST_ROWS", 5)


@pytest.mark.parametrize("limit", [None, 12, 14])
@pytest.mark.usefixtures("small_pieces")
def test_every_prompt_equals_the_one_in_memory(tmp_path, tokenizer, limit):
    files = [
        parquet(tmp_path / "a.parquet", rows(23)),
        json_lines(tmp_path / "b.jsonl", [*rows(11, 50), {"prompt": "He buys", "extra_info": [1]}]),
    ]
    plain = PromptDataset(files, tokenizer, max_prompt_length=limit)
    kept = tmp_path / "cache"
    for _ in range(2):  # made, then opened
        cached = PromptDataset(files, tokenizer, max_prompt_length=limit, cache_dir=kept)
        assert [cached[i] for i in range(len(cached))] == list(plain) == list(cached)
        assert cached[-1] == plain[-1]
        for name in ("filtered", "longest", "largest_id", "file_sizes"):
            assert getattr(cached, name) == getattr(plain, name)
        head = cached.head(20)
        assert list(head) == list(plain)[:20] and len(head) == min(20, len(plain))
    assert sum(head.file_sizes) == len(head)
    assert len(list(kept.iterdir())) == 2


@pytest.mark.usefixtures("small_pieces")
def test_the_tokenizer_runs_once_for_all_limits(tmp_path, tokenizer, monkeypatch):
    file = json_lines(tmp_path / "a.jsonl", rows(12))
    PromptDataset([file], tokenizer, cache_dir=tmp_path / "c")
    monkeypatch.setattr("quadriga.data.prompts.encode_chats", None)  # a call would raise
    assert PromptDataset([file], tokenizer, max_prompt_length=12, cache_dir=tmp_path / "c").filtered


@pytest.mark.usefixtures("small_pieces")
def test_other_content_or_another_template_makes_a_new_cache(tmp_path, tokenizer):
    file = json_lines(tmp_path / "a.jsonl", rows(3))
    folder = tmp_path / "c"
    PromptDataset([file], tokenizer, cache_dir=folder)
    json_lines(file, rows(4))
    assert len(PromptDataset([file], tokenizer, cache_dir=folder)) == 4
    before = tokenizer_digest(tokenizer)
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("<|assistant|>", "")
        assert tokenizer_digest(tokenizer) != before
        last = PromptDataset([file], tokenizer, cache_dir=folder)[0]["input_ids"]
        assert last == PromptDataset([file], tokenizer)[0]["input_ids"]
    finally:
        tokenizer.chat_template = template
    assert len(list(folder.iterdir())) == 3


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_cache_is_made_again(tmp_path, tokenizer):
    file = json_lines(tmp_path / "a.jsonl", rows(6))
    expected = list(PromptDataset([file], tokenizer, cache_dir=tmp_path / "c"))
    (cache,) = (tmp_path / "c").iterdir()
    cache.write_bytes(cache.read_bytes()[:200])
    assert list(PromptDataset([file], tokenizer, cache_dir=tmp_path / "c")) == expected


@pytest.mark.usefixtures("small_pieces")
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    file = json_lines(tmp_path / "a.jsonl", rows(9))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "_plain", full)
    with pytest.raises(DataError, match=r"No space left on device; set data.cache_dir"):
        PromptDataset([file], tokenizer, cache_dir=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
