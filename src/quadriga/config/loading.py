"""Load settings: defaults, a YAML file, dotted overrides → one frozen object. Write them as YAML.

Overrides have Hydra's grammar (`data.train_files=[a,b] algorithm.options.k=4 data.seed=null`), and
`${trainer.project_name}` stands for the value of another setting. Only the parser of Hydra is used:
it makes no run folder, does not change the working directory and does not set up logging.

Texts are read in bounded time and memory. A few lines of YAML can stand for gigabytes: each line of
`b: [*a, *a]` doubles what an alias stands for, and each `${a}${a}` what an interpolation stands
for. Nested brackets can exhaust the stack. The size of what a text stands for is therefore
calculated before anything is expanded.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config import convert
from quadriga.config.paths import Dataclass, local_path
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.config.secrets import is_secret_name, mask_secrets, mask_values, remember_secret
from quadriga.errors import ConfigError, UnknownSettingError

T = TypeVar("T", bound=Dataclass)
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

MAX_FILE = 1 << 20  # bytes of a settings file
MAX_TEXT = 1 << 16  # bytes of one override
MAX_COMMAS = 4000  # of one override; the time to parse it grows with the square of its values
MAX_VALUES = 20_000  # values of a settings file, with aliases expanded
MAX_DEPTH = 32  # nested lists and mappings
MAX_INTERPOLATED = 200  # texts with interpolations
MAX_RESOLVED = 1 << 20  # characters of all interpolated texts together, resolved

MAX_NESTED = 4  # interpolations inside one another

# What stands in an interpolation without another one in it, also a mapping: `oc.select:a,{}`.
_PLAIN = r"((?:[^${}]|\{[^${}]*\})*)"
_INNERMOST = re.compile(rf"\$\{{{_PLAIN}\}}")
# An interpolation as a whole argument after the first one: the default of `${oc.select:a,${b}}`.
_ARGUMENT = re.compile(rf",[ ]?\$\{{{_PLAIN}\}}(?=[,}}])")
_NAME = re.compile(r"[\w.-]+")


def load_config(cls: type[T], overrides: Iterable[str] = (), file: str | Path | None = None) -> T:
    """Return the settings of `cls`: defaults, then `file` (YAML), then `overrides`; the last wins.

    Raises:
        UnknownSettingError: a key does not exist; the message names the nearest one.
        ConfigError: a value is of the wrong type, or an override or the file cannot be read.
    """
    tree = _given(cls, overrides, file)
    given = plain_dict(tree)
    config = convert.build(cls, _resolve(cls, tree, given))
    remember_given(config, given)
    return config


def given_user_files(overrides: Iterable[str], file: str | Path | None = None) -> list[str]:
    """Return `algorithm.user_files` as a file and overrides give it; [] if they do not.

    These files can add sections of settings, so keys that do not exist are left to `load_config`,
    which is called when all sections are known.

    Raises:
        ConfigError: the setting is no list of texts, or an override or the file cannot be read.
    """
    tree = _given(TrainConfig, overrides, file, all_known=False)
    section = plain_dict(tree).get("algorithm")
    if not isinstance(section, dict) or "user_files" not in section:
        return []
    files = section["user_files"]
    if "${" in str(files):
        files = _resolved_at(TrainConfig, tree, "algorithm.user_files")
    return convert.build(TrainConfig, {"algorithm": {"user_files": files}}).algorithm.user_files


def given_trainer(
    cls: type[Dataclass], overrides: Iterable[str], file: str | Path | None = None
) -> RunConfig:
    """Return the section `trainer` of a command that trains, whatever sections files of the user
    may add. Raises `ConfigError` as `load_config` does."""
    tree = _given(cls, overrides, file, all_known=False)
    values = _resolved_at(cls, tree, "trainer")
    return cast(RunConfig, vars(convert.build(cls, {"trainer": values}))["trainer"])


def _resolved_at(cls: type[Dataclass], tree: DictConfig, key: str) -> Plain:
    """Return a value or a section. Of the others only those that it refers to are resolved."""
    check_interpolations(plain_dict(tree))
    with _resolving(cls):
        return _selected(_with_defaults(cls, tree), key)


def _selected(tree: DictConfig, key: str) -> Plain:
    found = OmegaConf.select(tree, key)
    if OmegaConf.is_config(found):
        found = OmegaConf.to_container(found, resolve=True)
    return cast(Plain, found)


def _given(
    cls: type[Dataclass],
    overrides: Iterable[str],
    file: str | Path | None,
    *,
    all_known: bool = True,
) -> DictConfig:
    """Return the values of a file and of overrides. `all_known`: each key must be a setting."""
    values = {} if file is None else read_settings_file(Path(local_path(file, "--config")))
    if all_known and "${" not in str(values):
        # The file is built by itself first, so that the message of an error in it begins with its
        # name. A `${…}` in it may refer to an override, so it is checked only at the end.
        convert.build(cls, values, f"{file}: ")
    tree = OmegaConf.create(values)
    parser = OverridesParser.create()
    for text in overrides:
        try:
            _apply(tree, cls, *_parse(parser, cls, text))
        except UnknownSettingError:
            if all_known:
                raise
    return tree


def plain_dict(tree: object, *, resolve: bool = False) -> dict[str, Plain]:
    """Return a node of OmegaConf as plain values. `resolve`: with each `${…}` resolved."""
    plain = OmegaConf.to_container(tree, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _parse(parser: OverridesParser, cls: type, text: str) -> tuple[str, object]:
    """Parse one override into a key and a value.

    Hydra's grammar decides on the type of a value without knowing the setting, so a setting that
    holds text keeps the raw text unless Hydra read a text, null or a list:

        override                Hydra reads       value of the setting
        data.seed=7             7                 7
        prompt=7                7                 "7"
        prompt=1e-3             0.001             "1e-3"
        prompt=a, b             two sweep values  "a, b"
        prompt=it's 4           a syntax error    "it's 4"
        prompt='a b'            "a b"             "a b"  (quotes removed)
        prompt=null             None              None
        data.val_files=~/a      a syntax error    "~/a"
    """
    key, sign, raw = text.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not key or text.startswith("~"):
        raise ConfigError(f"expected key=value, got {convert.cut(repr(text))}", key=key)
    check_override(text, convert.cut(key))
    is_text = convert.holds_text(convert.type_of_key(cls, key))
    try:
        parsed = parser.parse_override(text)
        if parsed.is_sweep_override():
            raise HydraException(f"a run takes one value, not several; write a list as [{raw}]")
        value = parsed.value()
    except (HydraException, RecursionError, ValueError) as error:
        if is_text or raw.startswith("~"):  # one path of a list needs no quotes either
            return key, raw
        if is_secret_name(key.rpartition(".")[2]):
            raise ConfigError(f"cannot read the value of {key}; quote it", key=key) from None
        reason = mask_secrets(str(error).splitlines()[0])
        hint = "; quote a path with ~ in a list: ['~/a.parquet']" if "~" in raw else ""
        raise ConfigError(
            f"cannot read the value of {convert.cut(repr(text))}: {convert.cut(reason)}{hint}",
            key=key,
        ) from None
    if is_text and not isinstance(value, str | None | list):
        return key, raw
    return key, value


def _apply(tree: DictConfig, cls: type, key: str, value: object) -> None:
    """Set one key in the tree of values that are given so far.

    A mapping is merged into a section (`sampling={top_p: 0.9}` leaves `sampling.temperature`), but
    it replaces a setting that holds free-form options.
    """
    kind = convert.type_of_key(cls, key)
    if value is None and convert.is_settings(kind):
        raise ConfigError(f"{key} is a section of settings and cannot be null", key=key)
    merge = isinstance(value, dict) and not convert.is_free_form(kind)
    try:
        OmegaConf.update(tree, key, value, merge=merge, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot set {key}: {str(error).splitlines()[0]}", key=key) from None


def _resolve(cls: type[Dataclass], tree: DictConfig, given: dict[str, Plain]) -> dict[str, Plain]:
    """Return the given values with each `${key}` replaced by its value.

    `${key}` may refer to a setting that is not given, so the defaults are merged in before values
    are resolved. Without a `${…}` this merge is skipped: only given values need to be checked.
    """
    if "${" not in str(given):
        return given
    check_interpolations(given)
    with _resolving(cls):
        return plain_dict(_with_defaults(cls, tree), resolve=True)


def _with_defaults(cls: type[Dataclass], tree: DictConfig) -> DictConfig:
    merged = OmegaConf.merge(OmegaConf.create(_values_of(cls())), tree)
    assert isinstance(merged, DictConfig)
    return merged


@contextmanager
def _resolving(cls: type) -> Iterator[None]:
    """Raise `ConfigError` for an interpolation that cannot be resolved."""
    try:
        yield
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        missing = re.search(r"Interpolation key '([^']+)'", reason)
        if missing:
            where = f"cannot resolve ${{{missing[1]}}}: "
            raise convert.unknown_setting(cls, missing[1], where) from None
        key = str(error.full_key or "")
        raise ConfigError(f"cannot resolve a setting: {reason}", key=key) from None
    except RecursionError:
        raise ConfigError("cannot resolve a setting: it refers to itself") from None


def read_settings_file(path: Path) -> dict[str, Plain]:
    """Return the values of a YAML file, with interpolations unresolved.

    Raises `ConfigError` if the file cannot be read, is no mapping, or exceeds a limit.
    """
    try:
        values = copy.deepcopy(_values_of_text(_text_of(path)))
    except FileNotFoundError:
        raise ConfigError(f"no settings file {path}", key="--config") from None
    except RecursionError:
        raise _unreadable(path, "its values are nested too deeply") from None
    # ValueError: a number of more digits than Python converts, or bytes that are no UTF-8.
    # TypeError: a mapping or a list as a key.
    except (OSError, ValueError, TypeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise _unreadable(path, " ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` settings, got a list", key="--config")
    return {str(key): value for key, value in values.items()}


@functools.lru_cache(maxsize=4)
def _values_of_text(text: str) -> object:
    """Return the values of a text in YAML. To plan a run, its file is read for each candidate."""
    _check_structure(text)
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def check_override(text: str, key: str) -> None:
    """Raise `ConfigError` for an override that is too long or nested too deeply to be parsed."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{key!a}: an override must be text in UTF-8", key=key) from None
    counted = {"characters": (len(text), MAX_TEXT), "commas": (text.count(","), MAX_COMMAS)}
    for what, (found, most) in counted.items():
        if found > most:
            raise ConfigError(
                f"{key}: an override may have {most} {what}, got {found}; write long values into a "
                "file and pass it with --config",
                key=key,
            )
    depth = 0
    deepest = text.partition("=")[0].count(".")
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ConfigError(f"{key}: nested {deepest} levels deep; {MAX_DEPTH} are allowed", key=key)


def check_interpolations(values: Mapping[str, Plain]) -> None:
    """Raise `ConfigError` if the interpolations of some values stand for too much text.

    The size of a text is its length, and for an interpolated one that of the texts it refers to:

        a: "0123456789"       10
        b: "${a}${a}"         8 + 2 × 10 = 28
        c: "${b}${b}"         8 + 2 × 28 = 64, and so on: it doubles with each line

    A name refers to every key that ends with it, because it may be relative to a section. This can
    count too much, never too little. An interpolation may be the default of another one, but no
    part of a name, because the text that such a name refers to is not known yet.
    """
    texts = {key: text for key, text in _texts(values, "") if "${" in text}
    if len(texts) > MAX_INTERPOLATED:
        raise ConfigError(f"{len(texts)} values have interpolations; {MAX_INTERPOLATED} may")
    # Characters of the plain texts below each part of a key.
    plain: Counter[str] = Counter()
    for key, text in _texts(values, ""):
        plain.update(dict.fromkeys(key.split("."), 0 if key in texts else len(text)))
    sizes: dict[str, int] = {}
    inner_texts = {key: _inner_texts(key, text) for key, text in texts.items()}

    def size(key: str) -> int:
        if key not in sizes:
            sizes[key] = 0  # a circle: resolving it is an error of its own
            names = [name for inner in inner_texts[key] for name in _NAME.findall(inner)]
            found = sum(plain[name.rpartition(".")[2]] for name in names)
            found += sum(size(other) for name in names for other in texts if _refers(name, other))
            sizes[key] = min(len(texts[key]) + found, MAX_RESOLVED + 1)
        return sizes[key]

    for key in texts:
        if size(key) > MAX_RESOLVED:
            raise ConfigError(
                f"{key}: its interpolations stand for more than {MAX_RESOLVED} characters", key=key
            )


def _inner_texts(key: str, text: str) -> list[str]:
    """Return what stands in the interpolations of a text.

        ${oc.select:a.b,${oc.select:c,null}}     oc.select:c,null and oc.select:a.b,

    Raises `ConfigError` for an interpolation that is not closed or is part of a name.
    """
    found: list[str] = []
    for _ in range(MAX_NESTED):
        if not (arguments := _ARGUMENT.findall(text)):
            break
        found += arguments
        text = _ARGUMENT.sub(",", text)
    found += _INNERMOST.findall(text)
    if "${" in _INNERMOST.sub("", text):
        raise ConfigError(
            f"{key}: an interpolation that is not closed, or inside another one; only the default "
            "of oc.select and oc.env may be an interpolation",
            key=key,
        )
    return found


def _refers(name: str, key: str) -> bool:
    """Return whether a name in an interpolation may mean a key, or a section around it."""
    name = name.strip(".")
    return bool(name) and f".{name}." in f".{key}."


def _texts(value: Plain | Mapping[str, Plain], key: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text in nested values."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{key}.{number}")


def _text_of(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OSError(f"it is larger than {MAX_FILE} bytes")
    text = data.decode("utf-8")
    # Parsing an interpolation takes a millisecond; the exact number is checked after loading.
    if text.count("${") > 5 * MAX_INTERPOLATED:
        raise OSError(f"it has {text.count('${')} interpolations; {MAX_INTERPOLATED} are allowed")
    return text


def _check_structure(text: str) -> None:
    """Raise `YAMLError` if the values are nested too deeply, or too many with aliases expanded.

    They are counted event by event, so neither the depth of the text nor its aliases cost memory.
    An anchor has the size of the values below it, and an alias the size of its anchor:

        a: &a [1, 2]      &a = 3 (a list and two numbers)
        b: &b [*a, *a]    &b = 1 + 3 + 3 = 7
        c: [*b, *b]       1 + 7 + 7 = 15
    """
    total = 0
    sizes: dict[str, int] = {}
    unfinished: list[tuple[str, int]] = []  # anchor, and the total before the node
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        name = getattr(event, "anchor", None) or ""
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == name for anchor, _ in unfinished):
                raise yaml.YAMLError(f"the alias *{name} is inside the value it stands for")
            total += sizes.get(name, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            unfinished.append((name, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = unfinished.pop()
            sizes[anchor] = total - before
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            sizes[name] = 1
        if len(unfinished) > MAX_DEPTH:
            raise yaml.YAMLError(f"values are nested more than {MAX_DEPTH} deep")
        if total > MAX_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MAX_VALUES} values")


def _unreadable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot read settings file {path}: {reason}", key="--config")


# Writing: as plain values and as YAML, without secrets. A value that was given as `${oc.env:NAME}`
# or `${key}` is written as this text, and not as what it was resolved to. A settings object holds
# values only, so `remember_given` keeps the texts per key.

# Dotted key → (value, the text that it was resolved from). Not an attribute of the settings object,
# which `dataclasses.replace` would lose.
_interpolated: dict[str, list[tuple[Plain, Plain]]] = {}
_REMEMBERED = 16  # interpolations of one key that are kept, those of the latest loads


def to_yaml(config: Dataclass) -> str:
    """Return `written_settings` as YAML.

    `load_config(type(config), file=…)` reads it back and returns an equal object in the same
    environment, except for the masked values.
    """
    return OmegaConf.to_yaml(OmegaConf.create(written_settings(config)))


def written_settings(config: Dataclass) -> dict[str, Plain]:
    """Return all settings, with secrets masked and interpolations unresolved."""
    values = _values_of(config)
    # A `${` of a text is no interpolation.
    plain = convert.with_texts(mask_values(values), lambda text: text.replace("${", "\\${"))
    written: dict[str, Plain] = copy.deepcopy(plain)
    for key, pairs in _interpolated.items():
        for value, text in pairs:
            if _at(values, key) == value and _gives(value, text, plain, key):
                section, _, name = key.rpartition(".")
                settings = _at(written, section) if section else written
                assert isinstance(settings, dict)  # it holds `value`
                settings[name] = text
    return written


def shown_settings(config: Dataclass) -> dict[str, Plain]:
    """Return dotted key → value of every setting, with secrets masked."""
    return dict(setting_leaves(mask_values(_values_of(config))))


def _gives(value: Plain, text: Plain, written: dict[str, Plain], key: str) -> bool:
    """Return whether `text` in place of the value at `key` is read as `value` again.

    Other settings of this process may have had the same value from `${other.key}`, which is another
    value here. A text with a resolver such as `${oc.env:NAME}` is always written: its variable may
    be gone, and the value may be a secret.
    """
    if "${oc." in str(text):
        return True
    settings = OmegaConf.create(written)
    OmegaConf.update(settings, key, text)
    try:
        return _selected(settings, key) == value
    except OmegaConfBaseException:
        return False


def remember_given(config: Dataclass, given: Mapping[str, Plain]) -> None:
    """Remember the interpolations of the given values, and the values of secret settings."""
    values = _values_of(config)
    for key, value in setting_leaves(values):
        if isinstance(value, str | int) and is_secret_name(key.rpartition(".")[2]):
            remember_secret(str(value))
    for key, text in setting_leaves(dict(given)):
        value = _at(values, key)
        if "${" in str(text) and value is not None:
            pairs = _interpolated.setdefault(key, [])
            pairs.append((value, text))
            del pairs[:-_REMEMBERED]


def _values_of(config: Dataclass) -> dict[str, Plain]:
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def _plain(value: object) -> Plain:
    """Return a value with tuples as lists, the keys of mappings as texts, and other values as text.

    Options that were set in Python can hold any object.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def setting_leaves(value: Plain, key: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield (dotted key, value) for each setting of nested mappings; `key`: of `value` itself."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from setting_leaves(item, f"{key}.{name}" if key else str(name))


def _at(values: Plain, key: str) -> Plain:
    """Return the value at a dotted key, or None."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
