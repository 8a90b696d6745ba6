"""The classes of `verl.workers.megatron_workers`: workers whose training engine is Megatron.

The settings choose the engine, so a class refuses settings that choose another one.
"""

from typing import Any

from quadriga.compat.verl.training import workers
from quadriga.config.schema import EngineConfig
from quadriga.errors import ConfigError
from quadriga.workers.runtime import RankRuntime

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]


def _check(engine: EngineConfig, section: str) -> None:
    if engine.name != "megatron":
        raise ConfigError(
            f"the workers of verl.workers.megatron_workers compute with Megatron, but the settings "
            f"choose {engine.name}; set {section}.strategy=megatron, or import the class from "
            "verl.workers.fsdp_workers",
            key=f"{section}.strategy",
        )


class ActorRolloutRefWorker(workers.ActorRolloutRefWorker):
    """The policy in one rank. Arguments as `workers.ActorRolloutRefWorker`."""

    def __init__(self, config: Any, role: str, runtime: RankRuntime | None = None) -> None:
        super().__init__(config, role, runtime)
        if self.uses("actor"):
            _check(self.config.actor.engine, "actor_rollout_ref.actor")
        elif self.uses("ref"):
            _check(self.config.ref.engine, "actor_rollout_ref.ref")


class CriticWorker(workers.CriticWorker):
    """The value model in one rank. Arguments as `workers.CriticWorker`."""

    def __init__(
        self, config: Any, responses_per_prompt: int = 0, runtime: RankRuntime | None = None
    ) -> None:
        super().__init__(config, responses_per_prompt, runtime)
        _check(self.config.engine, "critic")


class RewardModelWorker(workers.RewardModelWorker):
    """The reward model in one rank. Arguments as `workers.RewardModelWorker`."""

    def __init__(self, config: Any, *args: Any, **given: Any) -> None:
        super().__init__(config, *args, **given)
        _check(self.config.engine, "reward_model")
