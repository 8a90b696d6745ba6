"""An OpenAI-compatible endpoint of the policy, for programs that play episodes.

    POST /v1/chat/completions     messages, tools, stream, stream_options, logprobs, max_tokens
    POST /v1/completions          prompt, stream, stream_options, logprobs, max_tokens
    GET  /v1/models

It is part of the process that hosts the episodes, on loopback. The token of a request says which
episode it belongs to. The policy samples as the run does: the temperature and the other sampling
settings of a request are not read. What a program would miss without notice is refused: several
choices, stop strings, forced calls and grammars.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from quadriga.agents.environments import Action, Message
from quadriga.errors import ConfigError, InputError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Json = dict[str, Any]
MODEL_NAME = "policy"
_IDLE_S = 3600  # for which a connection stays: a program works between its requests


@dataclass(frozen=True)
class Reply:
    """A turn of the policy, as the answer to a request.

    Attributes:
        message: `{"role": "assistant", "content": …}`, with `tool_calls` if it calls tools that the
            request has. A call that cannot be read stays in the content.
    """

    message: Message
    action: Action


class Policy(Protocol):
    """The policy in one episode. Both methods raise `InputError` if a request cannot be used."""

    async def ask(self, messages: list[Any], tools: list[Any], max_tokens: int | None) -> Reply:
        """Return the reply to a conversation."""
        ...

    async def complete(self, text: str, max_tokens: int | None) -> Reply:
        """Return what follows a text."""
        ...


_ROUTES = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"
_REFUSED: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, "", []),
    "echo": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "function_call": (None,),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "parallel_tool_calls": (None, True),
    "modalities": (None, ["text"]),
    "top_logprobs": (None, 0),
}
"""Parameter of a request → the values that it may have."""


class _RequestError(Exception):
    """A request that is refused, with its status and its code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """The server of this process.

    Args:
        loop: that hosts the episodes. The caller may be in another thread.

    Attributes:
        base_url: what clients take as their base URL.

    Raises:
        ConfigError: starlette or uvicorn are not installed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.exceptions import HTTPException
            from starlette.routing import Route
        except ImportError as error:
            raise ConfigError(
                f"an endpoint of the policy needs starlette and uvicorn ({error}); install "
                "quadriga[agents]"
            ) from error

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the process has handlers of its own

        self._policies: dict[str, Policy] = {}
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        handled = _RequestError, InputError, HTTPException
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, _error))
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=_IDLE_S
        )
        self._serving = asyncio.run_coroutine_threadsafe(Server(config).serve([listening]), loop)

    def key_of(self, policy: Policy) -> str:
        """Return the token of an episode."""
        for key, known in self._policies.items():
            if known is policy:
                return key
        key = secrets.token_urlsafe(24)
        self._policies[key] = policy
        return key

    def forget(self, policy: Policy) -> None:
        """Answer no more requests of an episode."""
        self._policies = {k: known for k, known in self._policies.items() if known is not policy}

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        self._policy_of(request)
        model = {"id": MODEL_NAME, "object": "model", "owned_by": "quadriga", "created": 0}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        policy, body = self._policy_of(request), await _body(request)
        tools, messages = body.get("tools") or [], body.get("messages")
        if not isinstance(messages, list) or not isinstance(tools, list):
            raise _RequestError(400, "invalid_value", "messages and tools must be lists")
        tools = [] if body.get("tool_choice") == "none" else tools
        reply = await _unless_gone(request, policy.ask(messages, tools, _max_tokens(body)))
        finish = _finish_reason(reply)
        choice: Json = {"index": 0, "finish_reason": finish}
        if body.get("logprobs"):
            tokens = [
                {"token": text, "logprob": number, "bytes": _bytes(text), "top_logprobs": []}
                for text, number in reply.action.tokens
            ]
            choice["logprobs"] = {"content": tokens}
        if not body.get("stream"):
            return _sent("chat.completion", [{**choice, "message": reply.message}], reply)
        delta = dict(reply.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        first = {**choice, "delta": delta, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": finish}
        return _streamed("chat.completion.chunk", [first, last], reply, body)

    async def _complete(self, request: Request) -> Response:
        policy, body = self._policy_of(request), await _body(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise _RequestError(400, "invalid_value", "prompt must be one text")
        reply = await _unless_gone(request, policy.complete(prompt, _max_tokens(body)))
        finish = _finish_reason(reply)
        choice: Json = {"index": 0, "text": reply.action.text, "finish_reason": finish}
        if body.get("logprobs"):
            texts, numbers = ([token[i] for token in reply.action.tokens] for i in (0, 1))
            choice["logprobs"] = {"tokens": texts, "token_logprobs": numbers}
        if body.get("stream"):
            return _streamed("text_completion", [choice], reply, body)
        return _sent("text_completion", [choice], reply)

    def _policy_of(self, request: Request) -> Policy:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        for key, policy in list(self._policies.items()):
            if hmac.compare_digest(key.encode(), given):
                return policy
        text = "the token belongs to no episode that is played; use model.api_key"
        raise _RequestError(401, "invalid_api_key", text)


@cache
def endpoint_of_process(loop: asyncio.AbstractEventLoop) -> Endpoint:
    """Return the endpoint of this process, which starts with the first call."""
    return Endpoint(loop)


async def _body(request: Request) -> Json:
    """Return the parameters of a request.

    Raises:
        _RequestError: they are no JSON object, name another model, or ask for what is not done.
    """
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise _RequestError(400, "invalid_json", f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise _RequestError(400, "invalid_json", "the body must be a JSON object")
    if body.get("model") != MODEL_NAME:
        text = f"there is no model {body.get('model')!r:.80}; this endpoint has {MODEL_NAME!r}"
        raise _RequestError(404, "model_not_found", text)
    if not isinstance(body.get("stream_options") or {}, dict):
        raise _RequestError(400, "invalid_value", "stream_options must be an object")
    for name, allowed in _REFUSED.items():
        if body.get(name) not in allowed:
            text = f"{name}={body[name]!r:.80} is not supported; leave it out"
            raise _RequestError(400, "unsupported_parameter", text)
    return body


def _max_tokens(body: Json) -> Any:
    """Return what a request gives, which may be anything: the policy refuses what is no count."""
    count = body.get("max_completion_tokens")
    return body.get("max_tokens") if count is None else count


async def _unless_gone(request: Request, asked: Coroutine[Any, Any, Reply]) -> Reply:
    """Return the reply to a request, or give it up if its client has hung up."""
    reply, gone = asyncio.create_task(asked), asyncio.ensure_future(request.receive())
    await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not reply.done():
        reply.cancel()
        raise _RequestError(499, "client_closed_request", "the client has hung up")
    return await reply


def _bytes(token: str) -> list[int] | None:
    """Return the bytes of the text of a token; None if it may be a part of a character."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())


def _finish_reason(reply: Reply) -> str:
    if not reply.action.finished:
        return "length"
    return "tool_calls" if reply.message.get("tool_calls") else "stop"


def _about(kind: str, choices: list[Json]) -> Json:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    about = {"id": f"{prefix}-{secrets.token_hex(8)}", "object": kind, "model": MODEL_NAME}
    return {**about, "created": int(time.time()), "choices": choices}


def _usage(action: Action) -> Json:
    prompt, own = action.prompt_tokens, len(action.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}


def _sent(kind: str, choices: list[Json], reply: Reply) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({**_about(kind, choices), "usage": _usage(reply.action)})


def _streamed(kind: str, choices: list[Json], reply: Reply, body: Json) -> Response:
    """Return server-sent events. A turn is whole when its first event is sent."""
    from starlette.responses import Response

    about, options = _about(kind, []), body.get("stream_options") or {}
    chunks = [{**about, "choices": [choice]} for choice in choices]
    if options.get("include_usage"):
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**about, "usage": _usage(reply.action)})
    text = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, chunks), "[DONE]"])
    return Response(text, media_type="text/event-stream")


async def _error(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    status, code, text = 400, "invalid_value", str(error)
    if isinstance(error, _RequestError):
        status, code = error.status, error.code
    elif not isinstance(error, InputError):  # of starlette: another path, or another method
        status, code = getattr(error, "status_code", 500), "unknown_url"
        text = f"{request.method} {request.url.path} is none of {', '.join(_ROUTES)}"
    body = {"message": text, "type": "invalid_request_error", "code": code, "param": None}
    return JSONResponse({"error": body}, status_code=status)
