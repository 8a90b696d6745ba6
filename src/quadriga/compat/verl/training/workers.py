"""The workers of the built-in roles with verl's constructors and methods.

    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout")
    worker.save_checkpoint(local_path=folder, hdfs_path=None, global_step=20, max_ckpt_to_keep=2)
    await worker.rollout_mode()

Each takes Quadriga's arguments too, with which the trainer builds and calls it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quadriga import workers
from quadriga.checkpoint.shards import read_indexes
from quadriga.compat.verl.config import VerlConfig
from quadriga.compat.verl.controller.worker import Worker
from quadriga.compat.verl_settings import TRAIN, plain_values, translate
from quadriga.config.paths import local_path
from quadriga.config.schema import (
    ActorRolloutRefConfig,
    CriticConfig,
    ModelConfig,
    RewardModelConfig,
    TrainConfig,
)
from quadriga.errors import ConfigError
from quadriga.files import remove
from quadriga.parallel.distributed import gather_over_ranks
from quadriga.single_controller import Dispatch, register
from quadriga.single_controller.environment import RankEnvironment
from quadriga.single_controller.worker import record_of
from quadriga.workers.runtime import RankRuntime

if TYPE_CHECKING:
    from quadriga.checkpoint.files import SavedFile


def translated(config: VerlConfig, section: str) -> tuple[TrainConfig, dict[str, Any]]:
    """Return our settings for a section of verl's. Rank 0 reports on stderr.

    The second result has `rollout_n`, the sequences per prompt of a critic, and `input_tokenizer`,
    the model that a reward model scores, or None. `config`: the section, or a whole configuration.

    Raises:
        ConfigError: it is no such section, or a value cannot be translated.
    """
    whole: dict[str, Any] = plain_values(config)
    own = whole.get(section)
    values = {**(own if isinstance(own, Mapping) else whole)}
    if not isinstance(model := values.get("model"), Mapping) or not model.get("path"):
        key, got = f"{section}.model.path", ", ".join(whole) or "no keys"
        text = f"pass the section {section} of verl's settings, with {key}; got {got}"
        raise ConfigError(f"config: {text}", key=key)
    values |= {name: {**inner} for name, inner in values.items() if isinstance(inner, Mapping)}
    places = {"response_length": values.get("rollout"), "input_tokenizer": values["model"]}
    others: dict[str, Any] = {"rollout_n": values.pop("rollout_n", None)}
    for name, place in places.items():
        others[name] = place.pop(name, None) if isinstance(place, dict) else None
    # verl's rollout has the number of tokens that the trainer reads in `data`.
    tree = {section: values, "data": {"max_response_length": others["response_length"]}}
    values |= {"enable": True} if section == "reward_model" else {}
    translation = translate(TrainConfig, TRAIN, tree)
    if RankEnvironment.read().rank == 0:
        print(translation.report(), file=sys.stderr)
    return translation.config, others


class Finished(dict[str, float], Coroutine[Any, Any, dict[str, float]]):
    """The metrics of a call that has ended, which may also be awaited or given to `asyncio.run`."""

    def __await__(self) -> Generator[Any, None, dict[str, float]]:
        yield from ()
        return dict(self)

    def send(self, value: Any) -> NoReturn:
        """End the coroutine with the metrics."""
        raise StopIteration(dict(self))

    def throw(self, *error: Any) -> NoReturn:
        """Raise the error."""
        raise error[0]

    def close(self) -> None:
        """Do nothing: the call has ended."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # asyncio keeps coroutines in sets

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


_FOLDER, _STEP, _REMOTE, _KEEP = "local_path", "step", "hdfs_path", "max_ckpt_to_keep"
_COPIES = "del_local_after_load"
_SAVE, _LOAD = ("path", _STEP, "global_step", _KEEP), ("path", _STEP, _COPIES)
"""The arguments of both methods, in the order of Quadriga and of verl."""
_NAMES = {
    **{name: name for name in (_FOLDER, _STEP, _REMOTE, _KEEP, _COPIES)},
    **{"path": _FOLDER, "global_step": _STEP, "global_steps": _STEP, "remote_path": _REMOTE},
}
"""Name of an argument → its name here."""


def _arguments(
    method: str, order: tuple[str, ...], args: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a checkpoint method that are neither 0 nor None.

    Raises:
        ConfigError: the folder is missing or remote, or two names of one argument disagree.
    """
    found: dict[str, Any] = {}
    named = [*zip((*order, *"+" * len(args)), args, strict=False), *given.items()]
    for name, value in named:
        key = _NAMES.get(name)
        if key not in (_FOLDER, _STEP, _REMOTE, order[-1]):
            raise ConfigError(f"{method} has no argument {name!r}; remove it", key=name)
        # The second argument: the step of Quadriga's trainer, or a path of verl.
        if value and key in (_STEP, _REMOTE) and isinstance(value, str):
            local_path(value, name)
            raise ConfigError(f"{method}: expected {name}=None, got {value!r}", key=name)
        key = _STEP if key == _REMOTE else key
        if value and key != _FOLDER and not isinstance(value, int):
            raise ConfigError(f"{method}: {name} must be a number, got {value!r}", key=name)
        if value and found.setdefault(key, value) != value:
            text = f"{name}={value!r} is the same argument as {key}={found[key]!r}"
            raise ConfigError(f"{method}: {text}; pass one of them", key=name)
    if _FOLDER not in found:
        raise ConfigError(f"{method} needs {_FOLDER}, the folder of the checkpoint", key=_FOLDER)
    return {**found, _FOLDER: local_path(found[_FOLDER], _FOLDER)}


def _call(self: Worker, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    return method(self, *args, **kwargs)


_OF_TRAINER = ("runtime", "responses_per_prompt")


class _Trained(Worker):
    """Checkpoint methods with the arguments of verl, or `(path, step)` as Quadriga has them."""

    _saved: tuple[str, ...] = ()
    _given: Mapping[str, Any]
    """Arguments of the trainer that verl does not have."""

    def __init_subclass__(cls) -> None:
        """Let the trainer call a constructor that takes verl's arguments alone, and let coroutines
        that are not registered be given to `asyncio.run` by a plain method."""
        super().__init_subclass__()
        for name, member in tuple(vars(cls).items()):
            # In a process of a class with coroutine methods an event loop runs all methods.
            if inspect.iscoroutinefunction(member) and record_of(member) is None:
                setattr(cls, name, functools.partialmethod(_call, member))
        if (own := vars(cls).get("__init__")) is None:
            return
        known = {*inspect.signature(own).parameters}

        @functools.wraps(own)
        def init(self: _Trained, *args: Any, **given: Any) -> None:
            of_trainer = {name: given[name] for name in _OF_TRAINER if name in given}
            self._given = {**vars(self).get("_given", {}), **of_trainer}
            own(
                self, *args, **{k: v for k, v in given.items() if k in known or k not in of_trainer}
            )

        setattr(cls, "__init__", init)  # noqa: B010  # mypy refuses the assignment

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, *args: Any, **given: Any) -> list[SavedFile]:
        """Save the shard of this rank: `local_path, hdfs_path=None, global_step=0,
        max_ckpt_to_keep=None`, the names `remote_path` and `global_steps` too, or `path, step`.

        Of the folders that this worker has saved, the newest `max_ckpt_to_keep` stay; None, or a
        number below 1: all. Raises `ConfigError` for a remote path.
        """
        found = _arguments("save_checkpoint", _SAVE, args, given)
        folder, keep = found[_FOLDER], max(0, found.get(_KEEP, 0))
        files: list[SavedFile] = super().save_checkpoint(folder, found.get(_STEP, 0))  # type: ignore[misc]  # of a mixin
        saved = (*(path for path in self._saved if path != folder), folder)
        self._saved = saved[-keep:]
        if len(self._saved) < len(saved):
            gather_over_ranks(None)  # the new checkpoint is complete before an old one is deleted
            if self.rank == self.world_size - 1:  # on the local backend the last one to save
                for old in saved[:-keep]:
                    remove(Path(old))
        return files

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, *args: Any, **given: Any) -> None:
        """Load a folder of `save_checkpoint`: `local_path, hdfs_path=None,
        del_local_after_load=False`, or `path, step`. Without a step: the one in the files.

        Nothing is deleted: a folder of this machine is read without copies, and stays as in verl.
        Raises `ConfigError` for a remote path.
        """
        found = _arguments("load_checkpoint", _LOAD, args, given)
        step = found.get(_STEP) or read_indexes(Path(found[_FOLDER]))[0].origin.step
        super().load_checkpoint(found[_FOLDER], step)  # type: ignore[misc]  # of a mixin


class ActorRolloutRefWorker(_Trained, workers.ActorRolloutRefWorker):
    """The policy in one rank.

    Args:
        config: the section `actor_rollout_ref` of verl, or ours.
        role, runtime: as `quadriga.workers.ActorRolloutRefWorker`.
    """

    def __init__(self, config: Any, role: str, runtime: RankRuntime | None = None) -> None:
        runtime = runtime or self._given.get("runtime")
        if not isinstance(config, ActorRolloutRefConfig):
            ours, _ = translated(config, "actor_rollout_ref")
            config, length = ours.actor_rollout_ref, ours.data.max_response_length
            runtime = runtime or RankRuntime(max_response_length=length)
        super().__init__(config, role, runtime)

    _is_actor = property(lambda self: self.uses("actor"))
    _is_rollout = property(lambda self: self.uses("rollout"))
    _is_ref = property(lambda self: self.uses("ref"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> dict[str, float]:
        """Give the rollout the weights of the actor if it was trained since, and free device memory
        for generation. The result may be awaited."""
        if self.uses("actor") and self._trained_since_sync():
            self.sync_weights()
        return Finished(super().rollout_mode())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> dict[str, float]:
        """Free device memory for training. The result may be awaited."""
        return Finished(super().trainer_mode())


class CriticWorker(_Trained, workers.CriticWorker):
    """The value model in one rank.

    Args:
        config: the section `critic` of verl, or ours.
        responses_per_prompt: sequences per prompt; 0: verl's `rollout_n`, or 1.
        runtime: as `quadriga.workers.CriticWorker`.
    """

    def __init__(
        self, config: Any, responses_per_prompt: int = 0, runtime: RankRuntime | None = None
    ) -> None:
        per_prompt = responses_per_prompt or self._given.get("responses_per_prompt", 0)
        if not isinstance(config, CriticConfig):
            ours, others = translated(config, "critic")
            config = replace(ours.critic, ppo_epochs=ours.critic.ppo_epochs or 1)
            per_prompt = per_prompt or others["rollout_n"]
        super().__init__(config, per_prompt or 1, runtime or self._given.get("runtime"))


class RewardModelWorker(_Trained, workers.RewardModelWorker):
    """The reward model in one rank.

    Args:
        config: the section `reward_model` of verl, or ours.
        policy: the model whose tokens are scored; None: verl's `model.input_tokenizer`, or the
            reward model itself.
        more: further arguments of `quadriga.workers.RewardModelWorker`.
    """

    def __init__(self, config: Any, policy: ModelConfig | None = None, **more: Any) -> None:
        if not isinstance(config, RewardModelConfig):
            ours, others = translated(config, "reward_model")
            config = ours.reward_model
            policy = policy or ModelConfig(path=others["input_tokenizer"] or config.model.path)
        super().__init__(config, policy, **{**self._given, **more})
