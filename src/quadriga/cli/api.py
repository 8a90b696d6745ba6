"""Training, evaluation and generation as calls: `GRPO(model, reward, data, lr=1e-5).train()`.

    model, reward, data ──► files in the run folder ──► settings ──► trainer of the command ──► Run

A call makes the settings of the command of the same kind, and runs what the command runs, with the
same checks before anything starts. Model objects and rows in memory become files below `inputs/` in
the run folder; a function becomes `reward.path=<program>` (`rewards.functions.GIVEN`).

A keyword is one of these: a short name of the class's table `SHORT`; the last part of a setting's
name, if no other setting ends with it (`kl_loss_coef=0.01`); a section of settings
(`trainer={"save_freq": 10}`); or a whole name (`**{"trainer.save_freq": 10}`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from quadriga.config.commands import EvalConfig, GenerateConfig, RMConfig, SFTConfig
from quadriga.config.convert import build, field_types, is_settings, unknown_setting, walk_keys
from quadriga.config.paths import PROGRAM, is_remote
from quadriga.config.schema import TrainConfig
from quadriga.errors import (
    ConfigError,
    DataError,
    InputError,
    ModelError,
    UnknownSettingError,
    nearest_name,
)
from quadriga.files import replacing, writing
from quadriga.lazy import imported
from quadriga.observability.callbacks import load_callbacks
from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.run_folder import RunFolder
from quadriga.rewards.functions import GIVEN, form_of
from quadriga.trainer.checks.early import check_early

if TYPE_CHECKING:
    from quadriga.trainer.evaluation import Answer, Evaluation

_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DATA_FILE = re.compile(r".*\.(parquet|jsonl?)")
_POLICY = "actor_rollout_ref"
_RANKS = {"ranks": "trainer.n_gpus_per_node", "backend": "trainer.backend"}
_SHORT = {
    **_RANKS,
    "batch_size": "data.train_batch_size",
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "folder": "trainer.default_local_dir",
    "seed": "trainer.seed",
}
_OF_POLICY = {
    **_SHORT,
    "lr": f"{_POLICY}.actor.optim.lr",
    "lora": f"{_POLICY}.model.lora.rank",
    "responses": f"{_POLICY}.rollout.n",
    "temperature": f"{_POLICY}.rollout.sampling.temperature",
    "rollout": f"{_POLICY}.rollout.name",
    "mini_batch_size": f"{_POLICY}.actor.ppo_mini_batch_size",
}
_OF_MODEL = {**_SHORT, "lr": "optim.lr", "lora": "model.lora.rank"}
_OF_ANSWERS = {
    **_RANKS,
    "responses": "n",
    "temperature": "sampling.temperature",
    "rollout": "rollout.name",
    "folder": "output",
}
_RUN = {
    TrainConfig: "quadriga.trainer.main:run_training",
    SFTConfig: "quadriga.trainer.fine_tuning:run_sft",
    RMConfig: "quadriga.trainer.fine_tuning:run_rm",
}

_OF_TRL = {
    "num_generations": "responses", "learning_rate": "lr", "max_steps": "steps",
    "num_train_epochs": "epochs", "max_completion_length": "max_response_length",
    "per_device_train_batch_size": "batch_size", "reward_funcs": "reward", "train_dataset": "data",
    "beta": "kl_loss_coef", "peft_config": "lora",
}  # fmt: skip
"""Arguments of TRL → ours, for the message about them."""


# From arguments to settings.


def nested(cls: type, short: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords as nested values of settings.

    Raises:
        UnknownSettingError: no setting has this name; the message names the nearest one.
        ConfigError: several settings end with it.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        key = short.get(name, name)
        if "." not in key and name not in short and name not in field_types(cls):
            keys = [key for key, _ in walk_keys(cls) if key.rpartition(".")[2] == name]
            if not keys and (near := _OF_TRL.get(name) or nearest_name(name, short)):
                text = f"no setting {name}; did you mean {near}?"
                raise UnknownSettingError(text, key=name, nearest=near)
            if not keys:
                raise unknown_setting(cls, name)
            if len(keys) > 1:
                more = "" if len(keys) < 4 else f" and {len(keys) - 3} others"
                raise ConfigError(
                    f"{name} is the end of {', '.join(keys[:3])}{more}: write **{{{keys[0]!r}: …}}",
                    key=name,
                )
            key = keys[0]
        value = str(value) if isinstance(value, Path) else value
        for part in reversed(key.split(".")):
            value = {part: value}
        found = _merged(found, value)
    return found


def _unique(cls: type) -> list[str]:
    """Return the last parts of names that one setting alone has."""
    last = [key.rpartition(".")[2] for key, kind in walk_keys(cls) if not is_settings(kind)]
    return [name for name in last if last.count(name) == 1]


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor without `self`."""
    return {name: value for name, value in given.items() if name not in ("self", "__class__")}


def _merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values; the last one of a key wins."""
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = _merged(found[key], value) if both else value
    return found


def with_backend(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which one rank is in this process, unless a backend is given."""
    local = _merged({"trainer": {"backend": "local"}}, values)
    ranks = local["trainer"]
    one = not isinstance(ranks, Mapping) or (  # `build` refuses another type
        ranks.get("nnodes", 1) == ranks.get("n_gpus_per_node", 1) == 1
    )
    return local if one else values


def free_folder(name: str) -> Path:
    """Return a folder below `runs/` that does not exist: `runs/grpo-20261127-060000`."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (f"{stem}-{number}" if number else stem for number in count())
    return next(path for path in map(Path, names) if not path.exists())


@contextmanager
def inputs_of(folder: Path) -> Iterator[Path]:
    """Yield the folder of what is written for a run. An error before the run begins removes it, and
    names rows in memory, not their file."""
    inputs = folder / "inputs"
    there = inputs.exists()
    try:
        yield inputs
    except InputError as error:
        if not there and not RunFolder(folder).holds_run:
            shutil.rmtree(inputs, ignore_errors=True)
            with suppress(OSError):  # the folder holds something else
                folder.rmdir()
            if isinstance(error, DataError):
                own = "|".join(re.escape(str(path)) for path in (inputs.absolute(), inputs))
                error.args = (re.sub(rf"({own})/(\w+)-\w+\.jsonl", r"\2", str(error)),)
        raise


def _name_of(reward: str | Path | Callable[..., object]) -> str:
    """Return the name of a reward. Raises `InputError` if it is no function, and no file."""
    name = str(getattr(reward, "__name__", type(reward).__name__))
    if not isinstance(reward, str | Path):
        form_of(reward, repr(name))
    return name


def with_reward(
    values: dict[str, Any],
    reward: Any,
    weights: Mapping[str, float] | None,
    functions: dict[str, Callable[..., object]],
) -> dict[str, Any]:
    """Return settings with a reward, if one is given; add functions of the program to `functions`.

    Raises:
        InputError: a reward is no function, has parameters of no form, or a weight has no reward.
    """
    if reward is None and not weights:
        return values

    def source(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, str | Path):
            path, _, function = str(value).partition(":")
            return {"path": path, "name": function or "compute_score"}
        form_of(value, repr(name))
        functions[name] = value
        return {"path": PROGRAM, "name": name}

    if isinstance(reward, list | tuple):
        names = [_name_of(value) for value in reward]
        if twice := [name for name in names if names.count(name) > 1]:
            text = f"two rewards are named {twice[0]!r}; name them: reward={{'first': f, …}}"
            raise ConfigError(text, key="reward")
        reward = dict(zip(names, reward, strict=True)) or reward
    named = reward if isinstance(reward, Mapping) else {}
    if not isinstance(weights, Mapping | None):
        text = f"reward_weights: expected weights by name, as {{'first': 0.5}}, got {weights!r}"
        raise ConfigError(text, key="reward_weights")
    if unknown := [name for name in weights or {} if name not in named]:
        has = ", ".join(named) or "none by name"
        text = f"reward_weights[{unknown[0]!r}]: there is no such reward; there are {has}"
        raise ConfigError(text, key="reward_weights")
    if not named:
        return _merged(values, {"reward": source(reward, _name_of(reward))})
    given = {**dict.fromkeys(named, 1.0), **(weights or {})}
    plain = {k: float(w) if hasattr(w, "__float__") else w for k, w in given.items()}
    parts = {name: {**source(value, name), "weight": plain[name]} for name, value in named.items()}
    return _merged(values, {"reward": {"parts": parts}})


def rows_in(data: Any, name: str) -> list[Mapping[str, Any]] | None:
    """Return the rows of data in memory; None for files, and for no data.

    Raises:
        DataError: it is neither.
    """
    if data is None or isinstance(data, str | Path):
        return None
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a data frame
        data = data.to_dict("records")
    known = "a list of rows, a dataset, a data frame, or .parquet and .jsonl files"
    if isinstance(data, Mapping):
        keys = ", ".join(map(str, data))
        hint = "rows, as [{'prompt': …}, …]" if "prompt" in data else "one of these"
        raise DataError(f"{name}: expected {known}, got a mapping with {keys}; pass {hint}")
    if not hasattr(data, "__len__") or not hasattr(data, "__iter__"):
        got = type(data).__name__
        raise DataError(f"{name}: expected {known}, got {got}; make a list of what it yields")
    rows = list(data)
    if rows and all(isinstance(row, str | Path) and _DATA_FILE.fullmatch(str(row)) for row in rows):
        return None
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, row {number}: expected a dict, got {row!r:.80}", row=number)
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def data_files(
    data: Any,
    folder: Path,
    name: str,
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> tuple[list[str], list[Mapping[str, Any]]]:
    """Return the files of data, and its rows if they are in memory, which become a file.

    Raises:
        DataError: a row holds what JSON cannot.
    """
    rows = rows_in(data, name)
    if rows is None:
        given = [] if data is None else [data] if isinstance(data, str | Path) else data
        return [str(path) for path in given], []
    lines = []
    for number, row in enumerate(rows):
        plain = {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in change(row).items()
        }
        try:
            line = json.dumps(plain, ensure_ascii=False, allow_nan=False, default=_plain)
            lines.append(f"{line}\n".encode())
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}, row {number}: {error}", row=number) from None
    text = b"".join(lines)
    path = folder / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh:
        fresh.write_bytes(text)
    return [str(path)], rows


def _plain(value: Any) -> object:
    """Return an array as lists, and a date as text."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def check_model(model: Any, tokenizer: Any, nnodes: int) -> None:
    """Check a model object, and its tokenizer, before anything is written.

    Raises:
        ModelError: it cannot be saved for the ranks.
    """
    for what, given in (("model", model), ("tokenizer", tokenizer)):
        if not (
            given is None or isinstance(given, str | Path) or hasattr(given, "save_pretrained")
        ):
            got = type(given).__name__
            raise ModelError(
                f"{what}: expected a folder, a name of the hub, or an object of transformers with "
                f"save_pretrained, got {got}"
            )
    if model is None or isinstance(model, str | Path):
        return
    problem = ""
    if hasattr(model, "peft_config"):
        problem = "has adapters of PEFT; pass the folder of its base model, and lora=…"
    elif any(getattr(p, "is_meta", False) or hasattr(p, "device_mesh") for p in model.parameters()):
        problem = "has weights that are not in this process; pass its folder"
    elif nnodes > 1:
        problem = f"is in this process, and {nnodes} nodes cannot read it; save it to a folder that"
        problem += " all of them read, and pass the folder"
    elif tokenizer is None and not getattr(model, "name_or_path", ""):
        problem = "does not tell its tokenizer; pass tokenizer=…"
    if problem:
        raise ModelError(f"the model object of class {type(model).__name__} {problem}")


def model_files(model: Any, tokenizer: Any, folder: Path) -> dict[str, object]:
    """Return the settings of a model. Objects are saved to the folder."""
    found = {"path": model_name(model), "tokenizer_path": model_name(tokenizer)}
    if hasattr(model, "save_pretrained") and tokenizer is None:
        found["tokenizer_path"] = model_name(model.name_or_path)
    for key, name, given in (("path", "model", model), ("tokenizer_path", "tokenizer", tokenizer)):
        if hasattr(given, "save_pretrained"):
            found[key] = str(folder / name)
            with writing(folder):
                given.save_pretrained(found[key])
                # The config.json beside a tokenizer says which class reads it.
                if given is tokenizer:
                    config = imported("quadriga.models.folder:local_folder")(found["path"])
                    shutil.copy(config / "config.json", folder / name)
    return {key: value for key, value in found.items() if value is not None}


def model_name(given: Any) -> str | None:
    """Return a folder, or `hf://owner/name` for a name of the hub that is no folder."""
    if not isinstance(given, str | os.PathLike):
        return None
    name = str(given)
    on_hub = _HUB.fullmatch(name) and not is_remote(name) and not Path(name).expanduser().exists()
    return f"hf://{name}" if on_hub else name


# What a program calls.


class Table(list[dict[str, Any]]):
    """Rows of a run: a list of dicts."""

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`. Raises `InputError` without pandas."""
        try:
            return imported("pandas:DataFrame")(self)
        except ImportError:
            raise InputError("to_pandas() needs the package pandas: pip install pandas") from None


@dataclass(frozen=True)
class Picture:
    """A PNG file, which a notebook shows."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class Run:
    """A run, read from its folder: `Run("runs/first")` also reads one of an earlier program.

    Raises `DataError` if the folder holds no run.

    Attributes:
        recipe: what has trained it in this program.
    """

    folder: Path | str
    recipe: Recipe | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self._files.holds_run:
            path = str(self.folder)
            raise DataError(f"{path} holds no run: there is no config.yaml in it", path=path)

    @property
    def _files(self) -> RunFolder:
        return RunFolder(Path(self.folder))

    @property
    def history(self) -> Table:
        """The metrics of each step, and its number under "step"."""
        return Table(read_jsonl(self._files.metrics))

    @property
    def samples(self) -> Table:
        """Some responses of each step, with prompt and reward."""
        return Table(read_jsonl(self._files.samples))

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {name: value for row in self.history for name, value in row.items()}

    @property
    def model_path(self) -> str:
        """The folder of the trained model, for `from_pretrained` and `quadriga generate`."""
        return str(self._files.model)

    def plot(self) -> Picture:
        """Draw reward and validation score over the steps, and return the picture."""
        picture = self._files.plot
        draw = imported("quadriga.observability.trackers:plot_learning_curve")
        if not draw(self._files.metrics, picture, title=self._files.path.name):
            raise DataError(f"{self.folder} has neither rewards nor validation scores to plot")
        return Picture(picture)

    def report(self) -> Path:
        """Write the report of the run, a page for a browser, and return its path."""
        imported("quadriga.report:write_report")([self._files.path], self._files.report)
        return self._files.report

    def resume(self, **settings: Any) -> Run:
        """Go on from the newest checkpoint; settings such as `steps=200` replace earlier ones."""
        if self.recipe is None:
            raise InputError(
                f"{self.folder} is a run of an earlier program: make its GRPO, PPO, SFT or "
                f"RewardModel again with folder={str(self.folder)!r}, and call its resume()"
            )
        return self.recipe.resume(**settings)


class Recipe:
    """A model, data and settings, with which `train` runs. Its subclasses are the algorithms."""

    KIND: ClassVar[type[Any]]
    SHORT: ClassVar[Mapping[str, str]]
    DEFAULTS: ClassVar[Mapping[str, object]] = {}

    def __init_subclass__(cls) -> None:
        """Show `help` and notebooks, which complete them, all keywords that have a short form."""
        own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.name != "self"]
        named = {p.name: p for p in own if p.kind != p.VAR_KEYWORD}
        for name in (*cls.SHORT, *_unique(cls.KIND), *(f.name for f in fields(cls.KIND))):
            keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            named.setdefault(name, keyword)
        cls.__signature__ = inspect.Signature(list(named.values()))  # type: ignore[attr-defined]

    def _set(
        self,
        settings: Mapping[str, Any],
        *,
        model: Any,
        data: Any = None,
        val_data: Any = None,
        tokenizer: Any = None,
        reward: Any = None,
        reward_weights: Mapping[str, float] | None = None,
        callbacks: Sequence[Any] = (),
        **named: Any,
    ) -> None:
        """Check the keywords. A keyword of `named` that is None is not given."""
        given = {name: value for name, value in named.items() if value is not None}
        values = nested(self.KIND, self.SHORT, {**self.DEFAULTS, **given, **settings})
        self._functions: dict[str, Callable[..., object]] = {}
        values = with_reward(values, reward, reward_weights, self._functions)
        self._callbacks = [owner for _, owner in load_callbacks(callbacks)]
        self._model, self._tokenizer = model, tokenizer
        self._data = {"train": data, "val": val_data}
        self._values = with_backend(values)
        self._folder: Path | None = None
        config = build(self.KIND, self._values)
        folder = self._values.get("trainer", {}).get("default_local_dir")
        self._given_folder = Path(folder).expanduser() if folder else None
        check_model(model, tokenizer, config.trainer.nnodes)
        for name, rows in self._data.items():
            rows_in(rows, name)

    def train(self) -> Run:
        """Train in a run folder of its own, and return the run.

        Ctrl-C ends the step, saves a checkpoint and raises `KeyboardInterrupt`; `resume` goes on.

        Raises:
            InputError: names what does not fit. Nothing was started, and nothing is left.
        """
        folder = self._given_folder or free_folder(type(self).__name__.lower())
        config = build(self.KIND, self._values)
        files = RunFolder(folder)
        if config.trainer.resume_mode == "disable":  # before anything is written there
            files.check(files.existing(config.trainer, None))
        return self._run(folder, {})

    def resume(self, **settings: Any) -> Run:
        """Go on from the newest checkpoint of the run folder; without one, from step 1.

        Args:
            settings: replace the settings of the class: `steps=200`.
        """
        folder = self._folder or self._given_folder
        if folder is None:
            raise InputError("resume(): this program has not trained yet; give folder=… of a run")
        changes = nested(self.KIND, self.SHORT, settings)
        return self._run(folder, _merged(changes, {"trainer": {"resume_mode": "auto"}}))

    def _run(self, folder: Path, changes: Mapping[str, Any]) -> Run:
        self._folder = folder
        values = _merged(self._values, changes, {"trainer": {"default_local_dir": str(folder)}})
        with inputs_of(folder) as inputs:
            data: dict[str, Any] = {}
            for name, given in self._data.items():
                files, rows = data_files(given, inputs, name, self.row)
                data |= {f"{name}_files": files} if files else {}
                if name == "train" and rows:
                    data |= self.keys(rows)
            model = {"model": model_files(self._model, self._tokenizer, inputs)}
            section = {_POLICY: model} if self.KIND is TrainConfig else model
            config = build(self.KIND, _merged({"data": data}, values, section))
            GIVEN.update(self._functions)
            check_early(config)
            imported(_RUN[self.KIND])(config, self._callbacks)
        return Run(folder, self)

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
        """Return the settings `data.*` that fit rows in memory, where none are given."""
        return {"train_batch_size": min(64, len(rows))}

    def row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row in memory as the files of the command have it."""
        return row


class GRPO(Recipe):
    """Group relative policy optimisation: the responses to a prompt are compared by their rewards.

    Args:
        model: a folder, a name of the hub, or a model object, which is saved and not changed.
        reward: `f(response, **columns)`, or `f(completions, **columns)` for a whole batch; the
            columns are those of the data. A file, `rules.py:score`; several by name or in a list,
            with `reward_weights` by name; None: the rules of the column `data_source`.
        data: rows with `prompt`, a text or a chat: a list of dicts, a dataset, a data frame, files.
        val_data: the same, for validation.
        tokenizer: an object or a folder; None: that of the model.
        responses: to each prompt.
        lora: the rank of adapters, which are trained in place of all weights.
        callbacks: objects, classes or files that are told what happens, and can stop the run or
            change the learning rate: see `quadriga.observability.callbacks`.
        backend: "ray", or "local", this process; None: local for one rank.
        folder: the run folder; None: a new one below `runs/`.
        settings: every other setting (see `quadriga.cli.api`).

    Raises:
        InputError: a keyword does not exist, or what it is given does not fit.
    """

    KIND = TrainConfig
    SHORT: ClassVar[Mapping[str, str]] = _OF_POLICY
    DEFAULTS: ClassVar[Mapping[str, object]] = {"adv_estimator": "grpo", "responses": 8}

    def __init__(
        self,
        model: Any,
        reward: Any = None,
        data: Any = None,
        *,
        val_data: Any = None,
        tokenizer: Any = None,
        reward_weights: Mapping[str, float] | None = None,
        lr: float | None = None,
        responses: int | None = None,
        lora: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_prompt_length: int | None = None,
        max_response_length: int | None = None,
        temperature: float | None = None,
        backend: str | None = None,
        ranks: int | None = None,
        rollout: str | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        callbacks: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        self._set(**_arguments(locals()))


class PPO(GRPO):
    """Proximal policy optimisation with a critic. Arguments as `GRPO`, and `critic_lr`."""

    SHORT: ClassVar[Mapping[str, str]] = {**_OF_POLICY, "critic_lr": "critic.optim.lr"}
    DEFAULTS: ClassVar[Mapping[str, object]] = {"adv_estimator": "gae", "responses": 1}


class _FineTuning(Recipe):
    """Training on rows of data, without responses of the model."""

    KIND: ClassVar[type[Any]] = SFTConfig
    SHORT = _OF_MODEL

    def __init__(
        self,
        model: Any,
        data: Any = None,
        *,
        val_data: Any = None,
        tokenizer: Any = None,
        lr: float | None = None,
        lora: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        backend: str | None = None,
        ranks: int | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        callbacks: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        self._set(**_arguments(locals()))


class SFT(_FineTuning):
    """Supervised fine-tuning on responses. Arguments as `GRPO`.

    Rows in memory have `messages`, a chat; or `prompt` and `completion`, which alone is trained.
    """

    def keys(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
        """See `Recipe`."""
        turns = "all" if "messages" in rows[0] else "last"
        return {**super().keys(rows), "messages_key": "messages", "loss_turns": turns}

    def row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Recipe`."""
        if "messages" in row or not {"prompt", "completion"} <= row.keys():
            return row
        prompt, completion = (
            list(row[key])
            if hasattr(row[key], "__iter__") and not isinstance(row[key], str)
            else [{"role": role, "content": row[key]}]
            for key, role in (("prompt", "user"), ("completion", "assistant"))
        )
        return {**row, "messages": prompt + completion}


class RewardModel(_FineTuning):
    """A reward model of pairs: rows with `prompt`, `chosen` and `rejected`. Arguments as `SFT`."""

    KIND = RMConfig


def evaluate(
    model: Any,
    data: Any = None,
    reward: Any = None,
    *,
    tokenizer: Any = None,
    reward_weights: Mapping[str, float] | None = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> Evaluation:
    """Score responses of a model: pass@k, mean, best of n and majority, with intervals.

    Args:
        settings: those of `quadriga eval`; short ones are `responses`, `temperature` and `ranks`.
        folder: of the results; None: a new one below `runs/`. The other arguments are as in `GRPO`.
    """
    output = Path(folder).expanduser() if folder else free_folder("eval")
    values = with_backend(nested(EvalConfig, _OF_ANSWERS, settings))
    functions: dict[str, Callable[..., object]] = {}
    values = with_reward(values, reward, reward_weights, functions)
    check_model(model, tokenizer, build(EvalConfig, values).trainer.nnodes)
    with inputs_of(output) as inputs:
        files, _ = data_files(data, inputs, "data")
        made = {"model": model_files(model, tokenizer, inputs), "output": str(output)}
        config = build(EvalConfig, _merged(values, made, {"data_files": files} if files else {}))
        GIVEN.update(functions)
        return cast("Evaluation", imported("quadriga.trainer.evaluation:run_evaluation")(config))


def generate(model: Any, prompts: Any, *, tokenizer: Any = None, **settings: Any) -> list[Answer]:
    """Return the responses of a model to a prompt, a list of prompts, rows or files.

    Args:
        settings: those of `quadriga generate`; short ones as in `evaluate`.
    """
    values = with_backend(nested(GenerateConfig, _OF_ANSWERS, settings))
    check_model(model, tokenizer, build(GenerateConfig, values).trainer.nnodes)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(prompts, str) and not _DATA_FILE.fullmatch(prompts):
            prompts = [prompts]
        files, _ = data_files(prompts, Path(folder), "prompts")
        made = {"model": model_files(model, tokenizer, Path(folder)), "data_files": files}
        config = build(GenerateConfig, _merged(values, made))
        return cast("list[Answer]", imported("quadriga.trainer.evaluation:run_generation")(config))
