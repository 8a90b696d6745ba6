"""The tokens at the border of two turns of an episode: token in, token out.

An episode is one sequence of tokens to which only new ones are added:

    prompt            prompt_ids(messages), up to where the policy writes
    turn              what the policy has sampled; it is never tokenised again
    observation       following_ids([(turn, messages)]): the end of the turn if the turn lacks it,
                      the messages, and what begins the next turn
    turn …

A chat template writes whole conversations. What it writes after a turn is found in the text of a
short conversation in which an invented turn stands for the sampled one: all that follows a marker
in this turn. So a template that writes earlier turns in another way (Qwen3 leaves out their
thoughts) cannot change what the policy has sampled. `Turns.rewrites` says when it would.

Worked example, ChatML. The conversation of a question, the turn "qzmarkerzq" and the observation
"4" is written as

    …<|im_start|>assistant\\nqzmarkerzq<|im_end|>\\n<|im_start|>user\\n4<|im_end|>\\n<|im_start|>…

A turn that ends with `<|im_end|>` gets the tokens of `\\n<|im_start|>user…`; a turn that was cut at
its limit gets `<|im_end|>` before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from quadriga.agents.environments import Message
from quadriga.config.convert import with_texts
from quadriga.data.chat import (
    NO_ARGUMENTS,
    TemplateArguments,
    chat_texts,
    check_template_arguments,
    continued,
    encode_chats,
    neutraliser,
)
from quadriga.errors import ConfigError, InputError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "qzmarkerzq"
QUESTION: Message = {"role": "user", "content": "qzquestionzq"}
_KEPT = 64  # entries of a cache whose keys policies and programs choose: names of tools, schemas
_CALL_ID = "call00000"  # nine letters and digits, which Mistral's templates ask for
_RESULT: Message = {"role": "tool", "name": "probe", "content": "qzresultzq"}


@dataclass(frozen=True)
class Border:
    """What a template writes after a turn.

    Attributes:
        ends: the tokens with which it ends a turn that is the last one, and one that is not. They
            differ in gpt-oss: `<|return|>` and `<|end|>`. Empty: it ends turns without a token.
        text: what follows the end of the turn.
    """

    ends: tuple[str, str]
    text: str


class Turns:
    """Tokens of prompts and observations, as the chat template of a tokenizer writes them.

    Special tokens, and tokens that the template writes between turns, become ordinary ones in the
    texts of messages and schemas (`neutraliser`), so that no tool writes a turn of another role.

    Args:
        chat_template_kwargs: arguments of the template.
        tools: schemas of tools, which the template writes into the prompt.
        ends: further tokens with which the model ends a turn.

    Attributes:
        end_ids: the tokens with which the template ends a turn.

    Raises:
        ConfigError: the template does not read an argument, or cannot write the tools or their
            results.
        ModelError: there is no template, or it cannot write a conversation of several turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: TemplateArguments = NO_ARGUMENTS,
        tools: Sequence[Mapping[str, object]] = (),
        ends: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(chat_template_kwargs)
        self._given = chat_template_kwargs
        self._of_tools: dict[str, Turns] = {}
        self._neutral = neutraliser(tokenizer)
        self._given_ends = ends
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(
            tokenizer.all_special_tokens
        )
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._alone: dict[str, str] = {}  # invented turn → conversation that ends with it
        borders = [self._border([QUESTION])]
        if tools:
            self._check_tools(tools)
            borders.append(self._border([_RESULT]))
        # Also tokens of the template that its tokenizer does not call special (DeepSeek).
        around = "".join(border.text for border in borders)
        self._neutral = neutraliser(tokenizer, more=[str(t) for t in added if str(t) in around])
        if tools:
            self._arguments["tools"] = with_texts(list(tools), self._neutral)
        words = {end for border in borders for end in border.ends if end}
        self.end_ids = frozenset(cast("list[int]", tokenizer.convert_tokens_to_ids(sorted(words))))
        self._ends = {*self.end_ids, *ends, tokenizer.eos_token_id}

    def with_tools(self, tools: Sequence[Mapping[str, object]]) -> Turns:
        """Return the same with the tools of a request. Raises `ConfigError` as `Turns`."""
        if not tools:
            return self
        key = json.dumps(tools, sort_keys=True)
        if key not in self._of_tools:
            if len(self._of_tools) >= _KEPT:
                self._of_tools.clear()
            self._of_tools[key] = Turns(self._tokenizer, self._given, tools, self._given_ends)
        return self._of_tools[key]

    def context_ids(self, messages: Sequence[Message], text: str = "") -> list[int]:
        """Return the tokens that begin a context: of a text, or as `prompt_ids`.

        Raises:
            InputError: a text has no tokens, or ends as a turn does.
            ModelError: as `prompt_ids`.
        """
        if not text:
            return self.prompt_ids(messages)
        ids = list(self._tokenizer(text)["input_ids"])
        if not ids or ids[-1] in self._ends:
            raise InputError(f"a prompt must not end with the end of a turn, got {text[-80:]!r}")
        return ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a prompt, up to where the policy writes.

        Raises:
            ModelError: the template cannot write it; for example, it takes no system message.
        """
        chat = self._own(messages)
        return encode_chats(self._tokenizer, [chat], arguments=self._arguments)[0]

    def following_ids(
        self, rows: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> list[list[int]]:
        """Return the tokens to append to each sampled turn, up to where the policy writes again.
        The template and the tokenizer run once for all rows.

        Args:
            rows: the tokens of the turn, of which only the last one is read, and what the policy
                sees next, messages of the roles "user" and "tool".

        Raises:
            ModelError: the template cannot write the messages of a row after a turn.
        """
        if not rows:
            return []
        before = [self._turn_before(messages) for _, messages in rows]
        pairs = zip(before, rows, strict=True)
        written = self._texts([[QUESTION, turn, *messages] for turn, (_, messages) in pairs])
        borders = [self._cut(turn, text) for turn, text in zip(before, written, strict=True)]
        texts = [border.ends[1] + border.text for border in borders]
        tokenised = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        found = list[list[int]]()
        for (sampled, _), border, ids in zip(rows, borders, tokenised, strict=True):
            last = sampled[-1] if len(sampled) else None
            if end := border.ends[1]:
                first = ids.index(self._tokenizer.convert_tokens_to_ids(end))
                found.append(ids[first + (last in self._ends) :])
                continue
            # GLM ends a turn with the token that begins the next one.
            begun, text = self._special.search(border.text), border.text
            if begun and self._tokenizer.convert_tokens_to_ids(begun[0]) == last:
                text = text[begun.end() :]
            found.append(continued(self._tokenizer, text, follows=True))
        return found

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of a turn with special tokens, without the token that ends it."""
        ended = len(sampled_ids) > 0 and sampled_ids[-1] in self._ends
        return str(self._tokenizer.decode(list(sampled_ids[: len(sampled_ids) - ended])))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return self._tokenizer.batch_decode([[token] for token in ids])

    def rewrites(self, messages: Sequence[Message], turns: Sequence[str]) -> bool:
        """Return whether the template writes a conversation in another way than the episode has it.

        Args:
            messages: the whole conversation, with messages behind its last turn.
            turns: texts that the policy has sampled for the last turns of the assistant in it.
        """
        own = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        own = own[len(own) - len(turns) :]
        try:
            whole = self._text(messages)
        except ModelError:  # it goes on as it is
            return False
        try:
            written = self._text(messages[: own[0]])
            for turn, text, following in zip(own, turns, [*own[1:], len(messages)], strict=True):
                border = self._border(messages[turn + 1 : following])
                written += text + border.ends[1] + border.text
            return written != whole
        except ModelError:  # it refuses a turn as the policy has written it
            return True

    def _check_tools(self, tools: Sequence[Mapping[str, object]]) -> None:
        """Check that the template writes the tools into a prompt, and results of a tool."""
        arguments: TemplateArguments = {"tools": list(tools)}
        name = f"the chat template of the tokenizer {str(self._tokenizer.name_or_path)!r}"
        other = "use a model whose template has tools, or describe them in the prompt, and let the "
        other += "environment answer with messages of the user"
        try:
            check_template_arguments(self._tokenizer, arguments)
        except ConfigError:
            raise ConfigError(f"{name} reads no tools; {other}", key="agent.path") from None
        self._arguments |= arguments
        try:
            prompt = self._text([QUESTION])
            result = self._border([_RESULT])
        except ModelError as error:
            raise ConfigError(f"{error}; {other}", key="agent.path") from None
        missing = [n for n in map(schema_name, tools) if n not in prompt]
        if missing:
            text = f"{name} does not write the schema of the tool {missing[0]!r}; {other}"
            raise ConfigError(text, key="agent.path")
        if str(_RESULT["content"]) not in result.text:
            text = f"{name} leaves out the results of tools; {other}"
            raise ConfigError(text, key="agent.path")

    def _text(self, chat: Sequence[Message], complete: bool = False) -> str:
        """Return the text of a chat; `complete`: nothing begins the next turn."""
        return self._texts([chat], complete)[0]

    def _texts(self, chats: Sequence[Sequence[Message]], complete: bool = False) -> list[str]:
        own = list(map(self._own, chats))
        return chat_texts(self._tokenizer, own, complete=complete, arguments=self._arguments)

    def _own(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in the form for the template, those of the assistant unchanged."""
        chat: list[dict[str, Any]] = []
        count = 0  # results of tools that follow each other
        for message in messages:
            own = dict(message)
            if own["role"] != "assistant":
                own = with_texts(own, self._neutral)
            count = count + 1 if own["role"] == "tool" else 0
            if count:
                own.setdefault("tool_call_id", f"call{count - 1:05d}")
            if self._joins_users and own["role"] == "user" and chat and chat[-1]["role"] == "user":
                own["content"] = chat.pop()["content"] + "\n\n" + own["content"]
            chat.append(own)
        return chat

    @cached_property
    def _joins_users(self) -> bool:
        """Whether messages of the user that follow each other are joined, because the template
        takes one alone."""
        arguments = self._arguments
        try:
            chat_texts(self._tokenizer, [[QUESTION, QUESTION]], arguments=arguments)
        except ModelError:
            # An error of the template that has another reason appears again at its first use.
            return True
        return False

    @cached_property
    def _call_form(self) -> int:
        """The form of the invented turn before results of tools: the first one that the template
        can write. See `invented_turn`. Raises `ModelError` if it writes no results of tools."""
        for form in (0, 1):
            with suppress(ModelError):
                self._border_of(invented_turn(form), [_RESULT])
                return form
        self._border_of(invented_turn(2), [_RESULT])
        return 2

    def _border(self, messages: Sequence[Message]) -> Border:
        """Return what the template writes after a turn which these messages follow."""
        return self._border_of(self._turn_before(messages), messages)

    def _turn_before(self, messages: Sequence[Message]) -> Message:
        """Return an invented turn which these messages may follow: with a call for each result of
        a tool, or with one, if the template writes only one."""
        results = takewhile(lambda message: message["role"] == "tool", self._own(messages))
        calls = [(str(own.get("name", "tool")), str(own["tool_call_id"])) for own in results]
        if not calls:
            return invented_turn(2)
        with suppress(ModelError):  # Llama 3 writes one call alone
            turn = invented_turn(self._call_form, calls)
            if MARKER in self._alone_text(turn):  # gpt-oss writes the first one
                return turn
        return invented_turn(self._call_form, calls[:1])

    def _border_of(self, turn: Message, messages: Sequence[Message]) -> Border:
        return self._cut(turn, self._text([QUESTION, turn, *messages]))

    def _cut(self, turn: Message, goes_on: str) -> Border:
        """Return what the template writes behind the marker of `turn`, without the end of a call.
        `goes_on`: its text with messages behind the turn.

        Raises `ModelError` if the template cannot write the turn, or does not write the marker.
        """
        _, found, behind = self._alone_text(turn).partition(MARKER)
        _, found_again, rest = goes_on.partition(MARKER)
        if not (found and found_again):
            raise self._error("does not write a turn of the assistant")
        # The last special token that both have ends the turn, behind a call `"}}</tool_call>`, too.
        alone, more = self._pieces(behind), self._pieces(rest)
        pairs = enumerate(zip(alone, more, strict=False))
        shared = next((i for i, (one, other) in pairs if one != other), min(len(alone), len(more)))
        for i in reversed(range(shared)):
            if self._special.fullmatch(alone[i]):
                return Border((alone[i], alone[i]), "".join(more[i + 1 :]))
        # The turn ends in another way when it is the last one, or without a special token.
        last = next(filter(self._special.fullmatch, alone), "")
        closing = behind.partition(last)[0] if last else behind.rstrip()
        if not rest.startswith(closing):
            raise self._error("writes a call in another way once its result follows")
        rest = rest[len(closing) :]
        # A special token ends the turn if it ends that of the user too. Else it begins the next.
        of_user = self._special.match(goes_on.partition(str(QUESTION["content"]))[2])
        own = of_user[0] if last and of_user and rest.startswith(of_user[0]) else ""
        return Border((last, own), rest[len(own) :])

    def _alone_text(self, turn: Message) -> str:
        """Return the text of a conversation that ends with an invented turn."""
        if (key := str(turn)) not in self._alone:
            if len(self._alone) > _KEPT:
                self._alone.clear()
            self._alone[key] = self._text([QUESTION, turn], complete=True)
        return self._alone[key]

    def _pieces(self, text: str) -> list[str]:
        """Return a text, divided before and behind each special token."""
        return [piece for piece in re.split(f"({self._special.pattern})", text) if piece]

    def _error(self, problem: str) -> ModelError:
        name = str(self._tokenizer.name_or_path)
        return ModelError(f"the chat template of the tokenizer {name!r} {problem}", path=name)


def invented_turn(form: int, calls: Sequence[tuple[str, str]] = (("probe", _CALL_ID),)) -> Message:
    """Return a turn of the assistant with `MARKER` near its end.

    Args:
        form: 0, a call of a tool with its arguments as a dict; 1, with its arguments as JSON, as
            DeepSeek's templates need them; 2, no call.
        calls: name of the tool, and id, of each call; the last one has the marker.
    """
    if form == 2:
        return {"role": "assistant", "content": MARKER}
    own = list[Message]()
    for number, (name, identity) in enumerate(calls, 1):
        given = {"value": MARKER if number == len(calls) else ""}
        function = {"name": name, "arguments": json.dumps(given) if form else given}
        own.append({"id": identity, "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": own}


def schema_name(schema: Mapping[str, Any]) -> str:
    """Return the name of the tool that a schema describes."""
    return str(schema.get("function", schema).get("name"))
