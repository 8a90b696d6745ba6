"""Conversations of several turns → token ids, and which of them the assistant wrote.

The chat template is asked twice for each turn of the assistant: for the messages before it, with
the beginning of a response, and for the messages up to it. The difference is what the assistant
writes, with the token that ends a turn:

    before    <user>How many?<end><assistant>
    up to     <user>How many?<end><assistant>Three.<end>⏎
                                             └ assistant ┘

What is between these parts is tokenised separately, as in generation, where the prompt is tokenised
without the response. What follows the end token (here the line break) belongs to the next part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.data.chat import Chat, chat_texts
from quadriga.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Conversation:
    """Token ids, and for each 1 if it is trained (written by the assistant), else 0."""

    ids: list[int]
    trained: list[int]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first trained one."""
        return self.ids[: self.trained.index(1)]

    @property
    def response_ids(self) -> list[int]:
        """The tokens from the first trained one to the last."""
        return self.ids[self.trained.index(1) :]

    @property
    def response_mask(self) -> list[int]:
        """1 for the trained tokens of `response_ids`."""
        return self.trained[self.trained.index(1) :]


@dataclass(frozen=True)
class _Part:
    text: str
    by_assistant: bool


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    *,
    last_only: bool = False,
    first: int = 0,
) -> list[Conversation]:
    """Return the token ids of each chat up to its last turn of the assistant.

    Args:
        chats: each has a turn of the assistant.
        last_only: train on the last turn of the assistant only.
        first: the number of the first chat in error messages.

    Raises:
        ModelError: the tokenizer has no chat template; the template cannot write a chat; or it
            writes a chat in another way once more messages follow, so that it is unknown what the
            assistant writes.
    """
    turns = [assistant_turns(chat, last_only) for chat in chats]
    before = [chat[:turn] for chat, ends in zip(chats, turns, strict=True) for turn in ends]
    up_to = [chat[: turn + 1] for chat, ends in zip(chats, turns, strict=True) for turn in ends]
    texts = zip(
        chat_texts(tokenizer, before, first=first),
        chat_texts(tokenizer, up_to, first=first, complete=True),
        strict=True,
    )
    parts = [
        _parts([next(texts) for _ in ends], tokenizer, number)
        for number, ends in enumerate(turns, start=first)
    ]
    flat = [part.text for of_chat in parts for part in of_chat]
    ids = iter(tokenizer(flat, add_special_tokens=False)["input_ids"] if flat else [])
    ends = _end_tokens(tokenizer)
    return [_joined(of_chat, [next(ids) for _ in of_chat], ends, tokenizer) for of_chat in parts]


def assistant_turns(chat: Chat, last_only: bool = False) -> list[int]:
    """Return the positions of the messages of the assistant."""
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    return turns[-1:] if last_only else turns


def _parts(
    texts: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, number: int
) -> list[_Part]:
    """Return the text of a chat, cut at the borders of what the assistant writes."""
    whole = texts[-1][1]
    parts, end = [], 0
    for before, up_to in texts:
        if not (whole.startswith(up_to) and up_to.startswith(before) and len(before) >= end):
            name = str(tokenizer.name_or_path)
            raise ModelError(
                f"the chat template of the tokenizer {name!r} writes the turns of conversation "
                f"{number} in another way once more messages follow, so the tokens of the "
                "assistant are unknown; set data.loss_turns=last, which trains on the last turn of "
                "each conversation",
                path=name,
            )
        parts += [
            _Part(whole[end : len(before)], False),
            _Part(whole[len(before) : len(up_to)], True),
        ]
        end = len(up_to)
    return parts


def _joined(
    parts: Sequence[_Part],
    ids: Sequence[list[int]],
    ends: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Conversation:
    """Join the parts of a chat. A last turn without an end token gets the tokenizer's."""
    joined: list[int] = []
    trained: list[int] = []
    for part, tokens in zip(parts, ids, strict=True):
        last = next((i for i in reversed(range(len(tokens))) if tokens[i] in ends), len(tokens) - 1)
        joined += tokens
        trained += [int(part.by_assistant and i <= last) for i in range(len(tokens))]
    while trained and not trained[-1]:  # what the template writes after the last end token
        del joined[-1], trained[-1]
    if joined and joined[-1] not in ends:
        joined.append(int(tokenizer.eos_token_id))
        trained.append(1)
    return Conversation(joined, trained)


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens. The last one that the assistant writes ends its turn."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | {int(tokenizer.eos_token_id)}
