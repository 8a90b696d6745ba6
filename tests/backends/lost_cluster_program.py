"""Kill a process of Ray beneath two ranks that run a call, and see what is told and what is left.

`python lost_cluster_program.py gcs_server` prints the seconds to the error and to the end of the
shutdown, the error, and the processes that are left.
"""

from __future__ import annotations

import json
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def connected(backend: RayBackend, victim: str) -> Iterator[Callable[[], None]]:
    """Connect the backend, and yield what kills the victim."""
    if victim in ("gcs_server", "raylet"):
        backend.start(num_cpus=2)
        ours = psutil.Process().children(recursive=True)
        yield next(p for p in ours if victim in p.name()).kill
        return
    # The ranks are on the second node of a cluster of the user, the driver on the first.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        backend.start(address=cluster.address)
        yield node.kill_raylet if victim == "node" else lambda: None
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(victim: str) -> None:
    backend, told = RayBackend(), dict[str, object]()
    with connected(backend, victim) as kill:
        session = Path(ray._private.worker._global_node.get_session_dir_path())
        mode = stat.S_IMODE(session.parents[1].stat().st_mode)
        group = backend.worker_group(
            backend.resource_pool([2], use_gpu=False), backend.class_with_args(Slow), timeout=60
        )
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
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
