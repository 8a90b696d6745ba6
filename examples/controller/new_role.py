"""A role from a file of a user (judge.py), placed on its own resource pool.

Run: python examples/controller/new_role.py [ray]
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.trainer.roles.registry import ResourcePoolManager


def load(path: Path) -> ModuleType:
    """Load a file as a module without changing `sys.path`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main(backend_name: str = "local") -> list[float]:
    judge = load(Path(__file__).with_name("judge.py"))
    backend = get_backend(backend_name)
    backend.start(num_cpus=2)
    pools = ResourcePoolManager(
        {"judges": [2]}, {judge.JUDGE: "judges"}, backend, {"use_gpu": False}
    )
    pools.create_resource_pool()
    group = backend.worker_group(
        pools.get_resource_pool(judge.JUDGE),
        backend.class_with_args(judge.JudgeWorker),
        role=judge.JUDGE.key,
    )
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    data = DataProto.from_dict(tensors={"response_mask": mask})
    judged: list[float] = group.compute_judgement(data).batch["judgement"].tolist()
    print("judgements:", judged)
    group.shutdown()
    backend.shutdown()
    return judged


if __name__ == "__main__":
    main(*sys.argv[1:])
