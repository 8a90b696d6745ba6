"""Programs on the nodes of a Ray cluster, with a connection to this process."""

from __future__ import annotations

import hmac
import itertools
import secrets
import select
import signal
import socket
import subprocess
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

import ray
from ray.exceptions import RayError

from quadriga.backends.ray.cluster import RankActor, actor_on_node, cluster_nodes, node_address
from quadriga.containment import start_program
from quadriga.errors import WorkerDiedError, first_line

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref

_START_S = 60.0  # for the actor of a node, and for the connection of a program
_LOOK_S = 0.5
_TOKEN_BYTES = 32
_numbers = itertools.count()
_actors: WeakValueDictionary[str, RankActor] = WeakValueDictionary()
"""Node → the actor that has programs there. It ends with the last `NodeProgram`."""


class NodePrograms:
    """The class of the actor that is the parent of the programs on a node. They end with it."""

    def __init__(self) -> None:
        self._programs: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self, number: int, address: tuple[str, int], token: bytes, program: str, given: list[str]
    ) -> None:
        """Start a program that has a connection to `address`, which knows it by the token."""
        with socket.create_connection(address, timeout=_START_S) as connection:
            connection.settimeout(None)
            connection.sendall(token)
            self._programs[number] = start_program(program, connection.fileno(), given)

    def terminate(self, number: int) -> None:
        """Ask a program to end, unless `wait` has seen its end."""
        if number in self._programs:
            self._programs[number].terminate()

    def wait(self, number: int, timeout: float) -> int:
        """Return the exit code of a program, which is killed if it does not end in time."""
        program = self._programs.pop(number)
        with suppress(subprocess.TimeoutExpired):
            return program.wait(timeout)
        program.kill()
        return -signal.SIGKILL


class NodeProgram:
    """A program on a node, with the methods of `subprocess.Popen` that a pool calls.

    Attributes:
        pid: 0, because no process of this machine may be meant.
    """

    pid = 0
    returncode: int | None = None

    def __init__(self, actor: RankActor, number: int) -> None:
        self._actor, self._number = actor, number

    def terminate(self) -> None:
        """Ask the program to end."""
        if ray.is_initialized():  # otherwise it has ended with the actor
            self._actor.terminate.remote(self._number)

    def wait(self, timeout: float) -> int:
        """Return the exit code. A program that does not end in time is killed."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL  # if its node is lost
            with suppress(RayError):
                if ray.is_initialized():
                    call = self._actor.wait.remote(self._number, timeout)
                    self.returncode = cast(int, ray.get(call, timeout=2 * timeout))
        return self.returncode


def start_on_a_node(program: str, arguments: list[str]) -> tuple[Connection, NodeProgram]:
    """Start a module as a program on the next node of the cluster.

    Raises:
        WorkerDiedError: it cannot be started there.
    """
    try:
        return _started(program, arguments)
    except WorkerDiedError:  # the process of the actor had ended
        return _started(program, arguments)


def _started(program: str, arguments: list[str]) -> tuple[Connection, NodeProgram]:
    nodes, number = [node for node in cluster_nodes() if node.alive], next(_numbers)
    node, token = nodes[number % len(nodes)], secrets.token_bytes(_TOKEN_BYTES)
    actor = _actors.get(node.node_id)
    if actor is None:
        actor = actor_on_node(NodePrograms, node.node_id, max_concurrency=1000)
        _actors[node.node_id] = actor
    try:
        with socket.create_server((node_address(), 0)) as server:
            address = server.getsockname()[:2]
            started = actor.start.remote(number, address, token, program, arguments)
            connection = _accepted(server, token, started)
            ray.get(started, timeout=_START_S)
    except (RayError, TimeoutError) as error:
        _actors.pop(node.node_id, None)
        text = f"{program} cannot be started on node {node.address}: {first_line(error)}"
        raise WorkerDiedError(text) from error
    return connection, NodeProgram(actor, number)


def _accepted(server: socket.socket, token: bytes, started: Ref | None = None) -> Connection:
    """Return the first connection that begins with the token. Raises what the start has raised."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if not select.select([server], [], [], _LOOK_S)[0]:
            if started is not None and ray.wait([started], timeout=0)[0]:
                ray.get(started)
            continue
        found, _ = server.accept()
        with found, suppress(OSError):
            found.settimeout(_START_S)
            if hmac.compare_digest(found.recv(len(token), socket.MSG_WAITALL), token):
                found.settimeout(None)
                return Connection(found.detach())
    raise TimeoutError(f"it has no connection after {_START_S:g} s")
