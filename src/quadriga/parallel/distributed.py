"""The process group of a worker group, its device mesh, and reductions of plain numbers.

Every collective has a timeout: if one rank does not join, the other ranks fail after `timeout_s`
seconds.
"""

import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # not in its __all__
    HashStore,
    PrefixStore,
    TCPStore,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quadriga.errors import CollectiveError, ConfigError, ModelError
from quadriga.parallel.device import collective_backend, torch_device

ValueT = TypeVar("ValueT")

REPLICATE = "replicate"
SHARD = "shard"
_LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def init_distributed(
    device_name: str = "cpu", *, timeout_s: float = 600.0, alone: bool = False
) -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; `alone`:
    a group of this rank, which exchanges nothing with the others.

    Does nothing if this process has already joined a group. A group of one rank needs no address
    and has no store. If all ranks are on one node (LOCAL_WORLD_SIZE = WORLD_SIZE), no socket of
    the group accepts connections from another machine.

    Raises:
        CollectiveError: WORLD_SIZE is above 1 and one of the other variables is not set or no
            number, rank 0 cannot listen on MASTER_ADDR, or the group has other ranks.
    """
    world_size = 1 if alone else _number_of("WORLD_SIZE", 1)
    if dist.is_initialized():
        # A local rank whose process has a group of another rank would compute without the others.
        if "WORLD_SIZE" in os.environ and not alone and world_size != dist.get_world_size():
            raise CollectiveError(
                f"WORLD_SIZE is {world_size} (MASTER_PORT {os.environ.get('MASTER_PORT')}), but "
                f"this process has joined a group of {dist.get_world_size()} ranks; start each "
                "rank in a process of its own"
            )
        return
    timeout = timedelta(seconds=timeout_s)
    backend = collective_backend(device_name)
    if world_size == 1:
        own = HashStore()
        # This may be the controller, whose child processes must not inherit the variable.
        names = gloo_on_loopback()
        os.environ.update(names)
        try:
            dist.init_process_group(backend, store=own, rank=0, world_size=1, timeout=timeout)
        finally:
            for name in names:
                del os.environ[name]
        return
    missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise CollectiveError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set; a worker group sets "
            "these variables before a worker's __init__ runs, other launchers must set them too"
        )
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    one_node = local_size == str(world_size)
    if one_node:
        # Kept, because the process groups of a mesh are made later.
        os.environ.update(gloo_on_loopback())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent listens on MASTER_PORT; no rank does.
        dist.init_process_group(backend, timeout=timeout)
        return
    own_rank = _number_of("RANK", 0)
    address = _LOOPBACK if one_node else os.environ["MASTER_ADDR"]
    port, several_nodes = _number_of("MASTER_PORT", 0), bool(local_size) and not one_node
    if own_rank > 0:
        store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    else:
        store, _ = serve_store(
            address, world_size, timeout, several_nodes=several_nodes, port=port, waits=True
        )
    dist.init_process_group(
        backend, store=store, rank=own_rank, world_size=world_size, timeout=timeout
    )


class Collectives(Protocol):
    """The collectives of a process group, registered with torch or not."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allreduce(self, tensors: list[Tensor], /) -> dist.Work: ...
    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], /
    ) -> dist.Work: ...


def serve_store(
    address: str,
    world_size: int,
    timeout: timedelta,
    *,
    several_nodes: bool,
    port: int = 0,
    waits: bool = False,
) -> tuple[TCPStore, int]:
    """Serve a store on a port of `address` only, 0 for any free one; return it and the port.

    By default torch listens on every address of the machine, and the store has no authentication:
    every process that can connect can read and change the keys. `waits`: for all other ranks.

    Raises:
        CollectiveError: the address is not one of this machine, or not one that other nodes reach.
    """
    listener = _listen(address, port, several_nodes=several_nodes)
    port = int(listener.getsockname()[1])
    # The store takes the socket over and closes it.
    store = TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=waits,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    return store, port


def joined_group(
    device_type: str,
    store: TCPStore | None,
    address: str,
    port: int,
    own_rank: int,
    world_size: int,
    timeout: timedelta,
) -> tuple[TCPStore, Collectives]:
    """Join ranks of several worker groups in one process group, beside the groups that they have.

    The group is not registered with torch, so it changes no other group and ends with the object.
    Gloo listens on the address of this node that reaches `address`.

    Args:
        store: of `serve_store`, in the process that serves it; None in the others.

    Waits for: the other ranks.
    """
    if store is None:
        store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    named = PrefixStore("joined", store)
    if collective_backend(device_type) == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_facing(address, port))]
        gloo = dist.ProcessGroupGloo(named, own_rank, world_size, options)
        return store, gloo  # type: ignore[return-value]  # its stub has other overloads
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    group = dist.ProcessGroupNCCL(named, own_rank, world_size, nccl)
    return store, group  # type: ignore[return-value]  # its stub has other overloads


def _facing(address: str, port: int) -> str:
    """Return the address of this machine from which it reaches another one."""
    family, *_, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses a route, and sends nothing
        return str(probe.getsockname()[0])


def _number_of(variable: str, default: int) -> int:
    """Return an environment variable as a number, `default` if it is not set."""
    given = os.environ.get(variable, str(default))
    try:
        return int(given)
    except ValueError:
        raise CollectiveError(
            f"the environment variable {variable} must be a whole number, got {given!r}"
        ) from None


def _listen(address: str, port: int, *, several_nodes: bool) -> socket.socket:
    """Return a socket that listens on `address` and on no other address of this machine.

    Raises:
        CollectiveError: the address is not one of this machine, or not one that other nodes reach.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if several_nodes and ipaddress.ip_address(target[0]).is_loopback:
            raise CollectiveError(
                f"MASTER_ADDR {address!r} is {target[0]} on rank 0's node, which the ranks on "
                "other nodes cannot reach; set MASTER_ADDR to an address of rank 0's node"
            )
        listener = socket.socket(family, kind)
        # The worker group holds the port with a socket that does not listen
        # (`single_controller.environment.ReservedPort`).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        raise CollectiveError(
            f"rank 0 cannot listen on MASTER_ADDR {address!r}, MASTER_PORT {port}: {error}; set "
            "MASTER_ADDR to an address of rank 0's node, and MASTER_PORT to a free port"
        ) from error
    listener.listen(socket.SOMAXCONN)
    return listener


def gloo_on_loopback() -> dict[str, str]:
    """Return the variable that lets gloo listen on loopback; none if the user has chosen already.

    By default gloo listens on the address to which the host name resolves.
    """
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if not loopback or _GLOO_INTERFACE in os.environ:
        return {}
    return {_GLOO_INTERFACE: loopback[0]}


def local_device(device: str | torch.device) -> torch.device:
    """Return the device of this rank, and make it the current device.

    A device type without an index ("cuda") gives the device of LOCAL_RANK, whether the process
    sees one device or all devices of the node. A device with an index is returned unchanged.
    """
    requested = torch.device(device)
    if requested.type == "cpu":
        return requested
    if requested.index is None:
        requested = torch_device(requested.type, _number_of("LOCAL_RANK", 0))
    getattr(torch, requested.type).set_device(requested)
    return requested


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Arrange all ranks in a mesh with these dimensions.

    The engines of a process share its meshes: each dimension is a process group, which has threads
    and, on GPUs, buffers of its own.

    Waits for: all ranks, the first time.
    """
    global _mesh_world
    key = (device_type, *sizes.items())
    if not dist.is_initialized() or _mesh_world is not dist.group.WORLD:
        _meshes.clear()  # groups of a process group that was destroyed
    if key not in _meshes:
        names, shape = zip(*sizes.items(), strict=True)
        _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
        _mesh_world = dist.group.WORLD
    return _meshes[key]


_meshes: dict[tuple[object, ...], DeviceMesh] = {}
_mesh_world: dist.ProcessGroup | None = None
"""The process group of the meshes."""


def data_parallel_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """Arrange the ranks in a mesh: `fsdp_size` ranks share one copy of the parameters.

    With `fsdp_size` -1 or the world size, the mesh has one dimension, `shard` (full sharding). A
    smaller divisor of the world size gives two, `replicate` × `shard` (hybrid sharding).

    Raises:
        ConfigError: `fsdp_size` does not divide the world size.
    """
    world = world_size()
    if fsdp_size in (-1, world):
        return device_mesh(device.type, {SHARD: world})
    if fsdp_size < 1 or world % fsdp_size:
        raise ConfigError(
            f"engine.fsdp_size is {fsdp_size}, which does not divide the {world} ranks of the "
            "worker group; use -1 to shard over all of them"
        )
    # Six ranks with fsdp_size 2 make a mesh of 3 × 2. Each row holds one whole copy, so a
    # parameter is gathered inside a row, and gradients are also reduced along a column:
    #
    #                 shard 0   shard 1
    #   replicate 0   rank 0    rank 1
    #   replicate 1   rank 2    rank 3
    #   replicate 2   rank 4    rank 5
    return device_mesh(device.type, {REPLICATE: world // fsdp_size, SHARD: fsdp_size})


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the elementwise sum over ranks, in float64. All lists have the same length."""
    if world_size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(value: int, device: torch.device) -> int:
    """Return the largest of the ranks' integers."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_over_ranks(value: ValueT, *, group: dist.ProcessGroup | None = None) -> list[ValueT]:
    """Return the values of all ranks, in the order of ranks. They must be picklable.

    `group`: a process group of all ranks with another timeout.
    """
    if world_size() == 1:
        return [value]
    gathered = [value] * world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_all_ranks(work: Callable[[], ValueT], *, group: dist.ProcessGroup | None = None) -> ValueT:
    """Return the result of `work`, after all ranks have theirs. `group`: `gather_over_ranks`.

    Raises:
        ModelError: `work` raised it on this rank or on another one.
    """
    error: ModelError | None = None
    try:
        result = work()
    except ModelError as raised:
        error = raised
    errors = gather_over_ranks(error, group=group)
    if error is not None:
        raise error
    for other, raised_there in enumerate(errors):
        if raised_there is not None:
            raise ModelError(f"rank {other} cannot load the model: {raised_there}")
    return result


def sum_metrics_over_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sum each key over ranks.

    Ranks may have different keys: a rank without rows has none. Therefore the dictionaries are
    gathered as objects instead of being reduced as one tensor.
    """
    total: Counter[str] = Counter()
    for rank_metrics in gather_over_ranks(dict(metrics)):
        total.update(rank_metrics)
    return dict(total)
