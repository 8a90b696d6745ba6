"""Reinforcement-learning post-training of language models: one controller, many workers.

Public names load when they are first used, so `import quadriga` imports neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "DataProto": "quadriga.protocol",
    "DataProtoItem": "quadriga.protocol",
    "DataProtoFuture": "quadriga.protocol",
    "DataProtoConfig": "quadriga.protocol",
    "register": "quadriga.single_controller",
    "Dispatch": "quadriga.single_controller",
    "Execute": "quadriga.single_controller",
    "Worker": "quadriga.single_controller",
    "WorkerGroup": "quadriga.single_controller",
    "ResourcePool": "quadriga.single_controller",
    "RayResourcePool": "quadriga.backends.ray",
    "RayClassWithInitArgs": "quadriga.backends.ray",
    "RayWorkerGroup": "quadriga.backends.ray",
    "create_colocated_worker_cls": "quadriga.backends.ray",
    "Role": "quadriga.trainer.placement",
    "ResourcePoolManager": "quadriga.trainer.placement",
    "RayPPOTrainer": "quadriga.trainer.ppo",
    "TrainConfig": "quadriga.config.schema",
    "SFTConfig": "quadriga.config.schema",
    "GenerateConfig": "quadriga.config.schema",
    "load_config": "quadriga.config.loading",
    "QuadrigaError": "quadriga.errors",
    "InputError": "quadriga.errors",
}

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "GenerateConfig",
    "InputError",
    "QuadrigaError",
    "RayClassWithInitArgs",
    "RayPPOTrainer",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "SFTConfig",
    "TrainConfig",
    "Worker",
    "WorkerGroup",
    "__version__",
    "create_colocated_worker_cls",
    "load_config",
    "register",
]

if TYPE_CHECKING:
    from quadriga.backends.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )
    from quadriga.config.loading import load_config
    from quadriga.config.schema import GenerateConfig, SFTConfig, TrainConfig
    from quadriga.errors import InputError, QuadrigaError
    from quadriga.protocol import DataProto, DataProtoConfig, DataProtoFuture, DataProtoItem
    from quadriga.single_controller import (
        Dispatch,
        Execute,
        ResourcePool,
        Worker,
        WorkerGroup,
        register,
    )
    from quadriga.trainer.placement import ResourcePoolManager, Role
    from quadriga.trainer.ppo import RayPPOTrainer


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'quadriga' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
