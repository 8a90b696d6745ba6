"""The connection to Ray: start or join a cluster, and typed access to what Ray leaves untyped."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast
from weakref import WeakSet

import psutil
import ray
import ray.util.client
from ray.job_config import JobConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.backends.ray.session import private_folder
from quadriga.errors import ConfigError, WorkerDiedError, first_line
from quadriga.files import cannot_write

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    Ref: TypeAlias = ray.ObjectRef[object]
    """Ray's reference to one object. At run time `ray.ObjectRef` cannot be subscripted."""

STACK_SIGNAL = signal.SIGUSR2
"""On this signal the process of a rank writes the stacks of its threads to its stack file."""

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # By default Ray deletes unreferenced objects once a second. Until then new objects are written
    # to pages of shared memory that were never touched, which takes several times as long.
    "RAY_free_objects_period_milliseconds": "10",
    # By default Ray's workers yield to all others (niceness 15): beside reward processes that use
    # all CPUs, ranks would get a thirtieth of the time.
    "RAY_worker_niceness": "0",
}
"""Ray settings of a cluster that is started here. Variables that the user has set stay."""

_SESSION_BYTES = 2**18
"""A disk with less free space is full: the first files of a session are larger."""


STORE_LOST_S = 50.0
"""How long `ray.init` may go on without the control store that it has started. Within that it can
raise; after 60 s Ray ends the process with exit code 1."""


class RemoteMethod(Protocol):
    """A method of an actor, as Ray offers it on a handle."""

    def remote(self, *args: object) -> Ref:
        """Submit one task."""

    def options(self, **options: object) -> RemoteMethod:
        """Return the same method with other task options (`name`, `num_returns`, …)."""


BESIDE = "beside"
"""Ray's concurrency group of the second thread of a rank (`register(beside=True)`)."""


class RankActor(Protocol):
    """An actor. Every attribute is a method of its class, such as `RankProcess.quadriga_invoke`."""

    def __getattr__(self, name: str) -> RemoteMethod: ...


class ActorFactory(Protocol):
    """An actor class, as `ray.remote(cls)` returns it."""

    def options(self, **options: object) -> ActorFactory:
        """Return the same class with other actor options."""

    def remote(self, *args: object) -> RankActor:
        """Start one actor."""


@dataclass(frozen=True)
class RayNode:
    """One node of the cluster, as Ray's control store (GCS) records it."""

    node_id: str
    address: str
    port: int
    """The port that the node's raylet listens on."""
    alive: bool
    resources: Mapping[str, float]


@dataclass(eq=False)
class RaySession:
    """One use of this process's connection to Ray. `owned`: `ensure_ray` made the connection."""

    owned: bool

    def __post_init__(self) -> None:
        _open_sessions.add(self)

    def close(self, *, lost: bool = False) -> None:
        """End this use. The last one also shuts Ray down if a session made the connection.

        `lost`: the cluster is. All uses end: after 60 s without it, Ray would end this process.
        """
        if self not in _open_sessions:
            return
        _open_sessions.remove(self)
        if self.owned and (lost or not _open_sessions) and ray.is_initialized():
            ray.shutdown()


# A session that is dropped without `close` does not keep Ray running for the others.
_open_sessions: WeakSet[RaySession] = WeakSet()


def is_last(session: RaySession | None) -> bool:
    """Return whether this process has no other open session than this one."""
    return all(other is session for other in _open_sessions)


def ensure_ray(
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    object_store_memory: int | None = None,
    address: str | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    **options: object,
) -> RaySession:
    """Connect to Ray. Without an address, start a cluster of this machine alone.

    Args:
        num_cpus: CPUs of a cluster that is started here.
        num_gpus: GPUs of a cluster that is started here.
        object_store_memory: bytes of its object store.
        address: address of a running cluster; "auto" for the one on this machine. RAY_ADDRESS is
            used if it is set.
        namespace: Ray namespace of named actors.
        log_to_driver: print the output of the workers here.
        options: further arguments of `ray.init`. `include_dashboard` is False by default; with
            the package ray[default], True starts the dashboard, which `ray list actors` reads.

    An existing connection is used unchanged, unless no node of its cluster is alive. Raises
    `ConfigError` for Ray Client (`ray://`), and `WorkerDiedError` if the Ray of this machine does
    not come up.
    """
    refuse_ray_client(address or os.environ.get("RAY_ADDRESS"))
    owned = any(session.owned for session in _open_sessions)
    if owned and ray.is_initialized() and not any(node.alive for node in cluster_nodes()):
        ray.shutdown()  # of the machine alone, whose raylet has ended
    if ray.is_initialized():
        return RaySession(owned=owned)
    _open_sessions.clear()  # of a Ray that has ended
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    settings: dict[str, object] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        "job_config": DriverConfig(),
        **options,
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        settings["address"] = address
    else:
        protect_token()
        if "RAY_TMPDIR" not in os.environ and "_temp_dir" not in options:
            settings["_temp_dir"] = private_folder()
        # "local" starts a cluster even if another one runs on this machine.
        settings.update(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_memory,
            include_dashboard=options.get("include_dashboard", False),
        )
    # Ray logs its token authentication at warning level on every start.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if address:
        ray.init(**settings)  # type: ignore[arg-type]  # settings of several types in one dict
    else:
        _start_ray(settings)
    return RaySession(owned=True)


def _start_ray(settings: Mapping[str, object]) -> None:
    """Start a cluster of this machine. If it does not come up, no process of it is left."""
    before, done = {*psutil.Process().children()}, threading.Event()
    threading.Thread(target=_end_without_store, args=(before, done), daemon=True).start()
    try:
        ray.init(**settings)  # type: ignore[arg-type]
    except Exception as error:
        # Ray does not name a full disk: its processes end, and it says that they start too late.
        folder = Path(str(settings.get("_temp_dir") or os.environ.get("RAY_TMPDIR") or "/tmp"))
        near = next(path for path in (folder, *folder.parents) if path.exists())
        full = shutil.disk_usage(near).free < _SESSION_BYTES
        # What Ray raises if a process of it has not come up.
        if not full and type(error) not in (Exception, RuntimeError):
            raise
        _kill_others(before)
        if full:
            no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise cannot_write(folder, no_space) from error
        text = "Ray has not started on this machine; one of its processes has ended, or is too slow"
        raise WorkerDiedError(f"{text}: {first_line(error)}") from error
    finally:
        done.set()


def _end_without_store(before: set[psutil.Process], done: threading.Event) -> None:
    """End this process, with the exit code of a loss, if the control store has ended while Ray
    starts: the thread that starts it waits in C, where it cannot be told. `before`: the children of
    this process that are not Ray's."""
    stores, ended_s = set[psutil.Process](), 0
    while ended_s < STORE_LOST_S:
        if done.wait(1.0):
            return
        with suppress(psutil.NoSuchProcess):
            found = {*psutil.Process().children()} - before
            stores |= {process for process in found if process.name() == "gcs_server"}
            alive = [p for p in stores & found if p.status() != psutil.STATUS_ZOMBIE]
            ended_s = 0 if alive or not stores else ended_s + 1
    _kill_others(before)
    text = "error: Ray has not started: its control store (GCS) has ended meanwhile\n"
    os.write(2, text.encode())
    os._exit(os.EX_TEMPFAIL)


def _kill_others(before: set[psutil.Process]) -> None:
    """Kill the children of this process that were started since."""
    for process in {*psutil.Process().children()} - before:
        kill_with_children(process.pid)


def kill_with_children(pid: int) -> None:
    """Kill a process and its descendants, as far as they still exist."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()


class DriverConfig(JobConfig):
    """Lets the processes of Ray search modules where this process does.

    Ray puts two folders first in their `sys.path`: that of the program, and the working directory,
    in which this process may search nothing. A `torch.py` there would run in each rank.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        """Return True: Ray then adds neither folder. It asks before it sends the job to nodes."""
        if not super()._runtime_env_has_working_dir():  # type: ignore[no-untyped-call]  # of Ray
            own = {os.path.realpath(path) for path in sys.path}  # "" is the working directory
            folders = dict.fromkeys((os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()))
            self._py_driver_sys_path = [folder for folder in folders if folder in own]
        return True


def protect_token() -> None:
    """Let only this user read Ray's token, with which a process can run code in the cluster.

    Ray writes a new token with the default mode, so all users of the machine could read it. It
    takes an empty file for a missing token and keeps the file's mode: such a file is made here. An
    existing token that all users can read is made private; any other mode is the user's choice.
    """
    chosen = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or any(
        name in os.environ for name in chosen
    ):
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):  # no home folder that can be written: Ray reports that itself
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_mode & stat.S_IROTH:
                os.fchmod(file, 0o600)
        finally:
            os.close(file)


def refuse_ray_client(address: str | None = None) -> None:
    """Raise `ConfigError` if this process is connected through Ray Client, or `address` is of it.

    Such a process is no process of the cluster: it has no store, its references are those of a
    proxy, and Ray tells it neither the node of an object nor the state of an actor.
    """
    is_client = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]  # of Ray
    if is_client or (address or "").startswith("ray://"):
        raise ConfigError(
            "Ray Client (ray://) is not supported: the controller puts batches into the object "
            f"store of its node, and a client has none. Got {address or 'a connected client'}. "
            "Start the program on a node of the cluster, for example with `ray job submit` or with "
            'address="auto".',
            key="address",
        )


def cluster_nodes() -> list[RayNode]:
    """Return every node that Ray's control store knows, dead ones included."""
    return [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["NodeManagerPort"]),
            bool(node["Alive"]),
            dict(node["Resources"]),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # untyped in Ray
    ]


def free_resources() -> dict[str, float]:
    """Return the resources of the cluster that no process holds."""
    return dict(ray.available_resources())  # type: ignore[no-untyped-call]  # untyped in Ray


def node_address() -> str:
    """Return the address by which other machines of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # untyped in Ray


def this_node() -> str:
    """Return Ray's id of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


def actor_on_node(cls: type, node: str, **options: object) -> RankActor:
    """Start an actor without resources on a node, or with `get_if_exists` return the one that has
    the `name`. An actor ends with the handle that has started it; handles got by its name do
    not keep it."""
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    factory = cast("ActorFactory", ray.remote(cls))
    return factory.options(num_cpus=0, **options).remote()


def kill_actor(actor: RankActor) -> None:
    """End the process of an actor at once."""
    ray.kill(cast("ActorHandle[object]", actor))
