"""Functions that play whole episodes."""

import asyncio
import json
import os
from http.client import HTTPConnection
from pathlib import Path

from quadriga.agents.environments import Done
from quadriga.errors import InputError

USER = {"role": "user"}
waiting = []
LIST_CALL = {"id": "a", "function": {"name": "add", "arguments": "[1]"}}


async def talk(model, row):
    """Three requests: the second one continues the first, the third one begins a context."""
    chat = [USER | {"content": row["name"]}]
    chat += [await model.chat(chat), USER | {"content": "more"}]
    chat += [await model.chat(chat)]
    other = await model.chat([USER | {"content": f"other {chat[1]['content']}"}])
    return Done(len(other["content"]), {"requests": 3})


async def branches(model, row):
    replies = await asyncio.gather(*(model.chat([USER | {"content": f"{i}"}]) for i in range(3)))
    return float("".join(reply["content"] for reply in replies))


async def calls(model, row):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: another one
        """
        return a + b

    chat = [USER | {"content": "2 + 3?"}]
    reply = await model.chat(chat, tools=[add])
    chat += [reply]
    for call in reply.get("tool_calls", ()):
        chat.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
    return float((await model.chat(chat, tools=[add]))["content"])


async def fails(model, row, how):
    if how == "at once":
        return 1.0
    await model.chat([USER | {"content": "a"}])
    if how == "content":
        await model.chat([USER | {"content": 3}])
    if how == "nothing":
        return None
    if how in ("exit", "interrupt"):
        raise SystemExit(3) if how == "exit" else KeyboardInterrupt
    if how == "raise":
        raise ValueError("of the user")
    await asyncio.sleep(100)


async def gives_up(model, row):
    try:
        async with asyncio.timeout(0.1):
            await model.chat([USER | {"content": "slow"}])
    except TimeoutError:
        return 0.25


async def over_http(model, row):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        chat = [USER | {"content": "first"}]
        create = client.chat.completions.create
        first = await create(model=model.name, messages=chat, logprobs=True, temperature=0.1)
        chat += [first.choices[0].message.model_dump(), USER | {"content": "second"}]
        streamed, last, names, usages = "", None, set(), [first.usage]
        more = {"stream": True, "stream_options": {"include_usage": True}}
        async for part in await create(model=model.name, messages=chat, **more):
            for choice in part.choices:
                streamed += choice.delta.content or ""
                last = choice.finish_reason or last
            names.add(part.id)
            usages.append(part.usage)
            assert (part.usage is None) == bool(part.choices)
        third = await client.completions.create(model=model.name, prompt="Once", logprobs=1)
        assert third.choices[0].logprobs.tokens == [], "its turn has no tokens"
        parts = [
            part async for part in await client.completions.create(
                model=model.name, prompt="Twice", stream=True
            )
        ]  # fmt: skip
        assert [t.logprob for t in first.choices[0].logprobs.content] == [-0.5, -0.1]
        models = [each.id async for each in client.models.list()]
        tokens, byte_lists = zip(
            *((t.token, t.bytes) for t in first.choices[0].logprobs.content), strict=True
        )
        assert (streamed, last) == ("two", "length"), streamed
        assert (tokens, byte_lists) == (("one", "\ufffd"), ([111, 110, 101], None))
        assert len(names) == 1
        assert (third.choices[0].text, models) == ("three", [model.name])
        [fourth] = parts
        assert (fourth.choices[0].text, fourth.usage) == ("four", None)
        counts = [
            (one.prompt_tokens, one.completion_tokens, one.total_tokens)
            for one in [*filter(None, usages), third.usage]
        ]
        assert counts == [(7, 2, 9), (9, 2, 11), (4, 0, 4)], counts
    return 1.0


async def refused(model, row):
    """Returns the number of requests that are refused as they must be."""
    import httpx2

    body = {"model": model.name, "messages": [USER | {"content": "a"}]}
    chat, key = f"{model.base_url}/chat/completions", f"Bearer {model.api_key}"
    cases = [
        (401, "Bearer other", body),
        (401, "", body),
        (404, key, body | {"model": "gpt-5"}),
        (400, key, body | {"n": 2}),
        (400, key, body | {"stop": ["x"]}),
        (400, key, body | {"messages": []}),
        (400, key, body | {"messages": "a"}),
        (400, key, body | {"messages": [USER | {"content": 3}]}),
        (400, key, body | {"max_tokens": -1}),
        *((400, key, body | {"max_tokens": count}) for count in (2.5, 0, True)),
        (400, key, body | {"max_tokens": 5, "max_completion_tokens": 0}),
        (400, key, body | {"modalities": ["text", "audio"]}),
        (400, key, body | {"tools": ["add"]}),
        (400, key, body | {"tools": [{"type": "function", "function": {"name": "?"}}]}),
        (400, key, body | {"parallel_tool_calls": False}),
        (400, key, body | {"logprobs": True, "top_logprobs": 2}),
        (400, key, body | {"messages": [USER | {"tool_calls": [LIST_CALL]}]}),
        (400, key, body | {"stream": True, "stream_options": [1]}),
        (400, key, [1]),
    ]
    async with httpx2.AsyncClient(timeout=60) as client:
        for status, token, given in cases:
            found = await client.post(chat, json=given, headers={"Authorization": token})
            assert found.status_code == status, (given, found.text)
            assert found.json()["error"]["message"]
        nested = await client.post(chat, content=b"[" * 9999, headers={"Authorization": key})
        assert nested.status_code == 400
        for found in (await client.post(f"{chat}s"), await client.get(chat)):
            assert "is none of POST /v1/chat/completions" in found.json()["error"]["message"]
    await model.chat(body["messages"])
    return len(cases)


async def asks_behind_its_end(model, row):
    """Its second request is refused when the episode ends before the turn; a file says so."""
    import httpx2

    async def ask():
        body = {"model": model.name, "messages": [USER | {"content": "b"}]}
        async with httpx2.AsyncClient(timeout=60) as client:
            url, key = f"{model.base_url}/chat/completions", {"Authorization": model.api_key}
            found = await client.post(url, json=body, headers=key)
        Path(row["name"]).write_text(f"{found.status_code} {found.text}")

    waiting.append(asyncio.create_task(ask()))
    await model.chat([USER | {"content": "a"}])
    await asyncio.sleep(60)


async def in_a_process(model, row):
    """A program of its own, in a process."""
    import sys

    program = (
        "import os, openai\n"
        "client = openai.OpenAI()\n"
        "reply = client.chat.completions.create(\n"
        "    model='policy', messages=[{'role': 'user', 'content': 'a'}])\n"
        "print(reply.choices[0].message.content)\n"
    )
    own = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": model.api_key}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env={**os.environ, **own}, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return float(out)


def _asked(model, text, timeout=60):
    import httpx2

    body = {"model": model.name, "messages": [USER | {"content": text}], "max_tokens": None}
    url, key = f"{model.base_url}/chat/completions", {"Authorization": f"Bearer {model.api_key}"}
    try:
        found = httpx2.post(url, json=body, headers=key, timeout=timeout)
    except httpx2.TimeoutException:
        return "late"
    return found.text if found.is_error else found.json()["choices"][0]["message"]["content"]


async def works_between(model, row):
    """Its second request is on the connection of the first one."""
    line = HTTPConnection(model.base_url.split("/")[2])
    for text, seconds in (("a", 6), ("b", 0)):
        body = json.dumps({"model": model.name, "messages": [USER | {"content": text}]})
        own = "/v1/chat/completions", body, {"Authorization": f"Bearer {model.api_key}"}
        await asyncio.to_thread(line.request, "POST", *own)
        (await asyncio.to_thread(line.getresponse)).read()
        line.auto_open = 0
        await asyncio.sleep(seconds)
    return 1.0


async def in_threads(model, row):
    """Threads ask; one of them gives its request up."""
    said = [await asyncio.to_thread(_asked, model, *args) for args in (["a"], ["lost", 0.5])]
    try:
        await asyncio.to_thread(lambda: asyncio.run(model.chat([USER | {"content": "a"}])))
    except InputError as error:
        said.append(str(error))
    await model.chat([USER | {"content": f"{said}"}], max_tokens=None)
    return 1.0
