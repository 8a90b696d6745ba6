"""Reinforcement-learning post-training of language models: one controller, many workers.

This module lists the public names of the package. It imports `quadriga.lazy` and nothing else; a
name is imported when it is first used, so `import quadriga` imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

__version__ = "0.1.0"

_HOME = {
    "DataProto": "protocol",
    "DataProtoItem": "protocol",
    "DataProtoFuture": "protocol",
    "DataProtoConfig": "protocol",
    "register": "single_controller",
    "Dispatch": "single_controller",
    "Execute": "single_controller",
    "Worker": "single_controller",
    "WorkerGroup": "single_controller",
    "ResourcePool": "single_controller",
    "RayResourcePool": "backends.ray",
    "RayClassWithInitArgs": "backends.ray",
    "RayWorkerGroup": "backends.ray",
    "create_colocated_worker_cls": "backends.ray",
    "Role": "trainer.roles.placement",
    "ResourcePoolManager": "trainer.roles.placement",
    "RayPPOTrainer": "trainer.ppo",
    "TrainConfig": "config.schema",
    "SFTConfig": "config.commands",
    "GenerateConfig": "config.commands",
    "load_config": "config.loading",
    "QuadrigaError": "errors",
    "InputError": "errors",
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
    from quadriga.config.commands import GenerateConfig, SFTConfig
    from quadriga.config.loading import load_config
    from quadriga.config.schema import TrainConfig
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
    from quadriga.trainer.ppo import RayPPOTrainer
    from quadriga.trainer.roles.placement import ResourcePoolManager, Role
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
