"""Convert the chat of a row to token ids, with the chat template of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from quadriga.data.rows import Row
from quadriga.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1024  # chats per call of the tokenizer, which bounds the memory for their texts


class Message(TypedDict):
    """One message of a chat. A message may have other keys, which only the template reads."""

    role: str
    content: str


Chat = list[Message]


def chat_of(row: Row, prompt_key: str) -> Chat:
    """Return the messages under `prompt_key`. A text becomes one message of the user.

    Raises `DataError`, naming the file and the row, unless each message has a `role` and a
    `content` that are texts.
    """
    prompt = row.at(prompt_key)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        received = "an empty list" if prompt == [] else type(prompt).__name__
        raise row.error(f"{prompt_key!r} must be a text or a list of messages, got {received}")
    for message in prompt:
        valid = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not valid:
            raise row.error(
                f"each message of {prompt_key!r} must be {{'role': …, 'content': …}} with texts, "
                f"got {message!r:.120}"
            )
    return prompt


def encode_chats(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> list[list[int]]:
    """Return the token ids of each chat, up to the beginning of the assistant's response.

    Raises `ModelError` if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "add chat_template to its tokenizer_config.json",
            path=str(tokenizer.name_or_path),
        )
    ids: list[list[int]] = []
    for start in range(0, len(chats), _BLOCK):
        block = list(chats[start : start + _BLOCK])
        texts = tokenizer.apply_chat_template(
            block,  # type: ignore[arg-type]  # transformers types a message as dict[str, str]
            add_generation_prompt=True,
            tokenize=False,
        )
        # The template writes the special tokens, so the tokenizer must not add them again.
        ids.extend(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return ids
