"""Convert the chat of a row to token ids, with the chat template of the tokenizer."""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

import psutil

from quadriga.data.rows import Row
from quadriga.errors import ConfigError, ModelError, nearest_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 1024  # chats per call of the tokenizer, which bounds the memory for their texts
_TEMPLATE_S = 10.0  # time for the template to write the texts of one block
_TEMPLATE_GB = 2.0  # memory for it
_PER_TOKEN = 64  # characters that a token may have on average before a text counts as too long
_SHORT = 1 << 20  # characters of a text that are accepted with any limit of tokens

TemplateArguments = Mapping[str, object]
"""Arguments of a chat template by name, such as `enable_thinking`: `chat_template_kwargs` of the
settings."""
NO_ARGUMENTS: TemplateArguments = MappingProxyType({})
_OF_TEMPLATES = ("tools", "documents")  # arguments of `apply_chat_template` that a template reads


class Message(TypedDict):
    """One message of a chat. A message may have other keys, which only the template reads."""

    role: str
    content: str


Chat = list[Message]

EncodedAnswer = tuple[Sequence[int], Sequence[int]]
"""Token ids of the prompt and of the response. Both together have at least one."""

TemplateChat = Sequence[Mapping[str, object]]
"""A chat as a template reads it: the content of a message is a text, or a list of parts such as
`{"type": "image"}` and `{"type": "text", "text": …}`."""


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


def neutraliser(
    tokenizer: PreTrainedTokenizerBase, kept: Sequence[str] = (), more: Sequence[str] = ()
) -> Callable[[str], str]:
    """Return a function that puts a space after the first character of each special token in a
    text, so that its tokens are ordinary ones: `<|im_end|>` → `< |im_end|>`.

    Args:
        kept: special tokens to leave unchanged, beside special tokens of one character.
        more: further tokens to treat so.
    """
    added = tokenizer.added_tokens_decoder.values()
    words = {str(token) for token in added if token.special}
    words |= {*tokenizer.all_special_tokens, *more}
    ordered = sorted({word for word in words if len(word) > 1} - set(kept), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def neutral(text: str) -> str:
        while pattern.search(text):  # again for a token that is part of another one
            text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return text

    return neutral


def most_characters(max_tokens: int | None) -> int:
    """Return the length up to which a text is tokenised, if it may have `max_tokens` tokens.

    The number of tokens is known only after tokenising, which takes seconds for a text of many
    megabytes. A text of more than 64 characters per allowed token has too many tokens in any case.
    """
    return max(_SHORT, _PER_TOKEN * (max_tokens or 0))


def characters(chat: TemplateChat) -> int:
    """Return the number of characters of all messages of a chat."""
    return sum(map(_characters, (message["content"] for message in chat)))


def _characters(content: object) -> int:
    if isinstance(content, list):
        return sum(len(str(part.get("text", ""))) for part in content)
    return len(str(content))


def encode_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[TemplateChat],
    *,
    first: int = 0,
    complete: bool = False,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[list[int]]:
    """Return the token ids of each chat, up to the beginning of the assistant's response.

    Args:
        complete: the chats end with this response, and nothing is added to them.
        first: the number of the first chat in error messages.
        arguments: of the chat template.

    Raises:
        ModelError: the tokenizer has no chat template, or the template cannot write a chat within
            its bounds of time, memory and length. A template is code of the model's author.
        ConfigError: the template does not read one of the arguments.
    """
    texts = chat_texts(tokenizer, chats, first=first, complete=complete, arguments=arguments)
    # The template writes the special tokens, so the tokenizer must not add them again.
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return ids


def chat_texts(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[TemplateChat],
    *,
    first: int = 0,
    complete: bool = False,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[str]:
    """Return the text that the chat template writes for each chat. See `encode_chats`."""
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "add chat_template to its tokenizer_config.json",
            path=str(tokenizer.name_or_path),
        )
    check_template_arguments(tokenizer, arguments)
    texts: list[str] = []
    for start in range(0, len(chats), _BLOCK):
        block = list(chats[start : start + _BLOCK])
        texts += _templated(tokenizer, block, first + start, complete, arguments)
    return texts


def continued(tokenizer: PreTrainedTokenizerBase, text: str, *, follows: bool) -> list[int]:
    """Return the tokens of a text; `follows`: of one that continues another text."""
    for before in ("\n", ".", "a") if follows else ():
        alone, both = tokenizer([before, before + text], add_special_tokens=False)["input_ids"]
        if both[: len(alone)] == alone:
            return list(both[len(alone) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_template_arguments(
    tokenizer: PreTrainedTokenizerBase,
    arguments: TemplateArguments,
    key: str = "chat_template_kwargs",
) -> None:
    """Check that the chat template of a tokenizer reads all arguments that it is given.

    An argument that it does not read would change nothing, and be it only for a wrong letter.

    Args:
        key: the setting, in messages.

    Raises:
        ConfigError: names the argument.
    """
    if not arguments:
        return
    called = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    taken = (called | {"messages"}) - set(_OF_TEMPLATES)
    known = _names_in_template(tokenizer, arguments)
    for name in arguments:
        if name in taken:
            raise ConfigError(
                f"{key}.{name} cannot be set: it is an argument of the call of the chat template, "
                "and not of the template; remove it",
                key=f"{key}.{name}",
            )
        if name not in known:
            near = nearest_name(name, known)
            instead = f"did you mean {near}? Otherwise" if near else "correct its name, or"
            raise ConfigError(
                f"{key}.{name} has no effect: the chat template of the tokenizer "
                f"{str(tokenizer.name_or_path)!r} reads no {name}; {instead} remove it",
                key=f"{key}.{name}",
            )


def encode_conversations(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[EncodedAnswer]:
    """Return the token ids of each prompt and of the response to it, the last message of the chat.

    A template can write a prompt in another way once a response follows. Then all tokens are in
    the first part.

    Raises:
        ModelError: as `encode_chats`.
    """
    unique = {str(chat[:-1]): chat[:-1] for chat in chats}
    starts = encode_chats(tokenizer, list(unique.values()), arguments=arguments)
    encoded = dict(zip(unique, starts, strict=True))
    found: list[EncodedAnswer] = []
    whole = encode_chats(tokenizer, chats, complete=True, arguments=arguments)
    for chat, ids in zip(chats, whole, strict=True):
        start = encoded[str(chat[:-1])]
        border = len(start) if ids[: len(start)] == start else len(ids)
        found.append((ids[:border], ids[border:]))
    return found


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    chats: list[TemplateChat],
    first: int,
    complete: bool,
    arguments: TemplateArguments,
) -> list[str]:
    """Return the text that the template writes for each chat; `first` is the number of the first.

    Raises `ModelError`, naming the first chat that the template cannot write.
    """
    if ("operator", "**") in _tokens_of_template(tokenizer, arguments):
        # Nothing can interrupt Python while it raises to a power.
        raise _template_error(tokenizer, "uses the operator **, which is not allowed")
    options: dict[str, Any] = dict(arguments)  # their types are up to the template
    try:
        with bounded(_TEMPLATE_S, _TEMPLATE_GB):
            written = tokenizer.apply_chat_template(
                chats,  # type: ignore[arg-type]  # transformers types a message as dict[str, str]
                add_generation_prompt=not complete,
                tokenize=False,
                **options,
            )
            texts = [str(text) for text in written]
    except OutOfTimeError:
        raise _template_error(tokenizer, f"takes more than {_TEMPLATE_S:g} s") from None
    except Exception as error:  # a template can raise anything, such as ZeroDivisionError
        if len(chats) > 1:  # find the chat that it cannot write
            single = enumerate(chats, start=first)
            return [_templated(tokenizer, [chat], i, complete, arguments)[0] for i, chat in single]
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise _template_error(tokenizer, f"fails on prompt {first}: {reason:.300}") from None
    for number, (text, chat) in enumerate(zip(texts, chats, strict=True), start=first):
        if len(text) > _SHORT + 4 * characters(chat):
            what = f"turns the {characters(chat)} characters of prompt {number} into {len(text)}"
            raise _template_error(tokenizer, what)
    return texts


def _names_in_template(
    tokenizer: PreTrainedTokenizerBase, arguments: TemplateArguments
) -> set[str]:
    """Return the names that a template uses, without those of attributes (`message.role`)."""
    found = _tokens_of_template(tokenizer, arguments)
    tokens = [token for token in found if token[0] != "whitespace"]
    before = [("", ""), *tokens]
    return {
        text
        for (kind, text), previous in zip(tokens, before, strict=False)
        if kind == "name" and previous != ("operator", ".")
    }


def _tokens_of_template(
    tokenizer: PreTrainedTokenizerBase, arguments: TemplateArguments
) -> list[tuple[str, str]]:
    """Return (kind, text) of each token of a template, in Jinja's language."""
    from jinja2 import TemplateSyntaxError

    found = tokenizer.chat_template
    tools: Any = arguments.get("tools")
    try:
        # Of several named templates, "tool_use" writes conversations with tools.
        named = isinstance(found, dict)
        template = tokenizer.get_chat_template(tools=tools) if named else str(found)
    except ValueError as error:  # none of them is named "default"
        raise _template_error(tokenizer, f"cannot be chosen: {error}") from None
    try:
        return _lexed(template)
    except TemplateSyntaxError as error:
        raise _template_error(tokenizer, f"is not valid: {error}") from None


@lru_cache(maxsize=8)  # agents write a chat for each turn
def _lexed(template: str) -> list[tuple[str, str]]:
    from jinja2 import Environment

    return [(kind, text) for _, kind, text in Environment().lex(template)]


def _template_error(tokenizer: PreTrainedTokenizerBase, problem: str) -> ModelError:
    name = str(tokenizer.name_or_path)
    return ModelError(f"the chat template of the tokenizer {name!r} {problem}", path=name)


class OutOfTimeError(Exception):
    """The code within `bounded` has exceeded its time."""


@contextmanager
def bounded(seconds: float, gigabytes: float) -> Iterator[None]:
    """Raise `OutOfTimeError` or `MemoryError` in the block once it exceeds its time or memory.

    The time is that of the CPU, at least so much on the clock: a process that is stopped, or waits
    for others, uses none. It is checked between two instructions of Python: one call of a function
    written in C is not interrupted. Memory (Linux only) is what the process allocates within the
    block in addition.
    """
    with _limited_memory(gigabytes), _limited_time(seconds):
        yield


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    thread, lock = threading.get_ident(), threading.Lock()
    over, raised = threading.Event(), threading.Event()
    ends = time.process_time() + seconds

    def interrupt() -> None:
        wait_s = seconds
        while not over.wait(wait_s) and (wait_s := ends - time.process_time()) > 0:
            pass
        with lock:
            if not over.is_set():
                raised.set()
                raise_in(thread, OutOfTimeError)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
        if raised.is_set():
            _receive_raised_exception()


def raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread, at the next point at which the interpreter looks for one.

    The exception must not be cancelled: after a cancelled one, CPython 3.11 looks for an exception
    at every such point for ever, and a profiler or a debugger then stops the process in a loop.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _receive_raised_exception() -> None:
    """Let an exception that another thread has raised in this one appear here at the latest."""
    for _ in range(100):
        pass  # the interpreter looks for one at each iteration


@contextmanager
def _limited_memory(gigabytes: float) -> Iterator[None]:
    # The private writable memory of this process; the system does not tell it outside of Linux.
    allocated = getattr(psutil.Process().memory_info(), "data", None)
    if allocated is None:
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = allocated + int(gigabytes * 2**30)
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    # The hard limit is kept, so that the soft one can be raised again.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
