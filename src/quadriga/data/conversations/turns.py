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

from quadriga.data.chat import NO_ARGUMENTS, Chat, TemplateArguments, chat_texts
from quadriga.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[Conversation]:
    """Return the token ids of each chat up to its last turn of the assistant.

    Args:
        chats: each has a turn of the assistant.
        last_only: train on the last turn of the assistant only.
        first: the number of the first chat in error messages.
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
        chat_texts(tokenizer, before, first=first, arguments=arguments),
        chat_texts(tokenizer, up_to, first=first, complete=True, arguments=arguments),
        strict=True,
    )
    parts = []
    for number, (chat, ends) in enumerate(zip(chats, turns, strict=True), start=first):
        of_chat = [next(texts) for _ in ends]
        parts.append(_parts(of_chat, chat[ends[-1]]["content"], tokenizer, number))
    flat = [part.text for of_chat in parts for part in of_chat]
    ids = iter(tokenizer(flat, add_special_tokens=False)["input_ids"] if flat else [])
    special = _special_tokens(tokenizer)
    return [_joined(of_chat, [next(ids) for _ in of_chat], special, tokenizer) for of_chat in parts]


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
) -> list[_Part]:
    """Return the text of a chat, cut at the borders of what the assistant writes.

    Args:
        texts: for each trained turn, the texts before it and up to it.
        answer: the content of the last one.
    """
    before, up_to = texts[-1]
    if len(texts) == 1 and not up_to.startswith(before):
        # The beginning of a response opens a thought (`<think>`), which the text up to the answer
        # does not have. The answer follows what generation would give to the model.
        return [_Part(before, False), _Part(_answer_to_end(answer, before, up_to), True)]
    parts, end = [], 0
    for before, turn in texts:
        if not (up_to.startswith(turn) and turn.startswith(before) and len(before) >= end):
            name = str(tokenizer.name_or_path)
            raise ModelError(
                f"the chat template of the tokenizer {name!r} writes the turns of conversation "
                f"{number} in another way once more messages follow, so the tokens of the "
                "assistant are unknown; set data.loss_turns=last, which trains on the last turn of "
                "each conversation",
                path=name,
            )
        parts += [_Part(turn[end : len(before)], False), _Part(turn[len(before) :], True)]
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


def _joined(
    parts: Sequence[_Part],
    ids: Sequence[list[int]],
    special: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Conversation:
    """Join the parts of a chat. A last turn without an end token gets the tokenizer's."""
    joined: list[int] = []
    trained: list[int] = []
    for part, tokens in zip(parts, ids, strict=True):
        end = _end_of_turn(tokens, special, tokenizer) if part.by_assistant else None
        size = len(tokens) if end is None else end + 1
        last = part is parts[-1]
        if last:  # what the template writes after the last end token is left out
            tokens = tokens[:size]
        joined += tokens
        trained += [int(part.by_assistant and i < size) for i in range(len(tokens))]
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


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens. One of them can end a turn."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | {int(tokenizer.eos_token_id)}
