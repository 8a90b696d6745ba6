"""Train with verl's entry point on a cluster whose head node has no CPUs; print where it ran.

The first argument is a file with settings of verl as JSON.
"""

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl


def main() -> None:
    from verl.trainer.main_ppo import TaskRunner, run_ppo

    class Runner(TaskRunner):
        def run(self, config):
            super().run(config)
            return ray.get_runtime_context().get_node_id()

    settings = json.loads(Path(sys.argv[1]).read_text())
    small = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        second = cluster.add_node(num_cpus=4, **small)
        ray.init(address=cluster.address, log_to_driver=False)
        node = run_ppo(settings, task_runner_class=Runner)
        print(json.dumps({"runner": node, "second": second.node_id}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
