"""Read settings of verl: its YAML file with Hydra overrides → settings of ours, and what is left.

    verl's file and overrides ──Hydra──► values ──table──► our values ──build──► TrainConfig
                                            └── no row in the table ──► `Translation.ignored`

A setting that changes what is computed and has no counterpart is an error (`_REFUSED`). Any other
one is listed. This module is not in `compat.verl`, because the command line uses it, and an import
of `compat.verl` provides verl's modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.compat.verl_table import LEAVE, Row
from quadriga.config.convert import build
from quadriga.config.loading import (
    Plain,
    check_interpolations,
    check_override,
    read_settings_file,
    remember_given,
)
from quadriga.config.paths import expand_home
from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_SCORES = (
    "Quadriga scores with rules, unless settings of its own ask for a reward model: "
    "reward_model.enable and reward_model.model.path (docs/concepts/reward_models.md); or add the "
    "reward model as a role of your own (docs/concepts/roles.md)"
)
_REFUSED: dict[str, str] = {
    "actor_rollout_ref.model.lora.rank": "it is for Megatron, whose engine has no adapters; set "
    "model.lora_rank and strategy=fsdp2",
    "actor_rollout_ref.rollout.multi_turn.enable": "Quadriga generates one response per prompt",
    "reward.reward_model.enable": _SCORES,
    "reward_model.enable": _SCORES,
    "distillation.enabled": "Quadriga has no distillation loss",
    "algorithm.use_pf_ppo": "Quadriga has no reweighting of samples",
    "algorithm.rollout_correction.bypass_mode": "Quadriga computes the log-probabilities again",
}
"""Settings that must be off, and why."""
_STRATEGIES = ("fsdp2", "fsdp", "megatron")
_STRATEGY_KEYS = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
)
_RESUME_MODE, _RESUME_PATH = "trainer.resume_mode", "trainer.resume_from_path"
_ABSENT = object()
_UNUSED = ("_target_", "???")
MOST_LISTED = 30
"""Ignored settings of a file up to this number are listed by name."""


@dataclass(frozen=True)
class Becomes:
    """One setting of verl and what it has become."""

    verl_key: str
    verl_value: object
    key: str
    value: object

    def __str__(self) -> str:
        return f"{self.verl_key}={self.verl_value} → {self.key}={self.value}"

    @property
    def changed(self) -> bool:
        """Whether the key or the value differs from verl's."""
        return (self.verl_key, self.verl_value) != (self.key, self.value)


@dataclass(frozen=True)
class Translation(Generic[T]):
    """Settings of ours that were read from settings of verl.

    Attributes:
        config: our settings, not checked against each other yet.
        becomes: what each setting has become.
        ignored: verl's keys without a counterpart that have a value other than null, and the parts
            of a value that have none, as `key=part`.
        chosen: the keys of the command line.
    """

    config: T
    becomes: tuple[Becomes, ...]
    ignored: tuple[str, ...]
    chosen: frozenset[str] = frozenset()

    def report(self) -> str:
        """Return what the settings of the command line have become, and what is ignored, with
        secrets masked.

        Of a file with many ignored settings, only their numbers are given, by section.
        """
        lines = [f"{len(self.becomes)} settings of verl were translated"]
        lines += [f"  {b}" for b in self.becomes if b.verl_key in self.chosen and b.changed]
        given = [key for key in self.ignored if key.partition("=")[0] in self.chosen]
        rest = [key for key in self.ignored if key not in given]
        for source, shown in (("command line", given), ("file", _by_section(rest))):
            if shown:
                lines.append(f"ignored, without a counterpart, from the {source}:")
                lines += [f"  {line}" for line in shown]
        return mask_secrets("\n".join(lines))


def read_verl(
    cls: type[T], table: Mapping[str, Row], file: str | Path, overrides: Iterable[str] = ()
) -> Translation[T]:
    """Read verl's settings file, compose it with Hydra as verl does, and translate it.

    `key=value` sets a key of the file or of the table, `+key=value` adds any key. Raises
    `ConfigError` if the file or an override cannot be read, if a key is in neither, and for a
    setting that must be off.
    """
    path = Path(expand_home(file)).resolve()
    read_settings_file(path)  # checks its size and its structure
    texts = list(overrides)
    chosen = frozenset(text.partition("=")[0].lstrip("+~") for text in texts)
    return translate(cls, table, _composed(path, texts, {*table, *_REFUSED}), chosen)


def translate(
    cls: type[T],
    table: Mapping[str, Row],
    values: Mapping[str, object],
    chosen: frozenset[str] = frozenset(),
) -> Translation[T]:
    """Translate verl's values, a mapping of mappings. Raises `ConfigError` as `read_verl`."""
    given = {key: value for key, value in _leaves(values, table) if not _is_unused(key, value)}
    _check_sections(given, table)
    _check_offered(given)
    ours: dict[str, Plain] = {}
    becomes = []
    left_out = []
    for verl_key, row in table.items():
        if verl_key not in given:
            continue
        reason = _without_effect(verl_key, given)
        if reason is not None:
            if verl_key in chosen:
                left_out.append(f"{verl_key}={given[verl_key]} ({reason})")
            continue
        left_out += [f"{verl_key}={part}" for part in row.left_out(given[verl_key])]
        value = row.convert(given[verl_key])
        if value is LEAVE:
            continue
        for key in row.keys:
            _set(ours, key, value)
            becomes.append(Becomes(verl_key, given[verl_key], key, value))
    ignored = [
        key for key, value in given.items() if key not in table and value not in (None, {}, [])
    ]
    try:
        config = build(cls, ours, "translated from verl: ")
    except ConfigError as error:
        raise _with_verl_key(error, becomes) from None
    remember_given(config, ours)
    return Translation(config, tuple(becomes), (*ignored, *left_out), chosen)


def plain_values(config: object) -> dict[str, object]:
    """Return a configuration of verl as plain values: an OmegaConf node, a mapping, or an object
    with attributes. Raises `ConfigError` for anything else."""
    if OmegaConf.is_dict(config):
        return _plain(config, resolve=True)
    found = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if OmegaConf.is_list(config) or not isinstance(found, Mapping):
        raise ConfigError(
            f"expected settings of verl (a mapping or an OmegaConf node), got {config!r}"
        )
    nested = (int, float, str, bool, list, tuple, type(None))
    return {k: v if isinstance(v, nested) else plain_values(v) for k, v in found.items()}


def _composed(path: Path, overrides: list[str], known: Collection[str]) -> dict[str, object]:
    """Return the values of a file with its defaults list and overrides. An override without "+"
    needs a key of the file or of `known`."""
    texts, strange = [], []
    for text in overrides:
        key, sign, _ = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"expected key=value, got {text!r}", key=key)
        check_override(text, key)
        if key[0] not in "+~" and not any(f"{name}.".startswith(f"{key}.") for name in known):
            strange.append(key)
        texts.append(text if text.startswith(("+", "~")) else f"++{text}")
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(path.parent)):
            if strange:
                _refuse_strange(compose(config_name=path.stem), strange, known, path)
            tree = compose(config_name=path.stem, overrides=texts)
        check_interpolations(_plain(tree, resolve=False))
        return _plain(tree, resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"cannot read {path} as settings of verl: {reason}", key="--verl"
        ) from None
    finally:
        GlobalHydra.instance().hydra = before


def _plain(tree: object, *, resolve: bool) -> dict[str, Any]:  # values of OmegaConf
    values = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _refuse_strange(
    tree: DictConfig, keys: Iterable[str], known: Collection[str], path: Path
) -> None:
    """Raise `ConfigError` for the first key that the settings of the file do not have either."""
    values = _plain(tree, resolve=False)
    for key in keys:
        found: object = values
        for name in key.split("."):
            found = found.get(name, _ABSENT) if isinstance(found, Mapping) else _ABSENT
        if found is _ABSENT:
            near = nearest_name(key, known, least=0.8)
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"{key}: neither {path} nor the table of verl's settings has this key.{hint} "
                f"To add it nevertheless, write +{key}=…",
                key=key,
            )


def _leaves(
    values: Mapping[str, object], table: Mapping[str, Row], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of every value. A mapping is a value where the table, or the list
    of refused settings, has its key."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in table and key not in _REFUSED:
            yield from _leaves({str(k): v for k, v in value.items()}, table, f"{key}.")
        else:
            yield key, value


def _is_unused(key: str, value: object) -> bool:
    return key.rpartition(".")[2] == _UNUSED[0] or value == _UNUSED[1] or value is None


def _without_effect(key: str, given: Mapping[str, object]) -> str | None:
    """Return why verl does not read `key` beside the other settings `given`; None: it does."""
    if key.startswith("critic.") and given.get("algorithm.adv_estimator", "gae") != "gae":
        return "the estimator reads no values"
    role, found, name = key.rpartition(".megatron.")
    if not found:
        return None
    of_actor = given.get("actor_rollout_ref.actor.strategy", "fsdp")
    default = of_actor if role == "actor_rollout_ref.ref" else "fsdp"
    strategy = given.get(f"{role}.strategy", default)
    if strategy != "megatron":
        return f"the strategy is {strategy}"
    ranks = given.get(f"{role}.megatron.tensor_model_parallel_size", 1)
    if name == "sequence_parallel" and ranks == 1:
        return "tensor_model_parallel_size is 1"  # verl turns it off
    return None


def _check_sections(given: Mapping[str, object], table: Mapping[str, Row]) -> None:
    """Check that no value stands where the table has a section, whose settings it would replace."""
    known = [*table, *_REFUSED]
    for key, value in given.items():
        inner = next((name for name in known if name.startswith(f"{key}.")), None)
        if inner is not None and key not in table and value != {}:
            raise ConfigError(
                f"{key} of verl is a section of settings, got {mask_secrets(repr(value))}; set its "
                f"keys, such as {inner}, or null for Quadriga's defaults",
                key=key,
            )


def _check_offered(given: Mapping[str, object]) -> None:
    """Check the settings that have no counterpart, and that a path to resume from is read."""
    for key, reason in _REFUSED.items():
        if given.get(key) not in (None, False, 0):
            raise ConfigError(f"{key}={given[key]!r} of verl has no counterpart: {reason}", key=key)
    for key in _STRATEGY_KEYS:
        if given.get(key, _STRATEGIES[0]) not in _STRATEGIES:
            raise ConfigError(
                f"{key}={given[key]!r} of verl has no counterpart: Quadriga trains with FSDP2 and "
                f"with Megatron-core; set it to one of {', '.join(_STRATEGIES)}",
                key=key,
            )
    mode, path = given.get(_RESUME_MODE), given.get(_RESUME_PATH)
    if mode == "resume_path" and not isinstance(path, str):
        raise ConfigError(
            f"{_RESUME_MODE}={mode} needs {_RESUME_PATH}, the folder of a checkpoint; got {path!r}",
            key=_RESUME_MODE,
        )
    if mode not in (None, "resume_path") and path is not None:
        raise ConfigError(
            f"{_RESUME_MODE} is {mode!r}, which reads no {_RESUME_PATH}, but that is {path!r}; set "
            f"{_RESUME_MODE}=resume_path to resume from it",
            key=_RESUME_PATH,
        )


def _with_verl_key(error: ConfigError, becomes: Iterable[Becomes]) -> ConfigError:
    """Return the error of a value, with verl's key if ours has another name."""
    ours = str(getattr(error, "key", "")).partition("[")[0]  # of a list, the key of an item
    names = [b.verl_key for b in becomes if f"{ours}.".startswith(f"{b.key}.")]
    if not names or names[-1] == ours:
        return error
    details = {**vars(error), "key": names[-1]}
    return type(error)(f"{error}; the key of verl is {names[-1]}", **details)


def _set(tree: dict[str, Plain], key: str, value: object) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[last] = value  # type: ignore[assignment]  # `build` checks the type


def _by_section(keys: Collection[str]) -> list[str]:
    """Return one line per section: `actor_rollout_ref.actor: grad_norm, strategy`.

    Of many keys only their number is given: `actor_rollout_ref.actor: 64 settings`.
    """
    counted = len(keys) > MOST_LISTED
    sections: dict[str, list[str]] = {}
    for key in keys:
        *parts, _ = key.split("=")[0].split(".")
        section = parts[:2] if counted else parts
        sections.setdefault(".".join(section), []).append(key.removeprefix(f"{'.'.join(parts)}."))
    return [
        ": ".join(filter(None, (name, f"{len(held)} settings" if counted else ", ".join(held))))
        for name, held in sections.items()
    ]
