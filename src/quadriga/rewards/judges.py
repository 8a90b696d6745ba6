"""Judges: models that read a response and write a verdict, behind a server with OpenAI's API.

A reward file asks one or several:

    HELPFUL = Judge("http://127.0.0.1:8000/v1", "my-model", PROMPT, verdict=json_field("rating"))

    async def compute_score(response, question):
        return await judged({"helpful": HELPFUL}, response=response, question=question)

A judge that cannot be reached, or whose verdict cannot be read, raises `RewardError`: the response
has no score, and `reward.on_failure` says what follows. Of several judges, the others score it.
"""

import asyncio
import hashlib
import http.client
import json
import math
import os
import re
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, cast

from quadriga.config.secrets import mask_secrets
from quadriga.containment import describe
from quadriga.errors import ConfigError, RewardError

Verdict = Callable[[str], float | None]
"""Reads what a judge has written; None: there is no verdict in it."""
MAX_BYTES = 1 << 20  # of a reply
_PAUSE_S = 0.5  # before the second attempt; doubled before each further one
_THREADS = ThreadPoolExecutor(64, "judge")  # requests at once in this process
# "8" of "8/10", "7" of "Rating: 7."
_NUMBER = re.compile(r"(?<![/\d.\w])-?\d+(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number of a text; of "8/10" it is 8."""
    found = _NUMBER.findall(text)
    return float(found[-1]) if found else None


def matched(pattern: str) -> Verdict:
    """Return what reads the number in the first group of the last match of a regular expression."""
    compiled = re.compile(pattern)
    if compiled.groups < 1:
        raise ConfigError(f"the pattern of a verdict needs a group for its number, got {pattern!r}")

    def read(text: str) -> float | None:
        found = [match[1] for match in compiled.finditer(text)]
        return _number(found[-1]) if found else None

    return read


def json_field(name: str) -> Verdict:
    """Return what reads a number, or true or false, from the last JSON object of a text."""

    def read(text: str) -> float | None:
        for start in reversed([match.start() for match in re.finditer(r"\{", text)][-32:]):
            try:
                found, _ = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and name in found:
                return _number(found[name])
        return None

    return read


def _number(value: object) -> float | None:
    try:
        return float(cast("Any", value))
    except (TypeError, ValueError, OverflowError):
        return None


def filled(prompt: str, values: Mapping[str, object]) -> str:
    """Return a prompt with the values for `{name}`. Other braces stay, also those in values."""
    names = "|".join(map(re.escape, values)) or r"(?!)"
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), prompt)


@dataclass(eq=False)
class Judge:
    """A model that scores responses.

    Args:
        base_url: of the server, such as "http://127.0.0.1:8000/v1".
        model: its name there.
        prompt: the message to it. `{response}` and the names of other values stand for their texts.
        verdict: reads what it has written.
        key_env: the environment variable with the key of the server.
        options: further fields of a request.
        timeout_s: of one attempt.
        attempts: how often it is asked, the first time included, while the server or the network
            fails or the reply is no chat completion.
        cached: so many answers are kept in each process; equal requests are sent once.

    Raises:
        ConfigError: the address, the prompt or the attempts cannot be used.
    """

    base_url: str
    model: str
    prompt: str
    verdict: Verdict = last_number
    key_env: str | None = None
    options: Mapping[str, object] = field(default_factory=lambda: {"temperature": 0.0})
    timeout_s: float = 30.0
    attempts: int = 3
    cached: int = 4096
    _answers: OrderedDict[bytes, str] = field(default_factory=OrderedDict, init=False, repr=False)
    _asked: dict[bytes, asyncio.Task[str]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"the base_url of a judge must be http(s)://…, got {self.base_url!r}")
        if "{response}" not in self.prompt:
            raise ConfigError("the prompt of a judge must contain {response}")
        if self.attempts < 1:
            raise ConfigError(f"attempts of a judge must be at least 1, got {self.attempts}")

    async def score(self, **values: object) -> float:
        """Return the verdict on the values for the prompt.

        Raises:
            RewardError: no attempt has an answer, or the answer has no finite number.
        """
        message = {"role": "user", "content": filled(self.prompt, values)}
        request = {**self.options, "model": self.model, "messages": [message]}
        body = json.dumps(request).encode()
        text = await self._answer(body)
        found = self.verdict(text)
        if found is None or not math.isfinite(found):
            raise RewardError(f"judge {self.model}: no verdict can be read from {text[-200:]!r}")
        return float(found)

    async def _answer(self, body: bytes) -> str:
        """Return the answer to a request: a kept one, or that of a request on its way."""
        key = hashlib.sha256(body).digest()
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        task = self._asked.get(key)
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            task = self._asked[key] = asyncio.create_task(self._ask(body))
            task.add_done_callback(lambda _: self._asked.pop(key, None))
        # One of several responses that wait for it may exceed its deadline.
        text = self._answers[key] = await asyncio.shield(task)
        if len(self._answers) > self.cached:
            self._answers.popitem(last=False)
        return text

    async def _ask(self, body: bytes) -> str:
        loop, problem = asyncio.get_running_loop(), ""
        for attempt in range(self.attempts):
            await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1) if attempt else 0.0)
            try:
                async with asyncio.timeout(self.timeout_s):
                    reply = await loop.run_in_executor(_THREADS, self._post, body)
                content = json.loads(reply)["choices"][0]["message"]["content"]
                return str(content)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code} {error.reason}"
                if error.code < 500 and error.code not in (408, 429):
                    break
            except TimeoutError:
                problem = f"no answer within {self.timeout_s:g} s"
            except (OSError, http.client.HTTPException) as error:
                problem = describe(error)
            except (ValueError, LookupError, TypeError):
                problem = "the reply is no chat completion"
        raise RewardError(mask_secrets(f"judge {self.model} at {self.base_url}: {problem}"))

    def _post(self, body: bytes) -> bytes:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        if self.key_env is not None:
            if not (key := os.environ.get(self.key_env)):
                raise RewardError(f"judge {self.model}: the variable {self.key_env} is not set")
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
            return bytes(reply.read(MAX_BYTES))


async def judged(
    judges: Mapping[str, Judge], *, tolerance: float = 0.0, **values: object
) -> dict[str, float]:
    """Return what a reward function returns: the mean of the verdicts as the score.

    Beside it stand each verdict under the name of its judge, `<name>/failed`, and `agreement`: the
    share of pairs of judges whose verdicts differ by at most `tolerance`. A judge without a verdict
    has only `<name>/failed`.

    Raises:
        ConfigError: there is no judge, or one has the name of another number of the result.
        RewardError: no judge has a verdict; the error of the first one.
    """
    if not judges or (taken := sorted(judges.keys() & {"score", "answer", "agreement"})):
        problem = f"a judge cannot be called {taken[0]!r}" if judges else "there is no judge"
        raise ConfigError(f"judges={list(judges)}: {problem}; name each one after what it reads")
    asked = await asyncio.gather(*(_tried(judge, values) for judge in judges.values()))
    found = dict(zip(judges, asked, strict=True))
    scores = {name: one for name, one in found.items() if isinstance(one, float)}
    if not scores:
        raise next(one for one in found.values() if isinstance(one, RewardError))
    pairs = [abs(a - b) <= tolerance for a, b in combinations(scores.values(), 2)]
    agreement = {"agreement": sum(pairs) / len(pairs)} if pairs else {}
    failed = {f"{name}/failed": float(name not in scores) for name in judges}
    return {"score": sum(scores.values()) / len(scores), **scores, **failed, **agreement}


async def _tried(judge: Judge, values: Mapping[str, object]) -> float | RewardError:
    try:
        return await judge.score(**values)
    except RewardError as error:
        return error
