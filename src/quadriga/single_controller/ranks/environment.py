"""Who a rank is: the environment variables every rank process has, and how they are chosen.

The names are torchrun's, so `torch.distributed.init_process_group` works without arguments.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quadriga.errors import ConfigError, PlacementError

LOCAL_PORT = "none: several local ranks share one process"
"""MASTER_PORT of a local group of several ranks, which cannot hold collectives."""


@dataclass(frozen=True)
class RankEnvironment:
    """One rank's place in its group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = ""
    master_port: str = ""
    group_prefix: str = ""

    def variables(self) -> dict[str, str]:
        """As environment variables."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
            "WG_PREFIX": self.group_prefix,
        }

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> RankEnvironment:
        """From environment variables; what is not set is that of a group of one.

        Raises ConfigError naming a variable that is no number.
        """
        return cls(
            rank=_number(env, "RANK", 0),
            world_size=_number(env, "WORLD_SIZE", 1),
            local_rank=_number(env, "LOCAL_RANK", 0),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", 1),
            master_address=env.get("MASTER_ADDR", ""),
            master_port=env.get("MASTER_PORT", ""),
            group_prefix=env.get("WG_PREFIX", ""),
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    given = env.get(name, "")
    try:
        return int(given) if given else default
    except ValueError:
        raise ConfigError(
            f"The environment variable {name} must be a whole number, got {given!r}.", key=name
        ) from None


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of a `with` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass
class ReservedPort:
    """A free TCP port of this machine, kept from others until `release` or the process ends.

    The socket is bound but never listens, with SO_REUSEADDR: the system gives the port to nobody
    who asks for any free one, while a server that names it (torch's TCPStore) can bind it.
    """

    port: int
    _socket: socket.socket

    @classmethod
    def choose(cls, within: Sequence[int] | None = None) -> ReservedPort:
        """Reserve a free port; `within`: (first, last + 1), the ports that may be used.

        Raises PlacementError if none of them is free.
        """
        if within is None:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", 0))
            return cls(int(sock.getsockname()[1]), sock)
        for port in range(*within):
            reserved = cls.try_port(port)
            if reserved is not None:
                return reserved
        raise PlacementError(f"No port in {list(within)} is free on this machine.", wanted=within)

    @classmethod
    def try_port(cls, port: int) -> ReservedPort | None:
        """Reserve this very port; None if it is taken."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind(("", port))
        except OSError:
            sock.close()
            return None
        # Only now: bound without it, the socket has found every other that holds the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return cls(port, sock)

    def release(self) -> None:
        self._socket.close()
