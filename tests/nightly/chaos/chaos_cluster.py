"""A Ray cluster of three nodes on this machine, and what a run leaves behind on it."""

import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
CPUS = (1, 4, 5)
"""CPUs of the nodes. The driver is on the first."""
CHUNK_BYTES = 256 * 2**10
"""The size of the pieces in which an object is sent to another node."""
ACTOR_HANDLE = "f" * 16
"""How the ids begin under which Ray counts the handles of actors."""
DELAY = "RAY_testing_asio_delay_us"
SLACK_BYTES = 2**20
"""What a store may hold more than before the program."""
SETTLE_S = 10.0
"""How long processes, references and files may take to disappear."""


class ThreeNodes:
    """The cluster. Its processes write their temporary files to a folder of this run.

    Args:
        megabytes_per_second: The rate of a link between two nodes. One piece of an object is in
            flight at a time, and Ray delays the receiver of each piece, as its own tests do.
    """

    def __init__(self, megabytes_per_second: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="qchaos-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        delay_us = int(CHUNK_BYTES / (megabytes_per_second * 2**20) * 1e6)
        os.environ |= {
            "RAY_object_manager_default_chunk_size": str(CHUNK_BYTES),
            "RAY_object_manager_max_bytes_in_flight": str(CHUNK_BYTES),
            DELAY: f"ObjectManagerService.grpc_server.Push={delay_us}:{delay_us}",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_free_objects_period_milliseconds": "10",
            "RAY_DEDUP_LOGS": "0",
            "OMP_NUM_THREADS": "1",
        }
        store = {"object_store_memory": STORE_BYTES}
        head = {"num_cpus": CPUS[0], "include_dashboard": False, **store}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for cpus in CPUS[1:]:
            self._cluster.add_node(num_cpus=cpus, **store)
        self._cluster.wait_for_nodes()
        # The driver and its workers need no delays of their own.
        os.environ.pop(DELAY)
        ray.init(address=self._cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        self._session = Path(ray._private.worker._global_node.get_session_dir_path())
        self._processes = psutil.Process().children(recursive=True)

    def used_bytes(self) -> dict[str, int]:
        """Bytes of referenced objects for each node, in memory and spilled to disk.

        Copies that a node has pulled are not counted. If the process that owns an object was
        killed, its copies stay until the store needs their memory.
        """
        used = {}
        for number, node in enumerate(ray.nodes()):
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            stats = node_stats(*address, include_memory_info=False).store_stats
            used[f"node {number}"] = stats.object_store_bytes_primary_copy
        used["spilled"] = sum(
            path.stat().st_size for path in self._session.rglob("*ray_spilled_objects*/*")
        )
        return used

    def referring(self) -> list[int]:
        """The ids of the processes that refer to an object. Handles of actors do not count."""
        return sorted(
            worker.pid
            for node in ray.nodes()
            for worker in node_stats(
                node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=True
            ).core_workers_stats
            if any(
                not held.object_id.hex().startswith(ACTOR_HANDLE)
                and (
                    held.local_ref_count
                    or held.submitted_task_ref_count
                    or held.contained_in_owned
                    or held.pinned_in_memory
                )
                for held in worker.object_refs
            )
        )

    def leaked_bytes(self, base: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Wait until the stores hold no more than before. Return (now, before) where they do."""

        def leaked() -> dict[str, tuple[int, int]]:
            gc.collect()
            return {
                name: (now, base.get(name, 0))
                for name, now in self.used_bytes().items()
                if now > base.get(name, 0) + SLACK_BYTES
            }

        wait_until(lambda: not leaked(), SETTLE_S)
        return leaked()

    def shutdown(self) -> list[str]:
        """End the cluster. Return the processes that are still there after a while."""
        processes = {*self._processes, *psutil.Process().children(recursive=True)}
        ray.shutdown()
        self._cluster.shutdown()
        _, left = psutil.wait_procs(processes, timeout=SETTLE_S)
        self.kill()
        return [f"{process.pid} {process.name()}" for process in left]

    def kill(self) -> None:
        """End every process of the cluster at once and delete the folder of the run."""
        for process in {*self._processes, *psutil.Process().children(recursive=True)}:
            if process.is_running():
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
