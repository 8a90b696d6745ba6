"""From a row's chat to token ids, through the tokenizer's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.data.rows import Row
from quadriga.errors import ModelError

_BLOCK = 1024

Chat = list[dict[str, Any]]


def chat_of(row: Row, prompt_key: str) -> Chat:
    """The messages under `prompt_key`; a plain text is one message of the user.

    Raises `DataError` naming file and row unless each message has a `role` and a text `content`.
    """
    prompt = row.at(prompt_key)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise row.error(
            f"{prompt_key!r} must be a text or a list of messages, got {type(prompt).__name__}"
            + (" that is empty" if prompt == [] else "")
        )
    for message in prompt:
        ok = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not ok:
            raise row.error(
                f"each message of {prompt_key!r} must be {{'role': …, 'content': …}} with texts, "
                f"got {message!r:.120}"
            )
    return prompt


def encode_chats(tokenizer: Any, chats: Sequence[Chat]) -> list[list[int]]:
    """Token ids of each chat, with the template's opening of the assistant's turn.

    Raises `ModelError` when the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "add chat_template to its tokenizer_config.json",
            path=str(tokenizer.name_or_path),
        )
    ids: list[list[int]] = []
    for start in range(0, len(chats), _BLOCK):
        texts = tokenizer.apply_chat_template(
            list(chats[start : start + _BLOCK]), add_generation_prompt=True, tokenize=False
        )
        ids.extend(tokenizer(texts, add_special_tokens=False)["input_ids"])
    return ids
