"""Reinforcement-learning post-training of language models: one controller, many workers.

This module lists the public names of the package. It imports `quadriga.lazy` and nothing else; a
name is imported when it is first used, so `import quadriga` imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quadriga.backends.ray import (
        RayClassWithInitArgs as RayClassWithInitArgs,
        RayResourcePool as RayResourcePool,
        RayWorkerGroup as RayWorkerGroup,
        create_colocated_worker_cls as create_colocated_worker_cls,
    )
    from quadriga.cli.api import (
        GRPO as GRPO,
        PPO as PPO,
        SFT as SFT,
        RewardModel as RewardModel,
        Run as Run,
        evaluate as evaluate,
        generate as generate,
    )
    from quadriga.config.commands import GenerateConfig as GenerateConfig, SFTConfig as SFTConfig
    from quadriga.config.loading import load_config as load_config
    from quadriga.config.schema import TrainConfig as TrainConfig
    from quadriga.errors import InputError as InputError, QuadrigaError as QuadrigaError
    from quadriga.protocol import (
        DataProto as DataProto,
        DataProtoConfig as DataProtoConfig,
        DataProtoFuture as DataProtoFuture,
        DataProtoItem as DataProtoItem,
    )
    from quadriga.single_controller import (
        Dispatch as Dispatch,
        Execute as Execute,
        ResourcePool as ResourcePool,
        Worker as Worker,
        WorkerGroup as WorkerGroup,
        register as register,
    )
    from quadriga.trainer.ppo import RayPPOTrainer as RayPPOTrainer
    from quadriga.trainer.roles.registry import (
        ResourcePoolManager as ResourcePoolManager,
        Role as Role,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
