"""moto's S3 server on loopback, and faults that a test puts into its answers."""

import io
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from loopback_server import LoopbackServer

BUCKET = "bucket"


@dataclass
class Fault:
    """What happens to the next `times` requests with this method, whose path and query hold `part`:
    error (500), hang, cut (half of a body is stored), flip (another byte is stored), behind (a
    listing is empty)."""

    kind: str
    method: str
    part: str = ""
    times: int = 1


class S3Server(LoopbackServer):
    """`faults` are used up in their order; `hang_s`: how long a request hangs."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self.hang_s, self.delay_s = 2.5, 0.0
        super().__init__()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        asked = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        method = environ["REQUEST_METHOD"]
        with self._lock:  # requests are answered side by side
            left = (f for f in self.faults if f.times and f.method == method and f.part in asked)
            if (fault := next(left, None)) is not None:
                fault.times -= 1
        time.sleep(self.delay_s if method == "PUT" else 0)
        if fault is None:
            return self._app(environ, start)
        if fault.kind in ("error", "hang"):
            time.sleep(self.hang_s if fault.kind == "hang" else 0)
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if fault.kind == "behind":
            empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            start("200 OK", [("Content-Type", "application/xml")])
            return [empty]
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        changed = bytes([body[0] ^ 1]) + body[1:]
        body = body[: len(body) // 2] if fault.kind == "cut" else changed
        environ = {k: v for k, v in environ.items() if "CHECKSUM" not in k and "MD5" not in k}
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        return self._app(environ, start)
