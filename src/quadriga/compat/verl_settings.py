"""Read settings of verl: its YAML file with Hydra overrides → settings of ours, and what is left.

    verl's file and overrides ──Hydra──► values ──table──► our values ──build──► TrainConfig
                                            └── no row in the table ──► `Translation.ignored`

A setting that changes what is computed and has no counterpart is an error (`verl_rules.REFUSED`).
Any other one is listed. The tables are at the end. Keys of ours can stand beside verl's.
This module is not in `compat.verl`, because the command line uses it, and an import of
`compat.verl` provides verl's modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Generic, TypeGuard, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.compat import verl_rules
from quadriga.config import loading
from quadriga.config.convert import build, is_settings, type_of_key
from quadriga.config.paths import Dataclass, local_path
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import mask_secrets, shown
from quadriga.errors import ConfigError, UnknownSettingError, nearest_name
from quadriga.observability.trackers import TRACKERS as OWN_TRACKERS
from quadriga.rollout import rollout_of

T = TypeVar("T", bound=Dataclass)

_ABSENT = object()
_ENGINE_CLASS = "engine._target_"  # in fine-tuning, where it alone may say megatron
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
        for b in self.becomes:
            if b.verl_key in self.chosen and (b.verl_key, b.verl_value) != (b.key, b.value):
                lines.append(f"  {b}")
        given = [key for key in self.ignored if key.partition("=")[0] in self.chosen]
        rest = [key for key in self.ignored if key not in given]
        for source, keys in (("command line", given), ("file", _by_section(rest))):
            if keys:
                lines.append(f"ignored, without a counterpart, from the {source}:")
                lines += [f"  {line}" for line in keys]
        return shown("\n".join(lines))


def read_verl(
    cls: type[T], table: Mapping[str, Row], file: str | Path, overrides: Iterable[str] = ()
) -> Translation[T]:
    """Read verl's settings file, compose it with Hydra as verl does, and translate it.

    `key=value` sets a key of the file or of the table, `+key=value` adds any key. Raises
    `ConfigError` if the file or an override cannot be read, if a key is in neither, and for a
    setting that must be off.
    """
    path = Path(local_path(file, "--verl")).resolve()
    loading.read_settings_file(path)  # checks its size and its structure
    texts = list(overrides)
    chosen = frozenset(text.partition("=")[0].lstrip("+~") for text in texts)
    return translate(cls, table, _composed(path, texts, cls, table), chosen)


def translate(
    cls: type[T],
    table: Mapping[str, Row],
    values: Mapping[str, object],
    chosen: frozenset[str] = frozenset(),
) -> Translation[T]:
    """Translate verl's values, a mapping of mappings. Raises `ConfigError` as `read_verl`."""
    table = {**table, **_engine_rows(table, values)}
    given = {key: value for key, value in _leaves(values, table) if not _is_unused(key, value)}
    _check_sections(given, table)
    of_roles = {key for key, row in table.items() if row.of_role}
    of_verl = {key: value for key, value in given.items() if key not in of_roles}
    checked = verl_rules.check_refused(of_verl) | verl_rules.check_together(of_verl)
    unread = {
        key: reason
        for key in given.keys() & table.keys() - of_roles
        if (reason := verl_rules.without_effect(key, given)) is not None
    }
    read = {key: row for key, row in table.items() if key in given and key not in unread}
    own = [key for key in given if key not in table and _is_ours(cls, key)]
    becomes, left_out = _chosen_values(_candidates(read, own, given, chosen), chosen)
    left_out += [f"{key}={part}" for key, row in read.items() for part in row.left_out(given[key])]
    left_out += [f"{key}={given[key]} ({unread[key]})" for key in sorted(unread.keys() & chosen)]
    ours: dict[str, loading.Plain] = {}
    for found in becomes:
        _set(ours, found.key, found.value)
    known = {*table, *checked, *(found.verl_key for found in becomes)}
    ignored = [key for key, value in given.items() if key not in known and value not in ({}, [])]
    try:
        config = build(cls, ours, "translated from verl: ")
        if isinstance(config, TrainConfig) and config.actor_rollout_ref.rollout.name in ENGINES:
            rollout_of(config.actor_rollout_ref.rollout)  # checks its options
    except ConfigError as error:
        raise _with_verl_key(error, becomes) from None
    loading.remember_given(config, ours)
    return Translation(config, tuple(becomes), (*ignored, *left_out), chosen)


def _candidates(
    read: Mapping[str, Row],
    own: Iterable[str],
    given: Mapping[str, object],
    chosen: Collection[str],
) -> Iterator[tuple[int, Becomes]]:
    """Yield each value of each of our settings with its precedence: a row with one key of ours
    precedes one with several (`clip_ratio_high`, `clip_ratio`), the command line the file."""
    for verl_key, key, value in verl_rules.implied(given):
        yield 5 * key.startswith("trainer."), Becomes(verl_key, given[verl_key], key, value)
    units = verl_rules.converted(given)
    for verl_key, row in read.items():
        try:
            value = row.convert(units.get(verl_key, given[verl_key]))
        except ConfigError as error:
            raise ConfigError(f"{verl_key} of verl: {error}", key=verl_key) from None
        for key in () if value is LEAVE else row.keys:
            rank = 1 + 2 * (len(row.keys) == 1) + (verl_key in chosen)
            yield rank, Becomes(verl_key, given[verl_key], key, value)
    yield from ((4, Becomes(key, given[key], key, given[key])) for key in own)


def _chosen_values(
    candidates: Iterable[tuple[int, Becomes]], chosen: Collection[str]
) -> tuple[list[Becomes], list[str]]:
    """Return the value of each of our settings, and the lines of the command line that lose.

    Raises `ConfigError` for two settings of the command line that disagree.
    """
    best: dict[str, tuple[int, Becomes]] = {}
    lost = []
    for rank, found in candidates:
        before = best.get(found.key)
        if before is None:
            best[found.key] = rank, found
            continue
        winner, loser = (found, before[1]) if rank >= before[0] else (before[1], found)
        differ = winner.value != loser.value
        if differ and rank == before[0] == 4:
            raise ConfigError(
                f"{loser.verl_key}={loser.verl_value!r} and {winner.verl_key}="
                f"{winner.verl_value!r} both set {found.key}; remove one of them",
                key=winner.verl_key,
            )
        if differ and loser.verl_key in chosen and rank < 5:
            lost.append(
                f"{loser.verl_key}={loser.verl_value} ({winner.verl_key}={winner.verl_value} holds)"
            )
        best[found.key] = max(rank, before[0]), winner
    return [found for _, found in best.values()], lost


def _is_ours(cls: type, key: str) -> bool:
    """Return whether a key is a setting of ours. `model.lora` is a section of verl's, too."""
    try:
        return not is_settings(type_of_key(cls, key)) and "model.lora." not in key
    except UnknownSettingError:
        return False


def plain_values(config: object) -> dict[str, object]:
    """Return a configuration of verl as plain values: an OmegaConf node, a mapping, or an object
    with attributes. Raises `ConfigError` for anything else, and if a value cannot be resolved."""
    if OmegaConf.is_dict(config):
        try:
            return {**loading.plain_dict(config, resolve=True)}
        except OmegaConfBaseException as error:
            text = f"cannot resolve settings of verl: {str(error).splitlines()[0]}"
            raise ConfigError(f"{text}; give a section of the whole configuration") from None
    found = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if OmegaConf.is_list(config) or not isinstance(found, Mapping):
        raise ConfigError(
            f"expected settings of verl (a mapping or an OmegaConf node), got {config!r}"
        )
    nested = (int, float, str, bool, list, tuple, type(None))
    return {k: v if isinstance(v, nested) else plain_values(v) for k, v in found.items()}


def _composed(
    path: Path, overrides: list[str], cls: type, table: Mapping[str, Row]
) -> Mapping[str, object]:
    """Return the values of a file with its defaults list and overrides.

    An override without "+" needs a key of the file, of the table, of another version of verl or of
    ours. One whose key is a folder beside the file chooses a file of it: model_engine=megatron.
    """
    texts, strange = [], []
    for text in overrides:
        key, sign, _ = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"expected key=value, got {text!r}", key=key)
        loading.check_override(text, key)
        is_group = "@" in key or (path.parent / key.lstrip("+")).is_dir()
        if not (is_group or key[0] in "+~" or _is_known(cls, table, key)):
            strange.append(key)
        texts.append(text if is_group or key[0] == "~" else _grammatical(text.lstrip("+")))
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base=None, config_dir=str(path.parent)):
            if strange:
                _refuse_strange(compose(config_name=path.stem), strange, table, path)
            tree = compose(config_name=path.stem, overrides=texts)
        loading.check_interpolations(loading.plain_dict(tree, resolve=False))
        return loading.plain_dict(tree, resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"cannot read {path} as settings of verl: {reason}", key="--verl"
        ) from None
    finally:
        GlobalHydra.instance().hydra = before


def _grammatical(text: str) -> str:
    """Return an override that sets a key, with a text that Hydra cannot read in quotes."""
    key, _, raw = text.partition("=")
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        if raw[:1] not in ("", "[", "{", "'", '"'):
            quoted = raw.replace("\\", "\\\\").replace("'", "\\'")
            return f"++{key}='{quoted}'"
    return f"++{text}"


def _is_known(cls: type, table: Mapping[str, Row], key: str) -> bool:
    return (
        any(f"{name}.".startswith(f"{key}.") for name in table)
        or any(fnmatchcase(key, pattern) for pattern in verl_rules.REFUSED)
        or verl_rules.is_of_verl(key)
        or _is_ours(cls, key)
    )


def _refuse_strange(
    tree: DictConfig, keys: Iterable[str], known: Collection[str], path: Path
) -> None:
    """Raise `ConfigError` for the first key that the settings of the file do not have either."""
    values = loading.plain_dict(tree, resolve=False)
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
    """Yield (dotted key, value) of every value. A mapping is a value where the table has its
    key."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in table:
            yield from _leaves({str(k): v for k, v in value.items()}, table, f"{key}.")
        else:
            yield key, value


def _is_unused(key: str, value: object) -> bool:
    return (key.endswith("_target_") and key != _ENGINE_CLASS) or value in ("???", None)


def _check_sections(given: Mapping[str, object], table: Mapping[str, Row]) -> None:
    """Check that no value stands where the table has a section, whose settings it would replace."""
    known = [*table, *verl_rules.REFUSED]
    for key, value in given.items():
        inner = next((name for name in known if name.startswith(f"{key}.")), None)
        if inner is not None and key not in table and value != {}:
            raise ConfigError(
                f"{key} of verl is a section of settings, got {mask_secrets(repr(value))}; set its "
                f"keys, such as {inner}, or null for Quadriga's defaults",
                key=key,
            )


def _with_verl_key(error: ConfigError, becomes: Iterable[Becomes]) -> ConfigError:
    """Return the error of a value, with verl's key if ours has another name."""
    ours = str(getattr(error, "key", "")).partition("[")[0]  # of a list, the key of an item
    names = [b.verl_key for b in becomes if f"{ours}.".startswith(f"{b.key}.")]
    if not names or names[-1] == ours:
        return error
    details = {**vars(error), "key": names[-1]}
    return type(error)(f"{error}; the key of verl is {names[-1]}", **details)


def _set(tree: dict[str, loading.Plain], key: str, value: object) -> None:
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


# The tables: what each setting of verl becomes. A row is `verl's key → our key`, or several of
# ours. A conversion turns verl's value into ours. A value of another type than verl's stays as it
# is, so that the check of our settings refuses it.

Convert = Callable[[object], object]

LEAVE: Final = object()
"""A converted value that is not written, so that our default holds."""


@dataclass(frozen=True)
class Row:
    """Our keys for one of verl's, and the conversion of its value.

    `left_out`: the parts of verl's value that the conversion drops. `of_role`: the setting is of a
    role that the program has added, whatever verl has under its name.
    """

    keys: tuple[str, ...]
    convert: Convert
    left_out: Callable[[object], Sequence[str]] = lambda value: ()
    of_role: bool = False


def same(value: object) -> object:
    """Return the value; None stands for our default."""
    return LEAVE if value is None else value


def to(*keys: str, convert: Convert = same) -> Row:
    """Return a row of the table."""
    return Row(keys, convert)


def named(names: Mapping[object, object]) -> Convert:
    """Return a conversion of names or numbers; others stay as they are."""
    return lambda value: names.get(value, value) if isinstance(value, str | int) else same(value)


def files(value: object) -> object:
    """A file or a list of files → a list."""
    return LEAVE if value is None else [value] if isinstance(value, str) else value


def positive(value: object) -> object:
    """A number of steps; -1 and 0 stand for our default."""
    return LEAVE if _is_integer(value) and value <= 0 else same(value)


def frequency(value: object) -> object:
    """Every so many steps; -1 (never) → 0 (only after the last step)."""
    return max(value, 0) if _is_integer(value) else same(value)


def only(name: str) -> Convert:
    """Return a conversion that accepts one name: a setting of verl that Quadriga has fixed."""

    def convert(value: object) -> object:
        if value not in (None, name):
            raise ConfigError(f"the column must have the name {name!r}, got {value!r}; rename it")
        return LEAVE

    return convert


def hub_model(value: object) -> object:
    """A name of the hub, owner/name, if there is no such folder → "hf://owner/name"."""
    if not isinstance(value, str) or not _HUB_NAME.fullmatch(value):
        return same(value)
    return value if Path(value).exists() else f"hf://{value}"


def layers(value: object) -> object:
    """A name of layers or a list of names; `.*` of a regular expression → `*`."""
    names = files(value)
    if not isinstance(names, list):
        return names
    return [n.replace(".*", "*").replace("\\.", ".") if isinstance(n, str) else n for n in names]


def engine_arguments(value: object) -> object:
    """Arguments of a rollout engine other than null, in today's spelling."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected a section of arguments, got {value!r}")
    given = {str(name): setting for name, setting in value.items() if setting is not None}
    if given.pop("disable_mm_preprocessor_cache", False):
        given["mm_processor_cache_gb"] = 0
    return given or LEAVE


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


KL = named({"kl": "k1", "mse": "k2", "kl+": "k1+", "mse+": "k2"})
DTYPE = named({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"})
DEVICE = named({"cuda": "auto"})
ROUTES = named({"disabled": False, "R3": True})
LOSS = named({"vanilla": "ppo_clip", "gspo": "gspo_token"})
ESTIMATOR = named({"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"})
STRATEGY = named({"fsdp2": "fsdp"})
RECOMPUTED = named({"full": True})
ALL_TOKENS = named({0: -1})
UNLIMITED = named(dict.fromkeys((0, -1), 10**6))
EAGER = named({False: LEAVE})  # graphs are ours by default, where the engine has them
VISION = named({True: ["*visual.*"], False: LEAVE})
ENGINE_CLASS = named({f"verl.workers.config.{name}": ours for name, ours in (
    ("McoreEngineConfig", "megatron"), ("FSDPEngineConfig", LEAVE))})  # fmt: skip
RESUME = named({"resume_path": LEAVE})  # then `resume_from_path` is the value
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
TRACKERS = {name: name for name in OWN_TRACKERS} | {"file": "jsonl"}  # verl's logger → ours


def _loggers(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, list | tuple) else []


def trackers(value: object) -> object:
    """Our trackers for verl's loggers. If we have none of them, our default holds."""
    names = _loggers(value)
    if not names:
        return same(value)
    return [TRACKERS[name] for name in map(str, names) if name in TRACKERS] or LEAVE


def other_loggers(value: object) -> Sequence[str]:
    """The loggers for which Quadriga has no tracker."""
    return [name for name in map(str, _loggers(value)) if name not in TRACKERS]


def _section(
    verl: str, ours: str, *names: str, convert: Convert = same, **renamed: str
) -> dict[str, Row]:
    """Return the rows of a section: `names` are the same in both, `renamed` is verl's name=ours."""
    both = {name: name for name in names} | renamed
    return {f"{verl}.{name}": to(f"{ours}.{own}", convert=convert) for name, own in both.items()}


def _optim(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "lr", "betas", "weight_decay", "min_lr_ratio"),
        **_section(verl, ours, "lr_warmup_steps", convert=positive),
        **_section(verl, ours, lr_warmup_steps_ratio="lr_warmup_ratio"),
        **_section(verl, ours, min_lr="min_lr_ratio", lr_decay_style="lr_scheduler"),
        **_section(verl, ours, convert=positive, total_training_steps="total_steps"),
        **_section(verl, ours, lr_scheduler_type="lr_scheduler"),
        **_section(verl, ours, "lr_scheduler", warmup_style="lr_scheduler", clip_grad="grad_clip"),
    }


def _engine(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "param_offload", "optimizer_offload", "offload_policy"),
        **_section(verl, ours, "reshard_after_forward", "fsdp_size"),
        **_section(verl, ours, ulysses_sequence_parallel_size="sequence_parallel_size"),
        **_section(verl, ours, "dtype", convert=DTYPE),
        **_section(f"{verl}.mixed_precision", ours, convert=DTYPE, param_dtype="dtype"),
        **_section(f"{verl}.mixed_precision", ours, "reduce_dtype", convert=DTYPE),
    }


def _tokens(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "use_dynamic_bsz"),
        **_section(verl, ours, ppo_max_token_len_per_gpu="max_tokens_per_micro_batch"),
        **_section(verl, ours, ulysses_sequence_parallel_size="sequence_parallel_size"),
    }


def _megatron(verl: str, ours: str) -> dict[str, Row]:
    """Settings of verl's Megatron engine, which `strategy=megatron` reads only."""
    return {
        **_section(verl, ours, "param_offload", "optimizer_offload", "sequence_parallel"),
        **_section(
            verl,
            ours,
            tensor_model_parallel_size="tensor_parallel_size",
            pipeline_model_parallel_size="pipeline_parallel_size",
            virtual_pipeline_model_parallel_size="virtual_pipeline_parallel_size",
            context_parallel_size="context_parallel_size",
            expert_model_parallel_size="expert_parallel_size",
            expert_tensor_parallel_size="expert_tensor_parallel_size",
            use_distributed_optimizer="distributed_optimizer",
        ),
        **_section(verl, ours, "dtype", convert=DTYPE),
    }


def _model(verl: str, ours: str) -> dict[str, Row]:
    return {
        **_section(verl, ours, "path", "tokenizer_path", convert=hub_model),
        **_section(verl, ours, "trust_remote_code", "use_shm"),
        **_section(f"{verl}.override_config", ours, "attn_implementation"),
        **_section(verl, ours, enable_gradient_checkpointing="gradient_checkpointing"),
        **_section(verl, f"{ours}.lora", convert=positive, lora_rank="rank"),
        **_section(verl, f"{ours}.lora", lora_alpha="alpha", lora_adapter_path="path"),
        **_section(verl, f"{ours}.lora", "target_modules", "exclude_modules", convert=layers),
    }


_BOTH = {"max_num_seqs": "micro_batch_size", "free_cache_engine": "take_turns"}
ENGINES: dict[str, dict[str, str]] = {
    "vllm": {
        "engine_kwargs.vllm": "options.engine_args",
        "tensor_model_parallel_size": "options.tensor_parallel_size",
        "max_num_batched_tokens": "options.engine_args.max_num_batched_tokens",
        **{name: f"options.{name}" for name in (
            "gpu_memory_utilization", "max_model_len", "enforce_eager", "enable_prefix_caching")},
        **_BOTH,
    },
    "sglang": {
        "engine_kwargs.sglang": "options.server_args",
        "tensor_model_parallel_size": "options.tensor_parallel",
        "gpu_memory_utilization": "options.server_args.mem_fraction_static",
        "enforce_eager": "options.server_args.disable_cuda_graph",
        **_BOTH,
    },
}  # fmt: skip
"""Rollout engine → setting of verl's section `rollout` → key of our section."""


def _engine_rows(table: Mapping[str, Row], values: Mapping[str, object]) -> dict[str, Row]:
    """Return the rows of the rollout engine that `rollout.name` chooses."""
    rows: dict[str, Row] = {}
    for section in (_ROLLOUT, "rollout"):
        if f"{section}.name" not in table:
            continue
        found: object = values
        for part in (*section.split("."), "name"):
            found = found.get(part) if isinstance(found, Mapping) else None
        for name, key in ENGINES.get(str(found), {}).items():
            convert = {"enforce_eager": EAGER}.get(name, same)
            convert = engine_arguments if name.startswith("engine_kwargs") else convert
            if section == _ROLLOUT or key != "take_turns":  # generation alone has no turns
                rows[f"{section}.{name}"] = to(f"{section}.{key}", convert=convert)
    return rows


def _overlong(verl: str) -> dict[str, Row]:
    return _section(verl, "algorithm.overlong", "enable", "penalty_factor", len="buffer_length")


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_REF, _ALGORITHM = "actor_rollout_ref.ref", "algorithm"
_LOSS = f"{_ACTOR}.policy_loss"
_VALIDATION = f"{_ROLLOUT}.val_kwargs"
_FILTER, _CORRECTION = f"{_ALGORITHM}.filter_groups", f"{_ALGORITHM}.rollout_correction"

_REWARD = "reward_model"
_BUFFER = "reward_kwargs.overlong_buffer_cfg"

_TRAINER = {
    **_section("trainer", "trainer", "nnodes", "n_gpus_per_node", "total_epochs"),
    **_section("trainer", "trainer", "total_training_steps", convert=positive),
    **_section("trainer", "trainer", "project_name", "experiment_name", "default_local_dir"),
    "trainer.logger": Row(("trainer.loggers",), trackers, other_loggers),
    **_section("trainer", "trainer", "test_freq", "save_freq", convert=frequency),
    **_section("trainer", "trainer", "resume_mode", convert=RESUME),
    **_section("trainer", "trainer", default_hdfs_dir="remote_dir", resume_from_path="resume_mode"),
    **_section("trainer", "trainer", "device", convert=DEVICE),
    "global_profiler.steps": to("trainer.profile.steps"),
    "global_profiler.tool": to("trainer.profile.tool", convert=named({"torch_memory": "memory"})),
    **_section("ray_kwargs.ray_init", "trainer", "num_cpus"),
    **_section("ray_init", "trainer", "num_cpus"),
}

TRAIN: dict[str, Row] = {
    **_section("data", "data", "train_files", "val_files", convert=files),
    **_section("data", "data", "prompt_key", "image_key", "train_batch_size", "val_batch_size"),
    **_section("data", "data", "max_prompt_length", "max_response_length", "shuffle", "seed"),
    **_section("data", "data", "filter_overlong_prompts"),
    **_section("data", "data", apply_chat_template_kwargs="chat_template_kwargs"),
    **_section("data.custom_cls", "data.dataset", "path", "name"),
    **_section("data", "actor_rollout_ref.model", convert=hub_model, tokenizer="tokenizer_path"),
    **_model("actor_rollout_ref.model", "actor_rollout_ref.model"),
    "actor_rollout_ref.model.torch_dtype": to(
        f"{_ACTOR}.engine.dtype", f"{_REF}.engine.dtype", convert=DTYPE
    ),
    f"{_ACTOR}.freeze_vision_tower": to("actor_rollout_ref.model.freeze", convert=VISION),
    **_optim(f"{_ACTOR}.optim", f"{_ACTOR}.optim"),
    **_section(_ACTOR, f"{_ACTOR}.optim", "grad_clip"),
    # verl's reference policy has the strategy of the actor, unless it is given.
    f"{_ACTOR}.strategy": to(f"{_ACTOR}.engine.name", f"{_REF}.engine.name", convert=STRATEGY),
    **_engine(f"{_ACTOR}.fsdp_config", f"{_ACTOR}.engine"),
    **_megatron(f"{_ACTOR}.megatron", f"{_ACTOR}.engine"),
    f"{_ACTOR}.megatron.override_transformer_config.recompute_granularity": to(
        "actor_rollout_ref.model.gradient_checkpointing", convert=RECOMPUTED
    ),
    **_tokens(_ACTOR, f"{_ACTOR}.engine"),
    **_section(_ACTOR, _ACTOR, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"),
    **_section(_ACTOR, _ACTOR, "shuffle", "loss_agg_mode", "entropy_coeff", "use_kl_loss"),
    **_section(_ACTOR, _ACTOR, "kl_loss_coef", loss_scale_factor="loss_scale_length"),
    **_section(_ACTOR, _ACTOR, "kl_loss_type", convert=KL),
    # `clip_ratio` holds for a side whose own value is null, so the sides come after it.
    f"{_ACTOR}.clip_ratio": to(f"{_LOSS}.clip_ratio_low", f"{_LOSS}.clip_ratio_high"),
    **_section(_ACTOR, _LOSS, "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    **_section(_LOSS, _LOSS, convert=LOSS, loss_mode="name"),
    **_section(_ROLLOUT, _ROLLOUT, "name", "n", update_weights_bucket_megabytes="weight_bucket_mb"),
    **_section(
        f"{_ROLLOUT}.checkpoint_engine",
        _ROLLOUT,
        update_weights_bucket_megabytes="weight_bucket_mb",
    ),
    **_section(_ROLLOUT, _ROLLOUT, enable_rollout_routing_replay="replay_routes"),
    **_section(f"{_ACTOR}.router_replay", _ROLLOUT, convert=ROUTES, mode="replay_routes"),
    **_section(_ROLLOUT, f"{_ROLLOUT}.sampling", "temperature", "top_p"),
    **_section(_ROLLOUT, f"{_ROLLOUT}.sampling", "top_k", convert=ALL_TOKENS),
    # verl ignores end tokens in validation too.
    f"{_ROLLOUT}.ignore_eos": to(
        f"{_ROLLOUT}.sampling.ignore_eos", f"{_ROLLOUT}.val_sampling.ignore_eos"
    ),
    **_section(_ROLLOUT, _ROLLOUT, "dtype", convert=DTYPE),
    **_section(_VALIDATION, _ROLLOUT, n="val_n"),
    **_section(_VALIDATION, f"{_ROLLOUT}.val_sampling", "temperature", "top_p"),
    **_section(_VALIDATION, f"{_ROLLOUT}.val_sampling", "top_k", convert=ALL_TOKENS),
    **_section(_REF, f"{_REF}.engine", convert=STRATEGY, strategy="name"),
    **_engine(f"{_REF}.fsdp_config", f"{_REF}.engine"),
    **_megatron(f"{_REF}.megatron", f"{_REF}.engine"),
    **_section(_REF, f"{_REF}.engine", log_prob_use_dynamic_bsz="use_dynamic_bsz"),
    **_section(_REF, f"{_REF}.engine", log_prob_max_token_len_per_gpu="max_tokens_per_micro_batch"),
    **_section(_REF, f"{_REF}.engine", ulysses_sequence_parallel_size="sequence_parallel_size"),
    **_model("critic.model", "critic.model"),
    **_optim("critic.optim", "critic.optim"),
    **_section("critic", "critic.optim", "grad_clip"),
    **_section("critic", "critic.engine", convert=STRATEGY, strategy="name"),
    **_megatron("critic.megatron", "critic.engine"),
    **_engine("critic.fsdp", "critic.engine"),
    **_engine("critic.model.fsdp_config", "critic.engine"),
    **_tokens("critic", "critic.engine"),
    **_section("critic", "critic", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"),
    **_section("critic", "critic", "ppo_epochs", "cliprange_value", "loss_agg_mode"),
    **_section("trainer", "critic", critic_warmup="warmup_steps"),
    **_section(_ALGORITHM, _ALGORITHM, "adv_estimator", convert=ESTIMATOR),
    **_section(_ALGORITHM, _ALGORITHM, "gamma", "lam", "use_kl_in_reward"),
    **_section(_ALGORITHM, _ALGORITHM, norm_adv_by_std_in_grpo="norm_adv_by_std"),
    **_section(_ALGORITHM, _ALGORITHM, "kl_penalty", convert=KL),
    **_section("algorithm.kl_ctrl", "algorithm.kl_ctrl", "type", "kl_coef", "horizon", "target_kl"),
    **_section(_FILTER, _FILTER, "enable"),
    **_section(_FILTER, _FILTER, "max_num_gen_batches", convert=UNLIMITED),
    **_section(_CORRECTION, _CORRECTION, rollout_is="level", rollout_is_threshold="upper"),
    **_section(_CORRECTION, _CORRECTION, rollout_is_batch_normalize="normalise"),
    **_overlong(f"{_REWARD}.overlong_buffer"),
    **_overlong(f"{_REWARD}.{_BUFFER}"),
    **_overlong(f"reward.{_BUFFER}"),
    **_section("reward.reward_model", _REWARD, "enable"),
    **_section("reward.reward_model", f"{_REWARD}.model", convert=hub_model, model_path="path"),
    **_section(_REWARD, _REWARD, "enable", "micro_batch_size_per_gpu"),
    **_section(f"{_REWARD}.model", f"{_REWARD}.model", "path", convert=hub_model),
    **_section(f"{_REWARD}.model", f"{_REWARD}.model", "trust_remote_code", "use_shm"),
    **_section(_REWARD, f"{_REWARD}.engine", convert=STRATEGY, strategy="name"),
    **_engine(f"{_REWARD}.model.fsdp_config", f"{_REWARD}.engine"),
    **_megatron(f"{_REWARD}.megatron", f"{_REWARD}.engine"),
    **_tokens(_REWARD, f"{_REWARD}.engine"),
    **_section(
        _REWARD, f"{_REWARD}.engine", forward_max_token_len_per_gpu="max_tokens_per_micro_batch"
    ),
    **_section("custom_reward_function", "reward", "path", "name"),
    **_section("reward.custom_reward_function", "reward", "path", "name"),
    **_TRAINER,
    **_section("trainer", "trainer", "val_before_train", "balance_batch"),
    **_section("trainer", "trainer", max_actor_ckpt_to_keep="max_ckpt_to_keep"),
}
"""verl's `ppo_trainer.yaml` → `quadriga train`."""

SFT: dict[str, Row] = {
    **_section("data", "data", "train_files", "val_files", convert=files),
    **_section("data", "data", "prompt_key", "response_key", "train_batch_size", "max_length"),
    **_section("data", "data", "micro_batch_size_per_gpu", "messages_key"),
    **_section("data", "data", apply_chat_template_kwargs="chat_template_kwargs"),
    **_section("data", "engine", "use_dynamic_bsz"),
    **_section("data", "engine", max_token_len_per_gpu="max_tokens_per_micro_batch"),
    **_section("model", "model", convert=hub_model, partial_pretrain="path"),
    **_model("model", "model"),
    **_optim("optim", "optim"),
    **_megatron("engine", "engine"),
    **_engine("engine", "engine"),
    **_engine("model.fsdp_config", "engine"),
    _ENGINE_CLASS: to("engine.name", convert=ENGINE_CLASS),
    **_section("engine", "engine", convert=STRATEGY, strategy="name"),
    "ulysses_sequence_parallel_size": to("engine.sequence_parallel_size"),
    **_TRAINER,
    **_section("trainer", "trainer", "seed", "max_ckpt_to_keep"),
}
"""verl's settings of fine-tuning → `quadriga sft`."""

GENERATE: dict[str, Row] = {
    **_section("model", "model", "path", convert=hub_model),
    "data.path": to("data_files", convert=files),
    "data.train_files": to("data_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.n_samples": to("n"),
    "data.output_path": to("output"),
    "data.batch_size": to("batch_size"),
    **_section("rollout", "sampling", "temperature", "top_p", "top_k", "ignore_eos"),
    "rollout.prompt_length": to("max_prompt_length"),
    "rollout.response_length": to("max_response_length"),
    **_section("rollout", "rollout", "name"),
    **_section("rollout", "rollout", "dtype", convert=DTYPE),
    **_section("trainer", "trainer", "nnodes", "n_gpus_per_node"),
    **_section("trainer", "trainer", "device", convert=DEVICE),
    **_section("ray_kwargs.ray_init", "trainer", "num_cpus"),
}
"""verl's settings of generation → `quadriga generate`."""

EVAL: dict[str, Row] = {
    "data.path": to("response_files", convert=files),
    "data.prompt_key": to("prompt_key"),
    "data.response_key": to("response_key"),
    "data.data_source_key": to(convert=only("data_source")),  # these columns have fixed names
    "data.reward_model_key": to(convert=only("reward_model")),
    **_section("custom_reward_function", "reward", "path", "name"),
}
"""verl's settings of an evaluation → `quadriga eval`."""
