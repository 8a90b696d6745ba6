"""The rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from quadriga.config.paths import PathSettings, absolute_path, expand_home
from quadriga.config.schema.choices import FailurePolicy, Options
from quadriga.config.schema.model import EngineConfig, ModelConfig


@dataclass(frozen=True)
class RewardConfig(PathSettings):
    """Rule rewards. `path` and `name` select a function in a Python file of the user."""

    PATHS = ("path",)

    path: str | None = None  # None: the function registered for the data_source of each row
    name: str = "compute_score"  # function in the file `path`
    # several rewards: name → {weight, path, name}; without a path the function of the data_source
    parts: Options = field(default_factory=dict)
    num_processes: int = 2  # processes that call it; 0: called in the controller, without deadline
    timeout_s: float = 10.0  # deadline of one sample in a process
    memory_gb: float | None = 8.0  # GiB that one process can allocate; None: no limit
    on_failure: FailurePolicy = "zero"  # a failed sample: score 0, mask its row, or end the run

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parts", _changed(self.parts, expand_home))

    def absolute(self) -> Self:
        return replace(super().absolute(), parts=_changed(self.parts, absolute_path))


def _changed(parts: Options, change: Callable[[str], str]) -> Options:
    """Return `RewardConfig.parts` with a change of each path in it."""
    return {
        name: {**part, "path": change(part["path"])}
        if isinstance(part, dict) and isinstance(part.get("path"), str)
        else part
        for name, part in parts.items()
    }


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model, whose score is added to that of the rules in training.

    Validation is scored by the rules alone.
    """

    enable: bool = False  # score the responses of a step with `model`
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    micro_batch_size_per_gpu: int | None = None  # most sequences; see engine.use_dynamic_bsz
    # arguments of its chat template; those of the policy's are data.chat_template_kwargs
    chat_template_kwargs: Options = field(default_factory=dict)
    weight: float = 1.0  # of its score in the reward
    rule_weight: float = 1.0  # of the score of the rules; 0: they are not called in training
