"""One SGLang over its restarts: requests side by side, and weights with their version.

After a restart SGLang holds the weights of the model folder. The client then sends the weights that
it has kept and sets their version, before the requests without an answer are sent again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from quadriga.errors import RolloutDiedError, RolloutError, RolloutTimeoutError
from quadriga.parallel.distributed import rank
from quadriga.rollout.sglang.device_memory import DeviceMemory
from quadriga.rollout.sglang.pauses import Pauses
from quadriga.rollout.sglang.process import NAME
from quadriga.rollout.sglang.processes.frames import Json
from quadriga.rollout.sglang.start import Instance, Launch
from quadriga.rollout.sglang.transports import Body
from quadriga.rollout.sglang.weights import (
    HeldWeight,
    Shapes,
    buckets,
    check_restarted,
    checked,
    question,
    read_answer,
    version_of_server,
)

T = TypeVar("T")
Fault = RolloutDiedError | RolloutTimeoutError
"""What a restart can cure."""

_MOST_THREADS = 64


class Client:
    """See the module.

    Args:
        shapes: the weights of the model.
        at_once: the most requests that run side by side.

    Attributes:
        version: of the weights in SGLang; -1 for those of the folder.
        restarts: how often SGLang was started again.
        held: the weights that SGLang held when it was started, if they can be read back.
        received: the digest of each weight that SGLang has accepted, as it was sent to it last.
        memory: the device memory of SGLang.
        pauses: of generation.
    """

    def __init__(self, launch: Launch, shapes: Shapes, at_once: int) -> None:
        self._launch = launch
        self._options = launch.options
        self._shapes = shapes
        self._at_once = min(at_once, _MOST_THREADS)
        self._kept: dict[str, Tensor] = {}
        self._unusable = ""
        self._closed = False
        self._unknown: set[str] = set()  # names of an update that failed
        self.memory = DeviceMemory(self.call)
        self.pauses = Pauses(self.call)
        self.received: dict[str, int] = {}
        self.version = -1
        self.restarts = 0
        self._instance = launch.start()
        self.held: dict[str, HeldWeight] = {}
        try:
            if self._instance.host is None:
                self.version = self._adopt_version()
            else:
                self.held = self.read_back()
        except BaseException:
            self.close()
            raise

    def _adopt_version(self) -> int:
        """Return the version of the weights in a server that runs already."""
        info = self._instance.transport.get("/model_info", self._options.call_timeout_s)
        version = info.get("weight_version") if isinstance(info, dict) else None
        if version == "default":  # the weights of its model folder
            version = "-1"
            body: Body = {"new_version": version, "abort_all_requests": False}
            self.call("/update_weight_version", body)
        return version_of_server(version, self._options.url)

    # Requests

    def call(self, path: str, body: Body | None = None, payload: bytes = b"") -> Json:
        """Return the answer to a request that generates nothing.

        Raises:
            RolloutError: SGLang refused it, has ended, or did not answer in time.
        """
        instance = self._instance  # another thread may start SGLang again meanwhile
        try:
            return instance.transport.call(path, body or {}, self._options.call_timeout_s, payload)
        except (RolloutDiedError, RolloutTimeoutError):
            _end(instance)
            raise

    def run(self, bodies: Sequence[Body], read: Callable[[int, Json], T]) -> list[T]:
        """Send `/generate` requests side by side and return what `read` makes of each answer.

        If SGLang ends or does not answer, it is started again as often as the options allow, and
        the requests without an answer are sent again. Each answer is read once.

        Args:
            read: called with the index of the body and its answer.

        Raises:
            RolloutError: a request failed and could not be repeated.
        """
        self._check_usable()
        done: dict[int, T] = {}
        while len(done) < len(bodies):
            waiting = {i: body for i, body in enumerate(bodies) if i not in done}
            with ThreadPoolExecutor(min(len(waiting), self._at_once)) as pool:
                transport, limit = self._instance.transport, self._options.generate_timeout_s
                futures = {
                    i: pool.submit(transport.call, "/generate", body, limit)
                    for i, body in waiting.items()
                }
                fault = self._collect(futures, read, done)
            if fault is not None:
                self._recover(fault)
        return [done[i] for i in range(len(bodies))]

    def _collect(
        self, futures: dict[int, Future[Json]], read: Callable[[int, Json], T], done: dict[int, T]
    ) -> Fault | None:
        """Read all answers into `done`. Return the first fault that a restart can cure."""
        fault: Fault | None = None
        try:
            for i, future in futures.items():
                try:
                    answer = future.result()
                except CancelledError:
                    continue
                except (RolloutDiedError, RolloutTimeoutError) as error:
                    if fault is None:
                        fault = error
                        _cancel(futures)
                        # The requests that run end with it, before their deadlines.
                        _end(self._instance)
                    continue
                done[i] = read(i, answer)
        except BaseException:
            _cancel(futures)
            raise
        return fault

    def _recover(self, fault: Fault) -> None:
        """Start SGLang again with the last weights; raise `fault` if this may not be."""
        _end(self._instance)
        while self._may_restart():
            self.restarts += 1
            try:
                self._instance = self._launch.start()
                if self._closed:  # meanwhile
                    _end(self._instance)
                    break
                self.memory.started()
                self._unknown = set(self._kept)  # until they are sent
                if self._kept:
                    self._send(iter(self._kept.items()), self.version)
                if self.held:
                    held = {name: weight.digest for name, weight in self.held.items()}
                    check_restarted(held, self._kept, self.read_back(), self.version)
                self.pauses.started()
                return
            except (RolloutDiedError, RolloutTimeoutError) as error:
                _end(self._instance)
                fault = error
            except RolloutError as error:
                self._unusable = f"it failed before: {error}"
                _end(self._instance)
                raise
        self._unusable = f"it failed before: {fault}"
        raise fault

    def _may_restart(self) -> bool:
        started_here = self._instance.host is not None
        return started_here and not self._closed and self.restarts < self._options.restarts

    def _check_usable(self) -> None:
        problem = self._unusable
        if self._unknown and not problem:
            problem = (
                f"an update failed, so the values of {len(self._unknown)} weights are unknown, "
                f"{min(self._unknown)!r} among them; update them"
            )
        if problem:
            raise RolloutError(
                f"rollout engine {NAME!r} of rank {rank()}: {problem}", engine=NAME, rank=rank()
            )

    # Weights

    def update(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace weights and set their version; nothing of the old cache is used afterwards.

        Raises:
            ModelError: the model has no weight of that name and shape, or one comes twice.
            RolloutError: SGLang refused them, has ended, or did not answer in time.
        """
        stream = checked(stream, self._shapes, self.dtypes)
        if not self._options.restarts:
            self._send(stream, version)
            self.version = version
            return
        new = {name: weight.clone() for name, weight in stream}
        self._kept |= new
        self.version = version
        try:
            self._send(iter(new.items()), version)
        except (RolloutDiedError, RolloutTimeoutError) as fault:
            self._recover(fault)
        except BaseException:
            self._unknown |= new.keys()
            raise

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each weight that could be read back; the launch's dtype for the others."""
        return {
            name: self.held[name].dtype if name in self.held else self._launch.dtype
            for name in self._shapes
        }

    def _send(self, stream: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.memory.resume_weights()
        parts = buckets(stream, self._options.bucket_mb << 20)
        part = next(parts, None)  # the first bucket is checked before anything is changed
        sent: dict[str, int] = {}
        with self.pauses.for_update():
            with self._session():
                while part is not None:
                    self._unknown.update(part.digests)
                    self._update_bucket(part.payload)
                    sent.update(part.digests)
                    part = next(parts, None)
            self.call(
                "/update_weight_version",
                {"new_version": str(version), "abort_all_requests": False},
            )
            self._succeed("/flush_cache")
        self._unknown -= sent.keys()
        self.received |= sent

    def _update_bucket(self, payload: bytes) -> None:
        body: dict[str, Json] = {
            "ranks": self._options.tensor_parallel,
            "load_format": "flattened_bucket",
            "flush_cache": False,  # once, after the last bucket
        }
        self._succeed("/update_weights_from_tensor", body, payload)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Open a session of SGLang in which weights can be loaded, and close it again."""
        self._succeed("/begin_weight_update")
        try:
            yield
        except BaseException:
            with contextlib.suppress(RolloutError):  # the first error is the one to raise
                self.call("/end_weight_update")
            raise
        self._succeed("/end_weight_update")

    def read_back(self) -> dict[str, HeldWeight]:
        """Return the weights that SGLang holds; those that it cannot locate are missing.

        Raises:
            RolloutError: SGLang runs elsewhere, or reading back failed.
        """
        host = self._instance.host
        if host is None:
            raise RolloutError(f"rollout engine {NAME!r}: it was not started here", engine=NAME)
        self.memory.resume_weights()
        file = host.folder / "held.json"
        body: dict[str, Json] = {
            "ranks": self._options.tensor_parallel,
            "load_format": "quadriga.rollout.sglang.processes.readback.answer",
            "flush_cache": False,
        }
        with self._session():
            self._succeed("/update_weights_from_tensor", body, question(self._shapes, file))
        return read_answer(file)

    def _succeed(self, path: str, body: Body | None = None, payload: bytes = b"") -> None:
        """Call, and raise `RolloutError` if the answer says that it did not succeed."""
        answer = self.call(path, body, payload)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RolloutError(
                f"rollout engine {NAME!r} of rank {rank()}: SGLang did not carry out {path}: "
                f"{answer.get('message')}",
                engine=NAME,
                rank=rank(),
                method=path,
            )

    def resume(self) -> None:
        """Get all device memory back. An SGLang that has ended is started again, with all of it."""
        try:
            self.memory.resume()
        except (RolloutDiedError, RolloutTimeoutError) as fault:
            self._recover(fault)

    def close(self) -> None:
        """End SGLang if it was started here. Requests of other threads fail."""
        self._closed = True
        self._instance.transport.close()


def _end(instance: Instance) -> None:
    """End an SGLang that was started here: one that does not answer now may answer later."""
    if instance.host is not None:
        instance.transport.close()


def _cancel(futures: dict[int, Future[Json]]) -> None:
    for future in futures.values():
        future.cancel()
