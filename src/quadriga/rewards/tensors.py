"""Reward functions of a program that return the scores of a batch as a tensor [B, R].

`f(data) -> scores`, or `f(data, return_dict=True) -> {"reward_tensor": scores, "reward_extra_info":
{"acc": [1, 0]}}`, where each list has one value per row.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias, cast

from torch import Tensor

from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.rewards.functions import SCORED, Outcome, plain_extras
from quadriga.rewards.manager import RewardManager, mean_extras, numbers_beside, reward_components

SCORES, EXTRA, KEY = "reward_tensor", "reward_extra_info", "reward_fn"
Scored: TypeAlias = DataProto | DataProtoFuture
Returned: TypeAlias = Scored | Tensor | Mapping[str, object]
BatchFunction: TypeAlias = Callable[[DataProto], Returned]


class TensorReward:
    """A reward function of a program, called once for each batch.

    What it returns as a tensor becomes `token_level_scores` float32. The numbers of
    `reward_extra_info` are measured, and those that `components` names become the field
    `reward_components` [B, K]. A batch, or the future of one, is returned unchanged; an object that
    returns one may have the attributes of `RewardManager` below.

    Attributes:
        metrics: `reward/extra/<name>`, the means of the numbers of the last batch.
        masked_rows, answers: of the last batch, as in `RewardManager`.
    """

    def __init__(self, reward_fn: BatchFunction, components: Sequence[str] = ()) -> None:
        self.reward_fn = cast(Callable[..., Returned], reward_fn)
        self.components = tuple(components)
        self.metrics: dict[str, float] = {}
        self.masked_rows: list[int] = []
        self.answers: list[str | None] = []
        # From the signature, and not by a call: a TypeError can also be one of its own code.
        self._returns_dict = False
        with suppress(ValueError):  # some callables written in C have no signature
            self._returns_dict = any(
                p.name == "return_dict" or p.kind is p.VAR_KEYWORD
                for p in inspect.signature(reward_fn).parameters.values()
            )

    def returned(self, data: DataProto) -> Scored | Mapping[str, object]:
        """Return what the function returns; for a tensor, a dict with it."""
        options = {"return_dict": True} if self._returns_dict else {}
        found = self.reward_fn(data, **options)
        return found if isinstance(found, Scored | Mapping) else {SCORES: found}

    def __call__(self, data: DataProto, /) -> Scored:
        """Score every row of `data`.

        Raises:
            ConfigError: the function returned something else than one value per row.
            FieldError: it did not return a component.
        """
        found = self.returned(data)
        if not isinstance(found, Mapping):
            for name, none in (("metrics", {}), ("masked_rows", []), ("answers", [])):
                setattr(self, name, getattr(self.reward_fn, name, none))
            return found
        outcomes = _outcomes(found.get(EXTRA), len(data))
        shape = data.batch[fields.RESPONSES].shape
        written = {fields.TOKEN_LEVEL_SCORES: _scores(found.get(SCORES), shape)}
        if self.components:
            written[fields.REWARD_COMPONENTS] = reward_components(outcomes, self.components)
        self.metrics = mean_extras(outcomes)
        return DataProto.from_dict(written, non_tensors=numbers_beside(outcomes))


def batch_reward(
    reward_fn: BatchFunction, components: Sequence[str] = (), key: str = KEY
) -> Callable[[DataProto], Scored]:
    """Return a reward function of a program as one that returns batches.

    A `RewardManager` is returned unchanged. Raises `ConfigError` if it cannot be called.
    """
    if not callable(reward_fn):
        wanted = f"{key} must be a function of a batch"
        raise ConfigError(f"RayPPOTrainer: {wanted}, got {reward_fn!r}", key=key)
    if isinstance(reward_fn, RewardManager | TensorReward):
        return reward_fn
    return TensorReward(reward_fn, components)


def _scores(scores: object, shape: Sequence[int]) -> Tensor:
    if isinstance(scores, Tensor) and scores.shape == shape:
        return scores.float()
    got = type(scores).__name__
    if isinstance(scores, Tensor):
        got = f"shape {list(scores.shape)}"
    wanted = f"a tensor {list(shape)}, one score per response token, or a dict with {SCORES!r}"
    raise ConfigError(f"reward_fn must return {wanted}, got {got}", key=KEY)


def _outcomes(extra: object, rows: int) -> list[Outcome]:
    """Return one outcome per row, with the values of the row in `reward_extra_info`."""
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping):
        got = type(extra).__name__
        raise ConfigError(f"{EXTRA} of reward_fn must be a dict of lists, got {got}", key=KEY)
    for name, values in extra.items():
        sized = hasattr(values, "__len__") and not isinstance(values, str)
        if not sized or len(values) != rows:
            got = f"one value for each of the {rows} rows, got {len(values) if sized else values!r}"
            raise ConfigError(f"{EXTRA}[{name!r}] must have {got}", key=KEY)
    return [
        Outcome(SCORED, extra=plain_extras({name: values[row] for name, values in extra.items()}))
        for row in range(rows)
    ]
