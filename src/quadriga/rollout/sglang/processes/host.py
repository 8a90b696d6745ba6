"""The process that holds SGLang: `python -m quadriga.rollout.sglang.processes.host`.

It reads one frame from standard input: {"mode": "engine" or "server", "device", "args"}, where
`args` are those of SGLang's `ServerArgs`. The arguments hold the key of the server, so they are not
on the command line, which other users can read.

- "engine": it then answers frames {"id", "path", "body"} with {"id", "status", "body"}, side by
  side. Paths and bodies are those of SGLang's HTTP server. It ends when its input ends.
- "server": SGLang's HTTP server runs until the process is killed.

Whatever SGLang prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quadriga.rollout.sglang.processes import cpu_seeds
from quadriga.rollout.sglang.processes.frames import Json, read_frame, write_frame

_WRITE_S = 300.0  # the rank reads all the time, so a write that takes longer has no reader

Handler = Callable[[dict[str, Any], bytes], Awaitable[Json]]


def main() -> None:
    """Read the first frame, and run SGLang."""
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    first = read_frame(source)
    assert first is not None and isinstance(first[0], dict)
    settings: dict[str, Any] = first[0]
    scheduler = _scheduler(settings)
    if settings["mode"] == "server":
        _serve_http(settings["args"], scheduler)
    else:
        _serve_pipe(settings["args"], scheduler, source, target)


def _scheduler(settings: Mapping[str, Any]) -> Callable[..., None]:
    """Return the function that SGLang's scheduler processes run."""
    if settings["device"] == "cpu" and settings["args"]["enable_deterministic_inference"]:
        cpu_seeds.allow()
        return cpu_seeds.run_scheduler
    from sglang.srt.managers.scheduler import run_scheduler_process

    run: Callable[..., None] = run_scheduler_process
    return run


def _serve_http(arguments: Mapping[str, Any], scheduler: Callable[..., None]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**arguments), run_scheduler_process_func=scheduler)


def _serve_pipe(
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
