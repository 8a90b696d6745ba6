"""Which code of the user the settings name, and whether a command may run it.

A settings file can be from somebody else. Commands that only show something run no code that it
names, unless `--allow-code` or a person at the terminal allows it. Commands that train or generate
check what they can without the code first, and say whose code they run.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.convert import leaves
from quadriga.config.paths import Dataclass
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import shown
from quadriga.containment import without_code
from quadriga.errors import InputError, UnknownSettingError
from quadriga.observability.callbacks import callback_file

_FILES = ("reward.path", "agent.path", "data.dataset.path", "data.sampler.path")


def code_in(config: Dataclass) -> list[str]:
    """Return the files, programs and folders whose code a command with these settings runs."""
    return list(dict.fromkeys(str(found) for found in _named(dict(leaves(config))) if found))


def _named(values: Mapping[str, object]) -> Iterator[object]:
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if name == "user_files" and isinstance(value, list):
            yield from value
        elif key in _FILES:
            yield value
        elif name == "callbacks" and isinstance(value, list):
            yield from map(callback_file, value)
        elif key == "reward.parts" and isinstance(value, Mapping):
            yield from (part.get("path") for part in value.values() if isinstance(part, Mapping))
        elif name == "options" and isinstance(value, Mapping):
            yield value.get("python")
        elif name == "trust_remote_code" and value:
            yield values[f"{section}.path"]


def described(code: list[str]) -> str:
    """Return the files with their sizes and the beginnings of their SHA-256."""
    return ", ".join(_file(Path(path)) if path.endswith(".py") else path for path in code)


def _file(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError:  # the checks of the command name it
        return str(path)
    digest = hashlib.sha256(content).hexdigest()[:12]
    return f"{path.absolute()} ({len(content)} bytes, sha256 {digest})"


def may_run(code: list[str], command: str) -> bool:
    """Ask a person at the terminal, or say that the code is not run and return False."""
    told = shown(f"{command} would run the code of {described(code)}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print(f"{told}; --allow-code allows it", file=sys.stderr)
        return False
    print(f"{told}. Run it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@dataclass(frozen=True)
class Settings:
    """Settings that were read before code of the user has run.

    Attributes:
        config: None if `error` says that a section is missing, which a file of `code` may add.
        code: what they name (`code_in`).
    """

    config: Dataclass | None
    code: list[str]
    error: UnknownSettingError | None = None

    @classmethod
    def read(cls, load: Callable[[], Dataclass], user_files: Callable[[], list[str]]) -> Settings:
        """Read them. `user_files`: returns the files that can add sections."""
        with without_code():
            try:
                config = load()
            except UnknownSettingError as error:
                section = str(getattr(error, "key", "")).partition(".")[0]
                sections = {field.name for field in fields(TrainConfig)} - {"placement"}
                if section in sections or not (files := user_files()):
                    raise
                return cls(None, files, error)
        return cls(config, code_in(config))

    @contextmanager
    def without_code(self) -> Iterator[Dataclass]:
        """Run no code within the block, and say so in its refusals."""
        try:
            if self.config is None:
                raise self.error or AssertionError("settings without a config")
            with without_code():
                yield self.config
        except InputError as error:
            told = f"{error}; the code of {', '.join(self.code)} was not run: see --allow-code"
            error.args = (told,)
            raise

    def announce(self, command: str) -> None:
        """Run the checks that need no code, then say whose code the command runs.

        Files of the user can register names, and only its own code reads some model folders: the
        settings of such a run are checked when the code has run.

        Raises:
            InputError: the command is refused, and no code has run.
        """
        from quadriga.trainer import preflight

        config = self.config
        if isinstance(config, TrainConfig | SFTConfig | RMConfig):
            registers = any(
                value and key.endswith((".user_files", ".trust_remote_code"))
                for key, value in leaves(config)
            )
            logging.disable(logging.WARNING)  # the checks of the run repeat these ones
            with ExitStack() as stack:
                stack.callback(logging.disable, logging.NOTSET)
                stack.enter_context(without_code())
                if registers:
                    preflight.check_run_folder(config)
                elif isinstance(config, TrainConfig):
                    preflight.check_train_config(config)
                else:
                    preflight.check_fine_tuning_config(config)
        print(shown(f"{command} runs the code of {described(self.code)}"), file=sys.stderr)
