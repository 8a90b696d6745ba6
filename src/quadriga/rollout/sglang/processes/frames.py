"""Messages between rank and host: a JSON object, and bytes that are not JSON.

    4 bytes    length of the JSON text
    8 bytes    length of the payload
    JSON text, payload

Neither side unpickles what it reads.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that JSON can hold."""

_HEADER = struct.Struct("!IQ")
_CHUNK = 1 << 20


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
