"""A reward function of verl, `reward_fn(data, return_dict=True)`, as one of Quadriga."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, fields
from quadriga.rewards.manager import mean_extras, reward_components
from quadriga.rewards.outcome import SCORED, Outcome, plain_extras
from quadriga.trainer.stages import BatchReward

_TENSOR = "reward_tensor"
_EXTRA = "reward_extra_info"


class RewardOfTensors:
    """A reward function of verl as one of Quadriga.

    verl's `reward_fn(data, return_dict=True)` returns a dict with `reward_tensor` [B, R] float32,
    or that tensor. `reward_extra_info` of the dict maps names to one value per row: the numbers are
    measured, and those that `components` names become the field `reward_components` [B, K].

    Attributes:
        metrics: `reward/extra/<name>`, the means of the numbers of the last batch.
    """

    def __init__(self, reward_fn: Callable[..., object], components: Sequence[str] = ()) -> None:
        self.reward_fn = reward_fn
        self.components = tuple(components)
        self.metrics: dict[str, float] = {}
        # From the signature, and not by a call: a TypeError can also be one of its own code.
        parameters = inspect.signature(reward_fn).parameters.values()
        self._returns_dict = any(
            p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters
        )

    def __call__(self, data: DataProto) -> DataProto:
        """Score every row of `data`.

        Raises:
            ConfigError: the function returned something else than one value per row.
            FieldError: it did not return a component.
        """
        options = {"return_dict": True} if self._returns_dict else {}
        returned = self.reward_fn(data, **options)
        if not isinstance(returned, Mapping):
            returned = {_TENSOR: returned}
        outcomes = _outcomes(returned.get(_EXTRA), len(data))
        written = {fields.TOKEN_LEVEL_SCORES: _scores(returned.get(_TENSOR), len(data))}
        if self.components:
            written[fields.REWARD_COMPONENTS] = reward_components(outcomes, self.components)
        self.metrics = mean_extras(outcomes)
        return DataProto.from_dict(written)


def reward_of_tensors(reward_fn: object, components: Sequence[str]) -> BatchReward | None:
    """Return a reward function of Quadriga; None for None. Raises `ConfigError` for no function."""
    if reward_fn is None:
        return None
    if not callable(reward_fn):
        raise ConfigError(
            f"RayPPOTrainer: reward_fn must be a function of a batch, got {reward_fn!r}",
            key="reward_fn",
        )
    return RewardOfTensors(reward_fn, components)


def _scores(scores: object, rows: int) -> torch.Tensor:
    if isinstance(scores, torch.Tensor) and scores.dim() == 2 and len(scores) == rows:
        return scores.float()
    got = type(scores).__name__
    if isinstance(scores, torch.Tensor):
        got = f"shape {list(scores.shape)}"
    raise ConfigError(
        f"reward_fn must return a tensor [{rows}, R], or a dict with {_TENSOR!r}, got {got}",
        key="reward_fn",
    )


def _outcomes(extra: object, rows: int) -> list[Outcome]:
    """Return one outcome per row, with the values of the row in `reward_extra_info`."""
    if extra is None:
        extra = {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"{_EXTRA} of reward_fn must be a dict of lists, got {type(extra).__name__}",
            key="reward_fn",
        )
    for name, values in extra.items():
        sized = hasattr(values, "__len__") and not isinstance(values, str)
        if not sized or len(values) != rows:
            raise ConfigError(
                f"{_EXTRA}[{name!r}] must have one value for each of the {rows} rows, got "
                f"{len(values) if sized else values!r}",
                key="reward_fn",
            )
    return [
        Outcome(SCORED, extra=plain_extras({name: values[row] for name, values in extra.items()}))
        for row in range(rows)
    ]
