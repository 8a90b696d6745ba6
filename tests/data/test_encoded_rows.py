"""Prompts, conversations and pairs of large files: rows and token ids stay on disk, and every item
is the same."""

import datetime
import json
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data import encoded
from quadriga.data.conversations import Conversation, PairDataset, SFTDataset
from quadriga.data.encoded import PromptDataset
from quadriga.errors import DataError


def rows(count):
    return [
        {
            "prompt": f"Tom has {number} apples." + " He buys." * (number % 4),
            "chosen": f"#### {number}",
            "rejected": f"{number}+1 #### 7" + " He buys." * (number % 3),
            "margin": number / 4,
            "data_source": "s" if number % 3 else None,
            "extra_info": {"index": number, "tags": ["a"] * (number % 3)},
            "messages": [
                {"role": role, "content": f"He buys {number}." * (turn % 2 + 1)}
                for turn in range(number % 3 + 1)
                for role in ("user", "assistant")
            ],
        }
        for number in range(count)
    ]


@pytest.fixture(params=["jsonl", "parquet"])
def files(request, tmp_path, monkeypatch):
    """Two files, of which each counts as large, in pieces of a few rows."""
    monkeypatch.setattr(encoded, "LARGE_FILE", 0)
    monkeypatch.setattr("quadriga.data.rows._LINES", 5)
    monkeypatch.setattr("quadriga.data.rows._MOST_ROWS", 5)
    monkeypatch.setattr(encoded, "_BLOCK", 2)
    paths = [tmp_path / f"{name}.{request.param}" for name in "ab"]
    for path, count in zip(paths, (13, 6), strict=True):
        if request.param == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows(count))) + "\n")
        else:
            table = pa.Table.from_pylist(rows(count))
            encoded_again = table["data_source"].dictionary_encode()
            table = table.set_column(4, "data_source", encoded_again)
            days = [datetime.date(2026, 1, 1 + i) for i in range(count)]
            table = table.append_column("day", pa.array(days))
            table = table.append_column("price", pa.array(map(Decimal, range(count))))
            pq.write_table(table, path, row_group_size=7)
    return paths


conversations = partial(SFTDataset, messages_key="messages")
answers = partial(SFTDataset, response_key="chosen")
pairs = partial(PairDataset, pad_token_id=0, margin_key="margin")


def prompts(files, tokenizer, max_length=None, **more):
    return PromptDataset(files, tokenizer, max_prompt_length=max_length, **more)


MADE = {"conversations": conversations, "answers": answers, "pairs": pairs, "prompts": prompts}


@pytest.mark.parametrize(
    ("kind", "limit"),
    [(kind, limit) for kind, most in (("conversations", 14), ("answers", 14), ("pairs", 22),
                                           ("prompts", 12))
     for limit in (None, most)],
)  # fmt: skip
def test_every_item_equals_the_one_in_memory(files, tokenizer, tmp_path, kind, limit, monkeypatch):
    make = MADE[kind]
    plain = make(files, tokenizer, max_length=limit)
    cached = make(files, tokenizer, max_length=limit, cache_dir=tmp_path / "c")
    for name in ("encode_turns", "encode_conversations", "encode_chats"):  # a call would raise
        for module in ("conversations", "encoded"):
            path = f"quadriga.data.{module}.{name}"
            monkeypatch.setattr(path, None, raising=False)
    again = make(files, tokenizer, max_length=limit, cache_dir=tmp_path / "c")
    for dataset in (cached, again):
        items = [dataset[i] for i in range(len(dataset))]
        assert items == [plain[i] for i in range(len(plain))] == list(plain) == list(dataset)
        assert dataset[-1] == plain[len(plain) - 1]
        head = dataset.head(15)
        assert list(head) == items[:15] and sum(head.file_sizes) == len(head) == min(15, len(plain))
        with pytest.raises(IndexError):
            dataset[len(plain)]
        own = {"pairs": ("lengths",), "prompts": ("longest",)}.get(kind, ("longest", "ends"))
        for name in ("filtered", "file_sizes", "largest_id", *own):
            assert getattr(dataset, name) == getattr(plain, name), name
    assert len(plain) + plain.filtered == 19 and bool(plain.filtered) == (limit is not None)
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_the_figures_of_a_dataset_are_those_of_its_items(files, tokenizer):
    data = conversations(files, tokenizer)
    items = [data[i] for i in range(len(data))]
    ids = [[*item["prompt_ids"], *item["response_ids"]] for item in items]
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    sizes = (len(items[longest][key]) for key in ("prompt_ids", "response_ids"))
    assert data.longest == tuple(sizes)
    targets = [sum(item["response_mask"]) for item in items]
    assert data.lengths.rows == len(items) and data.lengths.longest == len(ids[longest])
    assert data.lengths.targets == max(targets)
    assert data.lengths.share == max(t / len(i) for t, i in zip(targets, ids, strict=True))
    assert data.head(3).lengths.rows == 3
    assert data.largest_id == max(map(max, ids))
    assert data.ends == {row[-1] for row in ids}
    both = pairs(files, tokenizer)
    rows = [both[i][key] for i in range(len(both)) for key in ("chosen", "rejected")]
    assert both.lengths.longest == max(len(prompt) + len(response) for prompt, response in rows)
    assert both.lengths.own == max(len(response) for _, response in rows)
    assert [both[i]["margin"] for i in (0, 3, 13, 14)] == [0, 0.75, 0, 0.25]


@pytest.mark.parametrize("trained", [[0, 1], [0, 0, 1, 1, 0, 1], [1], [0, 1, 0], [1, 0, 1, 0, 0]])
def test_borders_and_back(trained):
    conversation = Conversation(list(range(len(trained))), trained)
    assert Conversation.of(conversation.ids, conversation.borders) == conversation


def test_a_damaged_cache_is_made_again_and_a_bad_row_leaves_none(files, tokenizer, tmp_path):
    folder = tmp_path / "c"
    expected = answers(files, tokenizer, cache_dir=folder)[3]
    for cache in folder.iterdir():
        cache.write_bytes(cache.read_bytes()[:200])
    assert answers(files, tokenizer, cache_dir=folder)[3] == expected
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(json.dumps(row) + "\n" for row in [*rows(7), {"prompt": "He"}]))
    with pytest.raises(DataError, match=r"bad.jsonl, row 7: no 'chosen'"):
        answers([bad], tokenizer, cache_dir=tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_a_flipped_byte_of_a_cache_is_found(files, tokenizer, tmp_path, caplog):
    folder = tmp_path / "c"
    expected = list(prompts(files[:1], tokenizer, cache_dir=folder))
    (cache,) = folder.iterdir()
    whole = cache.read_bytes()
    for place in range(7, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        cache.write_bytes(damaged)
        assert list(prompts(files[:1], tokenizer, cache_dir=folder)) == expected, place
        assert cache.read_bytes() == whole and "is damaged" in caplog.messages.pop(), place


def test_other_content_or_another_template_makes_a_new_cache(files, tokenizer, tmp_path):
    folder, file = tmp_path / "c", tmp_path / "x.jsonl"
    for count in (3, 4):
        file.write_text("\n".join(map(json.dumps, rows(count))))
        assert len(prompts([file], tokenizer, cache_dir=folder)) == count
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = template.replace("<|assistant|>", "")
        last = prompts([file], tokenizer, cache_dir=folder)[0]["input_ids"]
        assert last == prompts([file], tokenizer)[0]["input_ids"]
    finally:
        tokenizer.chat_template = template
    assert len(list(folder.iterdir())) == 3


def test_a_full_disk_is_named_and_leaves_nothing(files, tokenizer, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.OSFile", full)
    with pytest.raises(DataError, match=r"No space left on device; set data.cache_dir"):
        prompts(files, tokenizer, cache_dir=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
