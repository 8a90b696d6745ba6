"""Sockets on which the ranks of a group listen: none accepts connections from other machines."""

import http.client
import ipaddress
import multiprocessing
import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from processes import command_line
from quadriga.errors import CollectiveError
from quadriga.parallel import distributed
from quadriga.parallel.distributed import data_parallel_mesh, init_distributed
from quadriga.weight_sync.remote import served_store

WAIT_S = 120


def listening() -> set[str]:
    """Return the addresses on which this process listens."""
    found = psutil.Process().net_connections("inet")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_address() -> str | None:
    """Return an address of this machine that other machines can reach, if there is one."""
    for addresses in psutil.net_if_addrs().values():
        for a in addresses:
            if a.family == socket.AF_INET and not ipaddress.ip_address(a.address).is_loopback:
                return str(a.address)
    return None


@pytest.fixture
def address() -> str:
    return own_address() or pytest.skip("this machine has no address but loopback")


def join_and_look(variables: dict[str, str]) -> set[str]:
    """Join the process group of two ranks, use it, and return the addresses of this rank."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(variables)
    init_distributed("cpu", timeout_s=WAIT_S)
    data_parallel_mesh(torch.device("cpu"), 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == 2
    found = listening()
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # it is for ranks of one node
    dist.barrier()
    dist.destroy_process_group()
    return found


def join_others(rank: int, ports: object) -> set[str]:
    """Join two processes in a group as an actor and a rollout do, and return the addresses."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    timeout, store = timedelta(seconds=WAIT_S), None
    if rank == 0:
        store, place = served_store({"node"}, 2)
        ports.put(place)
    else:
        place = ports.get(timeout=WAIT_S)
    store, group = distributed.joined_group("cpu", store, *place, rank, 2, timeout)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    assert float(total) == 2
    found = listening()
    group.allreduce([total]).wait()
    return found


@pytest.mark.nightly
def test_a_joined_group_listens_on_loopback_only():
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(2) as pool:
        ports = manager.Queue()
        found = pool.starmap_async(join_others, [(0, ports), (1, ports)], chunksize=1).get(WAIT_S)
    assert found == [{"127.0.0.1"}, {"127.0.0.1"}]


@pytest.mark.nightly
def test_ranks_of_several_nodes_listen_on_the_address_of_their_node(address):
    shared = {"MASTER_ADDR": address, "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        ranks = [{**shared, "RANK": str(rank)} for rank in range(2)]
        found = pool.map_async(join_and_look, ranks, chunksize=1).get(WAIT_S)
    assert address in found[0]
    assert found[0] | found[1] <= {address, "127.0.0.1"}, "no rank listens on every address"


def test_store_does_not_accept_connections_to_other_addresses(address):
    port = free_port()
    with distributed._listen("127.0.0.1", port, several_nodes=False):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=5)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("192.0.2.1", "rank 0 cannot listen on MASTER_ADDR '192.0.2.1'"),
        ("no-such-host.invalid", "rank 0 cannot listen on MASTER_ADDR 'no-such-host"),
        ("localhost", "which the ranks on other nodes cannot reach"),
    ],
)
def test_address_that_ranks_cannot_use_is_named(monkeypatch, address, message):
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": address,
                 "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "1"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError, match=message) as caught:
        init_distributed("cpu", timeout_s=5)
    assert "\n" not in str(caught.value)


def test_gloo_interface_of_the_user_is_kept(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert list(distributed.gloo_on_loopback()) == ["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert distributed.gloo_on_loopback() == {}


@pytest.fixture(scope="module")
def ray_ranks():
    """The group of two ranks on Ray, and the addresses on which each listens since it joined."""
    from rank_sockets import SocketProbe

    from quadriga.backends import get_backend

    backend = get_backend("ray")
    backend.start(num_cpus=2, object_store_memory=100 * 2**20)
    try:
        pool = backend.resource_pool([2], use_gpu=False, max_colocate_count=1)
        group = backend.worker_group(pool, backend.class_with_args(SocketProbe))
        yield group.new_listeners()
    finally:
        backend.shutdown()


def test_ranks_on_ray_listen_on_loopback_only(ray_ranks):
    """Sockets that Ray itself opened before the group was joined are not counted."""
    assert ray_ranks == [{"127.0.0.1"}, {"127.0.0.1"}]


# Process -> a method of each gRPC service that it offers to other machines.
SERVICES = {
    "driver": ["CoreWorkerService/KillActor"],
    "gcs_server": ["NodeInfoGcsService/GetAllNodeInfo"],
    "raylet": ["NodeManagerService/GetNodeStats", "ObjectManagerService/Push"],
    "rank": ["CoreWorkerService/KillActor"],
}


def sockets_of_ray() -> list[tuple[str, str, int]]:
    """Return (process, address, port) of every listening socket but those on loopback."""
    own = psutil.Process()
    found = []
    for process in [own, *own.children(recursive=True)]:
        words = command_line(process)
        names = {"gcs_server": "gcs_server", "/raylet ": "raylet", "RuntimeEnvAgent": "agent",
                 "ray::": "rank"}  # fmt: skip
        kind = next((name for mark, name in names.items() if mark in words), words[:60])
        if not words:
            continue
        for c in process.net_connections("inet"):
            if c.status == psutil.CONN_LISTEN and c.laddr.ip != "127.0.0.1":
                found.append(("driver" if process == own else kind, c.laddr.ip, c.laddr.port))
    return found


def answers(port: int) -> set[str]:
    """Return what the methods of `SERVICES` answer to a call without a token at this port."""
    import grpc

    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in {m for methods in SERVICES.values() for m in methods}:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10)
            codes.add(caught.value.code().name)
    return codes


def test_sockets_of_ray_are_those_of_the_page_and_need_the_token(ray_ranks):
    found = sockets_of_ray()
    everywhere = {kind for kind, ip, _ in found if ipaddress.ip_address(ip).is_unspecified}
    assert everywhere == set(SERVICES)
    for kind, ip, port in found:
        if kind not in SERVICES:
            assert kind == "agent"
            agent = http.client.HTTPConnection(ip, port, timeout=10)
            agent.request("POST", "/get_or_create_runtime_env", b"")
            assert ip == own_address() and agent.getresponse().status == 401
            agent.close()
        else:
            # Each port offers one service, which refuses; it does not know the other methods.
            assert answers(port) == {"UNAUTHENTICATED", "UNIMPLEMENTED"}
