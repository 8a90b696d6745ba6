"""The process that holds `sglang.Engine`: `python -m quadriga.rollout.sglang.host`.

It reads one frame from standard input: {"device", "args"}, where `args` are those of SGLang's
`ServerArgs`. It then answers frames {"id", "path", "body"} with {"id", "status", "body"}, side by
side. Paths and bodies are those of SGLang's HTTP server. It ends when its input ends. Whatever
SGLang prints goes to standard error.

A frame is a JSON object, and bytes that are not JSON. Neither side unpickles what it reads:

    4 bytes    length of the JSON text
    8 bytes    length of the payload
    JSON text, payload
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that JSON can hold."""

_HEADER = struct.Struct("!IQ")
_CHUNK = 1 << 20
_WRITE_S = 300.0  # the rank reads all the time, so a write that takes longer has no reader

Handler = Callable[[dict[str, Any], bytes], Awaitable[Json]]


def write_frame(fd: int, message: Json, payload: bytes, deadline: float) -> None:
    """Write one message to a non-blocking file descriptor.

    Args:
        deadline: the time of `time.monotonic` at which to give up.

    Raises:
        TimeoutError: the reader did not read in time. A part of the message may be written.
        OSError: the reader has closed its end.
    """
    text = json.dumps(message, separators=(",", ":")).encode()
    for part in (_HEADER.pack(len(text), len(payload)) + text, payload):
        view = memoryview(part)
        while view:
            _, ready, _ = select.select([], [fd], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(view)} bytes could not be written in time")
            view = view[os.write(fd, view[:_CHUNK]) :]


def read_frame(fd: int) -> tuple[Json, bytes] | None:
    """Read one message from a blocking file descriptor; None when the writer has closed its end."""
    header = _read(fd, _HEADER.size)
    if header is None:
        return None
    text_size, payload_size = _HEADER.unpack(header)
    text, payload = _read(fd, text_size), _read(fd, payload_size)
    if text is None or payload is None:
        return None
    return json.loads(text), payload


def _read(fd: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, min(_CHUNK, size - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


def main() -> None:
    """Read the first frame, and run SGLang."""
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    first = read_frame(source)
    assert first is not None and isinstance(first[0], dict)
    settings: dict[str, Any] = first[0]
    _serve(settings["args"], _scheduler(settings), source, target)


def _scheduler(settings: Mapping[str, Any]) -> Callable[..., None]:
    """Return the function that SGLang's scheduler processes run."""
    if settings["device"] == "cpu" and settings["args"]["enable_deterministic_inference"]:
        from quadriga.rollout.sglang.scheduler import allow_seeds, run_seeded

        allow_seeds()
        return run_seeded
    from sglang.srt.managers.scheduler import run_scheduler_process

    run: Callable[..., None] = run_scheduler_process
    return run


def _serve(
    arguments: Mapping[str, Any], scheduler: Callable[..., None], source: int, target: int
) -> None:
    from sglang.srt.entrypoints.engine import Engine

    Engine.run_scheduler_process_func = staticmethod(scheduler)
    engine = Engine(**arguments)
    loop = engine.loop
    answers = _Answers(target)
    handlers = _handlers(engine.tokenizer_manager)
    loop.run_until_complete(_answer_all(source, answers, handlers))


class _Answers:
    """Writes one frame at a time. A thread writes, so that a slow reader does not stop SGLang."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._lock = threading.Lock()

    async def send(self, message: Json) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._write, message)

    def _write(self, message: Json) -> None:
        with self._lock:
            write_frame(self._fd, message, b"", time.monotonic() + _WRITE_S)


async def _answer_all(source: int, answers: _Answers, handlers: Mapping[str, Handler]) -> None:
    loop = asyncio.get_running_loop()
    frames: asyncio.Queue[tuple[Json, bytes] | None] = asyncio.Queue()

    def read() -> None:
        while (frame := read_frame(source)) is not None:
            loop.call_soon_threadsafe(frames.put_nowait, frame)
        loop.call_soon_threadsafe(frames.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    await answers.send({"id": 0, "status": 200, "body": None})  # ready
    running = set()
    while (frame := await frames.get()) is not None:
        message, payload = frame
        assert isinstance(message, dict)
        task = asyncio.ensure_future(_answer(message, payload, answers, handlers))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    message: dict[str, Any], payload: bytes, answers: _Answers, handlers: Mapping[str, Handler]
) -> None:
    try:
        body = await handlers[message["path"]](message["body"], payload)
        status = 200
    except Exception as error:  # every failure of a request is an answer; the rank raises it
        body, status = {"message": f"{type(error).__name__}: {error}"}, 400
    await answers.send({"id": message["id"], "status": status, "body": body})


def _handlers(manager: Any) -> dict[str, Handler]:
    """Return for each path the call that SGLang's HTTP server makes."""
    from sglang.srt.managers import io_struct

    async def generate(body: dict[str, Any], payload: bytes) -> Json:
        last: Json = None
        async for result in manager.generate_request(io_struct.GenerateReqInput(**body), None):
            last = result
        return last

    async def update(body: dict[str, Any], payload: bytes) -> Json:
        count = body.pop("ranks")
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * count, **body
        )
        return _outcome(await manager.update_weights_from_tensor(request, None))

    def control(method: str, request: str, *, takes_http_request: bool = False) -> Handler:
        async def call(body: dict[str, Any], payload: bytes) -> Json:
            arguments = [getattr(io_struct, request)(**body)]
            if takes_http_request:
                arguments.append(None)
            return _outcome(await getattr(manager, method)(*arguments))

        return call

    async def flush(body: dict[str, Any], payload: bytes) -> Json:
        return _outcome(await manager.flush_cache(**body))

    async def abort(body: dict[str, Any], payload: bytes) -> Json:
        return _outcome(manager.abort_request(**body))

    async def model_info(body: dict[str, Any], payload: bytes) -> Json:
        return {"weight_version": manager.config_value("weight_version")}

    return {
        "/generate": generate,
        "/model_info": model_info,
        "/begin_weight_update": control(
            "begin_weight_update", "BeginWeightUpdateReqInput", takes_http_request=True
        ),
        "/update_weights_from_tensor": update,
        "/end_weight_update": control(
            "end_weight_update", "EndWeightUpdateReqInput", takes_http_request=True
        ),
        "/update_weight_version": control("update_weight_version", "UpdateWeightVersionReqInput"),
        "/flush_cache": flush,
        "/pause_generation": control("pause_generation", "PauseGenerationReqInput"),
        "/continue_generation": control("continue_generation", "ContinueGenerationReqInput"),
        "/abort_request": abort,
        "/release_memory_occupation": control(
            "release_memory_occupation", "ReleaseMemoryOccupationReqInput", takes_http_request=True
        ),
        "/resume_memory_occupation": control(
            "resume_memory_occupation", "ResumeMemoryOccupationReqInput", takes_http_request=True
        ),
    }


def _outcome(result: object) -> Json:
    """Return the part of a result that says whether the call succeeded."""
    if isinstance(result, tuple):
        return {"success": bool(result[0]), "message": str(result[1])}
    success = getattr(result, "success", None)
    message = getattr(result, "message", None)
    return {"success": success is not False, "message": str(message or "")}


if __name__ == "__main__":
    main()
