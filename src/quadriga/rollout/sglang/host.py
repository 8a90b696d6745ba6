"""Hold `sglang.Engine` in a process: `python -P -m quadriga.rollout.sglang.host SOCKET FOLDER`.

The first message from the rank is {"device", "args"}, where `args` are those of SGLang's
`ServerArgs`. Then each request is two messages, {"id", "path", "body"} and bytes that are not JSON,
and is answered by {"id", "status", "body"}, side by side. Paths and bodies are those of SGLang's
HTTP server. Neither side unpickles what it reads.

The host ends, with its whole process group and FOLDER, when the rank ends or closes the socket.
This module imports SGLang only within functions.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that JSON can hold."""

_LOOK_S = 0.5
"""How often to look whether the rank still runs."""

Handler = Callable[[dict[str, Any], bytes], Awaitable[Json]]


def main() -> None:
    """Read the settings, and run SGLang."""
    number, folder = sys.argv[1:]
    threading.Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    os.set_inheritable(int(number), False)
    rank = Connection(int(number))
    settings: dict[str, Any] = json.loads(rank.recv_bytes())
    arguments = settings["args"]
    name_shared_memory(folder)
    from sglang.srt.entrypoints.engine import Engine

    _prepare(settings["device"])
    scheduler = partial(run_scheduler, settings["device"])
    Engine.run_scheduler_process_func = staticmethod(scheduler)
    engine = Engine(**arguments)
    engine.loop.run_until_complete(_answer_all(rank, _handlers(engine.tokenizer_manager)))
    end_group(os.getpgrp(), folder)


def _end_with(rank: int, folder: str) -> None:
    while os.getppid() == rank:
        time.sleep(_LOOK_S)
    end_group(os.getpgrp(), folder)


def end_group(group: int, folder: str) -> None:
    """Kill the processes of a group, and remove their folder and their shared memory."""
    remove(folder)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def remove(folder: str) -> None:
    """Remove the folder of processes, and what they have in /dev/shm under its name."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in Path("/dev/shm").glob(f"*{Path(folder).name}*"):
        path.unlink(missing_ok=True)


def name_shared_memory(folder: str) -> None:
    """Let semaphores and shared memory of this process and those below it have its folder's name.

    So they are found when all processes were killed. The other names that Python and SGLang give
    them do not say whose they are.
    """
    name = Path(folder).name
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{name}"
    vars(shared_memory).update(_SHM_NAME_PREFIX=f"/{name}_", _SHM_SAFE_NAME_LENGTH=len(name) + 16)


async def _answer_all(rank: Connection, handlers: Mapping[str, Handler]) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[tuple[dict[str, Any], bytes] | None] = asyncio.Queue()
    writer = ThreadPoolExecutor(1)  # so that a slow reader does not stop SGLang
    running = set()

    def read() -> None:
        try:
            while True:
                request = json.loads(rank.recv_bytes()), rank.recv_bytes()
                loop.call_soon_threadsafe(requests.put_nowait, request)
        except EOFError:
            loop.call_soon_threadsafe(requests.put_nowait, None)

    async def send(number: int, status: int, body: Json) -> None:
        answer = json.dumps({"id": number, "status": status, "body": body})
        await loop.run_in_executor(writer, rank.send_bytes, answer.encode())

    async def carry_out(message: dict[str, Any], payload: bytes) -> None:
        try:
            body = await handlers[message["path"]](message["body"], payload)
        except Exception as error:  # every failure of a request is an answer; the rank raises it
            await send(message["id"], 400, {"message": f"{type(error).__name__}: {error}"})
        else:
            await send(message["id"], 200, body)

    threading.Thread(target=read, daemon=True).start()
    await send(0, 200, None)  # ready
    while (request := await requests.get()) is not None:
        task = asyncio.ensure_future(carry_out(*request))
        running.add(task)
        task.add_done_callback(running.discard)


def _handlers(manager: Any) -> dict[str, Handler]:
    """Return for each path the call that SGLang's HTTP server makes."""
    from sglang.srt.managers import io_struct

    async def generate(body: dict[str, Any], payload: bytes) -> Json:
        last: Json = None
        async for result in manager.generate_request(io_struct.GenerateReqInput(**body), None):
            last = result
        return last

    async def update(body: dict[str, Any], payload: bytes) -> Json:
        if payload:
            body["serialized_named_tensors"] = [payload] * body.pop("ranks")
        request = io_struct.UpdateWeightsFromTensorReqInput(**body)
        return _outcome(await manager.update_weights_from_tensor(request, None))

    def control(name: str, *http_request: None) -> Handler:
        """Return the call of a method, `end_weight_update` with an EndWeightUpdateReqInput."""
        words = [word.capitalize() for word in name.split("_")]
        request = getattr(io_struct, f"{''.join(words)}ReqInput")

        async def call(body: dict[str, Any], payload: bytes) -> Json:
            return _outcome(await getattr(manager, name)(request(**body), *http_request))

        return call

    async def flush(body: dict[str, Any], payload: bytes) -> Json:
        return _outcome(await manager.flush_cache(**body))

    found: dict[str, Handler] = {
        "/generate": generate,
        "/update_weights_from_tensor": update,
        "/flush_cache": flush,
    }
    for name in ("update_weight_version", "pause_generation", "continue_generation"):
        found[f"/{name}"] = control(name)
    for name in (
        "begin_weight_update", "end_weight_update", "release_memory_occupation",
        "resume_memory_occupation",
    ):  # fmt: skip
        found[f"/{name}"] = control(name, None)
    return found


def _outcome(result: object) -> Json:
    """Return the part of a result that says whether the call succeeded."""
    if isinstance(result, tuple):
        return {"success": bool(result[0]), "message": str(result[1])}
    success = getattr(result, "success", None)
    return {"success": success is not False, "message": str(getattr(result, "message", ""))}


def run_scheduler(device: str, *arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler, in a process of its own."""
    name_shared_memory(tempfile.gettempdir())
    from sglang.srt.managers.scheduler import run_scheduler_process

    _prepare(device)
    run_scheduler_process(*arguments, **named)


def _prepare(device: str) -> None:
    """Change SGLang in this process: names of its shared memory, and what it cannot do on a CPU.

    On a CPU, it pins the memory for the experts of tokens by CUDA. It gives each sample a seed only
    in its deterministic inference, which also replaces kernels of the GPU and refuses to start.
    Here the seeds are kept, and the kernels stay, so the response of a row can still depend on the
    other rows by rounding.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.managers import load_snapshot
    from sglang.srt.mem_cache.pool_host import common

    own = f"/dev/shm/{Path(tempfile.gettempdir()).name}"
    load_snapshot.shm_path_for = lambda name: f"{own}_{name}"
    if device == "cpu":
        common._cuda_host_register = lambda *_: None
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
        batch_invariant_ops.enable_batch_invariant_mode = lambda: None


if __name__ == "__main__":
    main()
