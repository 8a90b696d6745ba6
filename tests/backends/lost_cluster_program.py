"""Kill a process of Ray beneath two ranks that run a call, and see what is told and what is left.

`python lost_cluster_program.py gcs_server` prints the seconds to the error and to the end of the
shutdown, the error, and the processes that are left.
"""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from quadriga.backends.ray import RayBackend
from quadriga.errors import QuadrigaError
from quadriga.single_controller import Dispatch, Worker, register


class Slow(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def niceness(self) -> int:
        return os.nice(0) - os.getpriority(os.PRIO_PROCESS, int(os.environ["DRIVER"]))


class Network:
    """A network namespace with an address of its own, for a node of Ray. Needs root."""

    HERE, THERE = "10.213.7.1", "10.213.7.2"

    def __init__(self) -> None:
        number = os.getpid() % 100000
        self.name, self.link = f"q{number}", f"qh{number}"
        self.node: subprocess.Popen[bytes] | None = None
        ours, theirs = self.link, f"qn{number}"
        _ip(f"netns add {self.name}")
        _ip(f"link add {ours} type veth peer name {theirs}")
        _ip(f"link set {theirs} netns {self.name}")
        _ip(f"addr add {self.HERE}/24 dev {ours}")
        _ip(f"link set {ours} up")
        _ip(f"-n {self.name} addr add {self.THERE}/24 dev {theirs}")
        for link in (theirs, "lo"):
            _ip(f"-n {self.name} link set {link} up")

    def start_node(self, address: str) -> None:
        ray_command = str(Path(sys.executable).with_name("ray"))
        self.node = subprocess.Popen(
            ["ip", "netns", "exec", self.name, ray_command, "start", f"--address={address}",
             f"--node-ip-address={self.THERE}", "--num-cpus=2", "--block"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def cut(self) -> None:
        """Drop all packets between the node and the others; its processes go on."""
        _ip(f"link set {self.link} down")

    def close(self) -> None:
        if self.node is not None:
            inside = [self.node, *psutil.Process(self.node.pid).children(recursive=True)]
            for process in inside:
                process.kill()
        _ip(f"link del {self.link}")
        _ip(f"netns del {self.name}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


@contextmanager
def connected(backend: RayBackend, victim: str) -> Iterator[Callable[[], None]]:
    """Connect the backend, and yield what kills the victim."""
    if victim in ("gcs_server", "raylet"):
        backend.start(num_cpus=2)
        ours = psutil.Process().children(recursive=True)
        yield next(p for p in ours if victim in p.name()).kill
        return
    # The ranks are on the second node of a cluster of the user, the driver on the first.
    network = Network() if victim == "partition" else None
    here = {"node_ip_address": Network.HERE} if network else {}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **here})
    try:
        if network is not None:
            network.start_node(cluster.address)
            backend.start(address=cluster.address, _node_ip_address=Network.HERE)
            while len(ray.nodes()) < 2:
                time.sleep(0.2)
            yield network.cut
        else:
            node = cluster.add_node(num_cpus=2)
            cluster.wait_for_nodes()
            backend.start(address=cluster.address)
            yield node.kill_raylet if victim == "node" else lambda: None
    finally:
        ray.shutdown()
        cluster.shutdown()
        if network is not None:
            network.close()


def started(backend: RayBackend) -> Any:
    pool = backend.resource_pool([2], use_gpu=False)
    return backend.worker_group(pool, backend.class_with_args(Slow), timeout=60)


def main(victim: str) -> None:
    backend, told = RayBackend(), dict[str, object]()
    os.environ["DRIVER"] = str(os.getpid())
    with connected(backend, victim) as kill:
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        mode = stat.S_IMODE(session.parents[1].stat().st_mode)
        other = RayBackend()
        other.start()  # a second use of the connection
        group = started(backend)
        group.sleep(0.1)
        before = psutil.Process().children(recursive=True)
        threading.Timer(1.0, kill).start()
        began = time.monotonic() + 1.0
        try:
            group.sleep(2.0 if victim == "joined" else 50.0)
        except QuadrigaError as error:
            told = {"type": type(error).__name__, "text": str(error)}
        told |= {"seconds": time.monotonic() - began, "mode": oct(mode)}
        group.shutdown()
        backend.shutdown()
        told["shutdown"] = time.monotonic() - began
        _, left = psutil.wait_procs(before, timeout=5 if victim in ("gcs_server", "raylet") else 0)
        told["left"] = [" ".join(p.cmdline())[:80] for p in left if p.is_running()]
        if victim in ("gcs_server", "raylet"):  # the process goes on with another Ray
            backend.start(num_cpus=2)
            group = started(backend)
            told |= {"again": group.sleep(0.1), "nicer": group.niceness()}
            backend.shutdown()
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
