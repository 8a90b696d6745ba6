"""The environment of a rank's process: variables, the port of rank 0, modules to import first.

The variables have the names of torchrun, so `torch.distributed.init_process_group` works without
arguments. Which accelerators a process may use is read from the variables of all vendors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quadriga.errors import ConfigError, PlacementError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

NOSET_FLAGS = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
)


def ray_noset_visible_devices(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user told Ray, for any vendor, not to set the visible devices."""
    return any(env.get(flag, "0").lower() in ("1", "true") for flag in NOSET_FLAGS)


def visible_devices(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the visible devices ("0,1") that the vendors' variables give, None if none is set.

    Raises `PlacementError` naming the variables if two of them differ.
    """
    given = {name: env[name] for name in VISIBLE if env.get(name)}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name}={value}" for name, value in given.items())
        raise PlacementError(
            f"Two variables give different visible devices: {listed}. Set one, or all to one list.",
            wanted=given,
        )
    return next(iter(given.values()), None)


def unify_visible_devices() -> str | None:
    """Set CUDA_VISIBLE_DEVICES, unset the variables of other vendors, and return the value.

    PyTorch for ROCm reads CUDA_VISIBLE_DEVICES too. With one variable, libraries that read
    different variables use the same devices.
    """
    devices = visible_devices()
    if devices is None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")
    for name in VISIBLE[1:]:
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    return devices


def device_index(local_rank: int, devices: str | None, noset: bool) -> int:
    """Return the index, among the visible devices, of the device that a rank uses.

    Ray makes only its own device visible to a process, as number 0. With a `NOSET` flag, or
    outside Ray, a process sees all devices of the node and uses the one of its local rank.
    """
    if devices is None:
        return local_rank
    count = len([part for part in devices.split(",") if part.strip()])
    return local_rank if noset or count > 1 else 0


LOCAL_PORT = "none: several local ranks share one process"
"""MASTER_PORT of a local group with several ranks, which does not support collectives."""


@dataclass(frozen=True)
class RankEnvironment:
    """The position of one rank in its group, and the address of rank 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = ""
    master_port: str = ""
    group_prefix: str = ""

    def variables(self) -> dict[str, str]:
        """Return the position as environment variables."""
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
        """Read the position from environment variables. Without any: rank 0 of a group of one.

        Raises `ConfigError` naming a variable that is not a whole number.
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


_OF_GROUPS = frozenset(RankEnvironment(0, 1, 0, 1).variables()) | {
    "RAY_LOCAL_RANK",
    "RAY_LOCAL_WORLD_SIZE",
    "WG_BACKEND",
}
"""The variables that a worker group sets."""

WorkerEnv = Mapping[str, str] | Sequence[Mapping[str, str]] | Callable[[int], Mapping[str, str]]
"""The environment variables of a group: the same for all ranks, one mapping per rank, or a function
of the rank."""


def variables_of_rank(worker_env: WorkerEnv | None, rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that a user has set for one rank.

    Raises `ConfigError` for a list of another length, for a name or a value that is not a string,
    and for a variable that the group sets itself.
    """
    if worker_env is None:
        return {}
    if isinstance(worker_env, Sequence) and len(worker_env) != world_size:
        raise ConfigError(
            f"worker_env has {len(worker_env)} entries for {world_size} ranks. Pass one mapping "
            "per rank, one mapping for all, or a function of the rank.",
            key="worker_env",
        )
    if not isinstance(worker_env, Mapping):
        worker_env = worker_env[rank] if isinstance(worker_env, Sequence) else worker_env(rank)
    variables = dict(worker_env)
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(
                f"worker_env of rank {rank}: names and values must be strings, got {name!r}: "
                f"{value!r}.",
                key="worker_env",
            )
    if own := sorted(_OF_GROUPS & set(variables)):
        raise ConfigError(
            f"worker_env of rank {rank} has {', '.join(own)}, which the worker group sets for each "
            "rank from its place in the group. Remove it; master_port_range chooses the port.",
            key="worker_env",
        )
    return variables


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside a `with` block and restore them afterwards."""
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
    """A TCP port of this machine that is reserved until `release` or the end of the process.

    Rank 0 chooses the port long before `init_process_group` starts a server on it. A socket is
    bound to the port in between, without listening:

        group A  bind 40001, SO_REUSEADDR ──── reserved ────┬── TCPStore binds 40001: succeeds
        group B  bind 0 ("any free port")  gets 40002       │   (SO_REUSEADDR, no listener yet)

    The system never gives a bound port to a process that asks for any free port. SO_REUSEADDR on
    both sockets lets a server bind the port by its number, because the first one does not listen.
    """

    port: int
    _socket: socket.socket

    @classmethod
    def choose(cls, within: Sequence[int] | None = None) -> ReservedPort:
        """Reserve a free port. `within`: the permitted ports as (first, last + 1).

        Raises `PlacementError` if none of them is free.
        """
        for port in (0,) if within is None else range(*within):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.bind(("", port))
            except OSError:
                sock.close()
                continue
            # After bind: with SO_REUSEADDR, bind would also succeed on a port that another group
            # has reserved.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return cls(int(sock.getsockname()[1]), sock)
        raise PlacementError(
            f"No port in {list(within or ())} is free on this machine.", wanted=within
        )

    def release(self) -> None:
        """Close the socket."""
        self._socket.close()


_preload: list[str] = []


def preload_in_workers(module_name: str) -> None:
    """Import `module_name` in rank processes that start from now on, before their worker classes.

    For modules that change what other imports find, such as import aliases and plug-ins.
    """
    if module_name not in _preload:
        _preload.append(module_name)


def preloaded() -> tuple[str, ...]:
    """Return the modules that worker processes import first, if they are loaded here."""
    return tuple(name for name in _preload if name in sys.modules)
