"""Conversations for supervised fine-tuning, and pairs for a reward model.

A conversation is a prompt with an answer, or has several turns. A pair is a chosen and a rejected
response to one prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
import torch

from quadriga.data.chat import (
    NO_ARGUMENTS,
    Chat,
    EncodedAnswer,
    TemplateArguments,
    characters,
    chat_of,
    chat_texts,
    continued,
    encode_conversations,
    most_characters,
)
from quadriga.data.encoded import EncodedDataset, EncodedRow
from quadriga.data.images import check_text_alone
from quadriga.data.loader import SFTItem, collate_answers, scored_rows
from quadriga.data.rows import Row
from quadriga.errors import ModelError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ConversationLengths:
    """Bounds of the tokens of some conversations.

    Attributes:
        rows: number of conversations.
        longest: tokens of the longest.
        targets: most trained tokens of one; it need not be the longest.
        share: largest share of trained tokens in the tokens of one.
    """

    rows: int
    longest: int
    targets: int
    share: float


@dataclass(repr=False, eq=False, kw_only=True)
class SFTDataset(EncodedDataset[SFTItem]):
    """Rows of data files as `SFTItem`s: conversations, with a mask of the assistant's tokens.

    A row has a prompt and an answer, or under `messages_key` a list of messages of several turns.
    See `encode_turns` for how the tokens of the assistant are found.

    Args:
        messages_key: column of the conversations; None: rows have a prompt and an answer.
        loss_turns: "all" turns of the assistant are trained, or the "last" of each conversation.
        max_length: in tokens; longer rows are left out. None: no limit.
        chat_template_kwargs: arguments of the chat template, such as `enable_thinking`.
        cache_dir: folder in which the token ids of large files are kept; None: all are in memory.

    Attributes:
        ends: the tokens with which the last turns of the assistant end.
        longest: tokens of the prompt and of the response in the row with most tokens.

    Raises:
        DataError: a row has no prompt, no answer or no turn of the assistant, or no token precedes
            what the assistant writes; the message names the file and the row.
        ModelError: the tokenizer has no chat template, or it is unknown what the assistant writes.
        ConfigError: the chat template does not read one of its arguments.
    """

    NOUN = "rows"

    response_key: str = "extra_info.answer"
    messages_key: str | None = None
    loss_turns: Literal["all", "last"] = "all"
    max_length: int | None = None

    def __post_init__(self) -> None:
        self.pad_token_id: int = self.tokenizer.pad_token_id
        self.load(self.files, self.max_length, "max_length")
        self.ends: set[int] = set()
        self.longest, targets, share = (0, 0), 0, 0.0
        for ids, borders, counts in self.columns():
            lengths = ids.value_lengths().to_numpy()
            row = int(lengths.argmax())
            if lengths[row] > sum(self.longest):
                prompt = borders[row].as_py()[0]
                self.longest = prompt, int(lengths[row]) - prompt
            trained = counts.to_numpy()
            targets = max(targets, int(trained.max()))
            share = max(share, float((trained / lengths).max()))
            self.ends |= set(ids.flatten().to_numpy()[np.cumsum(lengths) - 1].tolist())
        self._lengths = ConversationLengths(len(self), sum(self.longest), targets, share)

    @property
    def lengths(self) -> ConversationLengths:
        """The bounds of the tokens; of `head`, all but `rows` are of all rows."""
        return replace(self._lengths, rows=len(self))

    def collate(self, items: Sequence[SFTItem]) -> DataProto:
        """Return a batch of `items`, padded to its longest prompt and its longest answer."""
        return collate_answers(items, pad_token_id=self.pad_token_id)

    def item(self, row: EncodedRow, source: Row | None, index: int) -> SFTItem:
        """Return the conversation of a row."""
        found = Conversation.of(row.ids, row.borders)
        return {
            "prompt_ids": found.prompt_ids,
            "response_ids": found.response_ids,
            "response_mask": found.trained[len(found.prompt_ids) :],
        }

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | None]:
        """Return the conversation of each row; None for one that is too long."""
        chats = [self.own_texts(row, self._chat(row)) for row in rows]
        most = most_characters(self.max_length)
        sizes = [characters(chat) for chat in chats]
        kept = [i for i, size in enumerate(sizes) if size <= most]
        if self.max_length is None and len(kept) < len(rows):
            i = next(i for i, size in enumerate(sizes) if size > most)
            raise rows[i].error(f"the conversation has {sizes[i]} characters, more than {most}")
        found: list[EncodedRow | None] = [None] * len(rows)
        turns = self._turns([rows[i] for i in kept], [chats[i] for i in kept])
        for i, turn in zip(kept, turns, strict=True):
            if self.max_length is None or len(turn.ids) <= self.max_length:
                if not turn.borders[0]:
                    raise rows[i].error(
                        "the assistant writes the first token, and nothing precedes it from which "
                        "it could be predicted; begin with a prompt, or use a chat template that "
                        "begins a turn"
                    )
                found[i] = EncodedRow(turn.ids, turn.borders, sum(turn.trained))
        return found

    def _chat(self, row: Row) -> Chat:
        check_text_alone(row)
        if self.messages_key is None:
            chat, answer = chat_of(row, self.prompt_key), row.at(self.response_key)
            if not isinstance(answer, str):
                raise row.error(f"{self.response_key!r} must be text, got {type(answer).__name__}")
            return [*chat, {"role": "assistant", "content": answer}]
        chat = chat_of(row, self.messages_key)
        if not assistant_turns(chat):
            roles = ", ".join(dict.fromkeys(message["role"] for message in chat))
            raise row.error(
                f"{self.messages_key!r} has no message of the role 'assistant', so nothing can be "
                f"trained; found {roles}"
            )
        return chat

    def _turns(self, rows: Sequence[Row], chats: Sequence[Chat]) -> list[Conversation]:
        """Encode chats. An error names the row of the first one that cannot be encoded."""
        last_only, arguments = self.loss_turns == "last", self.chat_template_kwargs
        try:
            return encode_turns(self.tokenizer, chats, last_only=last_only, arguments=arguments)
        except ModelError as error:
            if len(chats) == 1:
                row, name = rows[0], str(self.tokenizer.name_or_path)
                raise ModelError(f"{row.path}, row {row.number}: {error}", path=name) from error
            pairs = zip(rows, chats, strict=True)
            return [found for row, chat in pairs for found in self._turns([row], [chat])]


@dataclass(frozen=True)
class Conversation:
    """Token ids, and for each 1 if it is trained (written by the assistant), else 0."""

    ids: list[int]
    trained: list[int]

    @property
    def borders(self) -> list[int]:
        """The positions at which `trained` changes: 0 0 1 1 0 1 → 2 4 5. It begins with 0."""
        before = [0, *self.trained]
        return [i for i, now in enumerate(self.trained) if now != before[i]]

    @classmethod
    def of(cls, ids: Sequence[int], borders: Sequence[int]) -> Conversation:
        """Return the conversation with these token ids and `borders`."""
        trained = [0] * len(ids)
        for start, end in zip(borders[0::2], [*borders[1::2], len(ids)], strict=False):
            trained[start:end] = [1] * (end - start)
        return cls(list(ids), trained)

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first trained one."""
        return self.ids[: self.trained.index(1)]

    @property
    def response_ids(self) -> list[int]:
        """The tokens from the first trained one to the last."""
        return self.ids[self.trained.index(1) :]


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    *,
    last_only: bool = False,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[Conversation]:
    """Return the token ids of each chat up to its last turn of the assistant.

    Args:
        chats: each has a turn of the assistant.
        last_only: train on the last turn of the assistant only.
        arguments: of the chat template.

    Raises:
        ModelError: the tokenizer has no chat template; the template cannot write a chat; or it
            writes a chat in another way once more messages follow, so that it is unknown what the
            assistant writes.
    """
    turns = [assistant_turns(chat, last_only) for chat in chats]
    before = [chat[:turn] for chat, ends in zip(chats, turns, strict=True) for turn in ends]
    up_to = [chat[: turn + 1] for chat, ends in zip(chats, turns, strict=True) for turn in ends]
    texts = zip(
        chat_texts(tokenizer, before, arguments=arguments),
        chat_texts(tokenizer, up_to, complete=True, arguments=arguments),
        strict=True,
    )
    parts = []
    for number, (chat, ends) in enumerate(zip(chats, turns, strict=True)):
        of_chat = [next(texts) for _ in ends]
        parts.append(_parts(of_chat, chat[ends[-1]]["content"], tokenizer, number))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.add(int(tokenizer.eos_token_id))  # one of them can end a turn
    tokens = _tokens_of_parts(tokenizer, parts)
    return [_joined(of_chat, special, tokenizer) for of_chat in tokens]


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special token with which the chat template ends a turn of the assistant.

    Chat models write it at the end of a response, also where the tokenizer has another end token:
    Gemma's is `<eos>`, and its turns end with `<end_of_turn>`. Without a chat template, or with one
    that cannot write a question and an answer, the result is empty.
    """
    if not tokenizer.chat_template:
        return ()
    chat: Chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        [conversation] = encode_turns(tokenizer, [chat])
    except ModelError:
        return ()
    return (conversation.ids[-1],)


def assistant_turns(chat: Chat, last_only: bool = False) -> list[int]:
    """Return the positions of the messages of the assistant."""
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    return turns[-1:] if last_only else turns


def _parts(
    texts: Sequence[tuple[str, str]], answer: str, tokenizer: PreTrainedTokenizerBase, number: int
) -> list[str]:
    """Return the text of a chat, cut at the borders of what the assistant writes: every second part
    is written by it.

    Args:
        texts: for each trained turn, the texts before it and up to it.
        answer: the content of the last one.
    """
    before, up_to = texts[-1]
    if len(texts) == 1 and not up_to.startswith(before):
        # The beginning of a response opens a thought (`<think>`), which the text up to the answer
        # does not have. The answer follows what generation would give to the model.
        return [before, _answer_to_end(answer, before, up_to)]
    parts: list[str] = []
    end = 0
    for before, turn in texts:
        if not (up_to.startswith(turn) and turn.startswith(before) and len(before) >= end):
            name = str(tokenizer.name_or_path)
            raise ModelError(
                f"the chat template of the tokenizer {name!r} writes the turns of conversation "
                f"{number} in another way once more messages follow, so the tokens of the "
                "assistant are unknown; set data.loss_turns=last, to train on the last turns only",
                path=name,
            )
        parts += [turn[end : len(before)], turn[len(before) :]]
        end = len(turn)
    return parts


def _answer_to_end(answer: str, before: str, up_to: str) -> str:
    """Return an answer as `up_to` has it, with what follows it. Both texts begin equal.

    A template may remove white space around the answer, or thoughts in it. Then the result is what
    the template has written.
    """
    pairs = enumerate(zip(before, up_to, strict=False))
    border = next((i for i, (one, other) in pairs if one != other), min(len(before), len(up_to)))
    for written in (answer, answer.strip()):
        # The beginning of the answer can be equal to that of a thought: `<b>` and `<think>`.
        shared = range(1, min(border, len(written)) + 1)
        starts = [border, up_to.find(written, border), *(border - size for size in shared)]
        for start in starts:
            if start >= 0 and up_to.startswith(written, start):
                return up_to[start:]
    return up_to[border:]


def _tokens_of_parts(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[str]]
) -> list[list[list[int]]]:
    """Return the tokens of each part of each chat, as the tokenizer gives them for the whole chat.

    A part tokenised alone can have other tokens: many tokenizers put a space before each text. A
    token that reaches over the end of a turn belongs to the turn. Where a token reaches over the
    beginning of a turn, the prompt keeps the tokens of generation, and the turn begins with tokens
    of its own.
    """
    if not getattr(tokenizer, "is_fast", False):  # it does not tell the places of its tokens
        return [
            [continued(tokenizer, part, follows=i > 0) for i, part in enumerate(parts)]
            for parts in chats
        ]
    texts = ["".join(parts) for parts in chats]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    unanswered = iter(_unanswered(tokenizer, chats))
    whole = zip(chats, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [_cut(tokenizer, *chat, unanswered) for chat in whole]


def _cut(
    tokenizer: PreTrainedTokenizerBase,
    parts: Sequence[str],
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    unanswered: Iterator[list[int]],
) -> list[list[int]]:
    """Return the tokens of each part of one chat, see `_tokens_of_parts`.

    `ids`, `spans`: of the whole chat. `unanswered`: of `_unanswered`, for the parts before answers.
    """
    # Some tokenizers do not count the space before a word as part of its token.
    ends = [0, *(end for _, end in spans)]
    starts = [min(start, end) for (start, _), end in zip(spans, ends, strict=False)]
    text = "".join(parts)
    tokens: list[list[int]] = []
    first, begun = 0, list[int]()
    for number, border in enumerate(accumulate(map(len, parts))):
        cut = bisect_left(starts, border)
        own, begun = [*begun, *ids[first:cut]], []
        if number % 2 == 0 and own != next(unanswered):  # before a turn of the assistant
            own = continued(tokenizer, text[:border], follows=False)[first:]
            if cut > first and spans[cut - 1][1] > border:
                begun = continued(tokenizer, text[border : spans[cut - 1][1]], follows=True)
        tokens.append(own)
        first = cut
    return tokens


def _unanswered(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[str]]
) -> list[list[int]]:
    """Return the tokens of the parts before answers as they probably are without the answer."""
    parts = [(i, part) for parts in chats for i, part in enumerate(parts) if i % 2 == 0]
    texts = ["a" + part if i else part for i, part in parts]
    ids = tokenizer(["a", *texts], add_special_tokens=False)["input_ids"]
    return [own[len(ids[0]) if i else 0 :] for (i, _), own in zip(parts, ids[1:], strict=True)]


def _joined(
    parts: Sequence[list[int]], special: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> Conversation:
    """Join the token ids of the parts of a chat. A last turn without an end token gets the
    tokenizer's."""
    joined: list[int] = []
    trained: list[int] = []
    for number, tokens in enumerate(parts, start=1):
        by_assistant = number % 2 == 0
        end = _end_of_turn(tokens, special, tokenizer) if by_assistant else None
        size = len(tokens) if end is None else end + 1
        last = number == len(parts)
        if last:  # what the template writes after the last end token is left out
            tokens = tokens[:size]
        joined += tokens
        trained += [int(by_assistant and i < size) for i in range(len(tokens))]
        if last and end is None:
            joined.append(int(tokenizer.eos_token_id))
            trained.append(1)
    return Conversation(joined, trained)


def _end_of_turn(
    tokens: Sequence[int], special: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Return the position of the last special token if nothing but white space follows it."""
    for position in reversed(range(len(tokens))):
        if tokens[position] in special:
            rest = str(tokenizer.decode(list(tokens[position + 1 :])))
            return None if rest.strip() else position
    return None


MARGINS = "margins"
"""Field of the batches: [B] float32, the margin of the pair of each row."""


class PairItem(TypedDict):
    """One pair: token ids of both conversations, and the least difference of their scores."""

    chosen: EncodedAnswer
    rejected: EncodedAnswer
    margin: float


@dataclass(frozen=True)
class PairLengths:
    """Bounds of the tokens of some pairs.

    Attributes:
        longest: tokens of the longest conversation.
        own: most tokens of a conversation that the other one of its pair does not have: its
            response, or all of it if the prompts of the pair differ in length. Not more than
            `longest`.
    """

    longest: int
    own: int


@dataclass(repr=False, eq=False, kw_only=True)
class PairDataset(EncodedDataset[PairItem]):
    """Rows of data files as pairs. See `RMDataConfig` for the columns.

    Args:
        max_length: tokens of a conversation; longer pairs are left out. None: no limit.
        chat_template_kwargs: arguments of the chat template.
        cache_dir: folder in which the token ids of large files are kept; None: all are in memory.

    Attributes:
        lengths: bounds of the tokens.

    Raises:
        DataError: a row has no pair; the message names the file and the row.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
    """

    NOUN = "pairs"
    rows_per_item = 2
    """Rows of a batch for each pair."""

    pad_token_id: int
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        self.load(self.files, self.max_length, "max_length")
        found = [_lengths(ids, borders) for ids, borders, _ in self.columns()]
        self.lengths = PairLengths(max(f.longest for f in found), max(f.own for f in found))

    def item(self, row: EncodedRow, source: Row | None, index: int) -> PairItem:
        """Return the pair of a row."""
        first, second, third = row.borders
        return {
            "chosen": (row.ids[:first], row.ids[first:second]),
            "rejected": (row.ids[second:third], row.ids[third:]),
            "margin": row.value,
        }

    def collate(self, items: Sequence[PairItem]) -> DataProto:
        """Return a batch with two rows for each pair, the chosen response first.

        The rows are those of `scored_rows`, with `MARGINS`.
        """
        rows = [row for item in items for row in (item["chosen"], item["rejected"])]
        margins = torch.tensor([item["margin"] for item in items], dtype=torch.float32)
        tensors = scored_rows(rows, self.pad_token_id)
        return DataProto.from_dict({**tensors, MARGINS: margins.repeat_interleave(2)})

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | None]:
        """Return the pair of each row, its four parts one after the other; None for a pair that is
        too long."""
        pairs = [self._pair(row) for row in rows]
        most = most_characters(self.max_length)
        kept = [i for i, (*both, _) in enumerate(pairs) if max(map(characters, both)) <= most]
        both = [chat for i in kept for chat in pairs[i][:2]]
        tokens = iter(encode_conversations(self.tokenizer, both, self.chat_template_kwargs))
        found: list[EncodedRow | None] = [None] * len(rows)
        for i in kept:
            parts = [*next(tokens), *next(tokens)]
            sizes = [len(part) for part in parts]
            longest = max(sizes[0] + sizes[1], sizes[2] + sizes[3])
            if self.max_length is None or longest <= self.max_length:
                ids = [token for part in parts for token in part]
                found[i] = EncodedRow(ids, list(accumulate(sizes[:3])), pairs[i][2])
        return found

    def _pair(self, row: Row) -> tuple[Chat, Chat, float]:
        """Return both conversations and the margin of a row."""
        check_text_alone(row)
        chosen = _conversation(row, self.chosen_key, self.prompt_key)
        rejected = _conversation(row, self.rejected_key, self.prompt_key)
        if chosen == rejected:
            raise row.error(f"{self.chosen_key!r} and {self.rejected_key!r} are the same response")
        margin = 0.0 if self.margin_key is None else _margin(row, self.margin_key)
        return self.own_texts(row, chosen), self.own_texts(row, rejected), margin


def _lengths(ids: pa.ListArray, borders: pa.ListArray) -> PairLengths:
    """Return the bounds of some pairs. Prompts of equal length are taken to be equal."""
    prompt, chosen, third = borders.flatten().to_numpy().reshape(-1, 3).T
    total = ids.value_lengths().to_numpy()
    longest = np.maximum(chosen, total - chosen)
    shared = np.where(third - chosen == prompt, prompt, 0)
    return PairLengths(int(longest.max()), int((longest - shared).max()))


def _conversation(row: Row, key: str, prompt_key: str) -> Chat:
    """Return the prompt with the response under `key`."""
    value = row.at(key)
    if isinstance(value, str):
        return [*chat_of(row, prompt_key), {"role": "assistant", "content": value}]
    chat = chat_of(row, key)
    if len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise row.error(
            f"{key!r} must be a response, or messages that end with one of the assistant, got "
            f"{len(chat)} messages, the last one of role {chat[-1]['role']!r}"
        )
    return chat


def _margin(row: Row, key: str) -> float:
    value = row.at(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise row.error(f"{key!r} must be a finite number, got {value!r:.80}")
    return float(value)
