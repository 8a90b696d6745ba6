"""`quadriga <command> [key=value …]`: the table of commands, and what runs one and reports errors.

Exit codes: 0 success; 1 the run failed, or code of the user has ended it; 2 the input was wrong, or
the disk is full (the message is one line); 75 a process, a node or an object of the run was lost,
and the same command can go on (`LOST`); 130 stopped by Ctrl-C, 143 by SIGTERM. A command imports
what it needs, such as torch and Ray, when it runs.
"""

import argparse
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from quadriga import __version__
from quadriga.config.commands import (
    AlgorithmsConfig,
    ArithmeticDataConfig,
    DemoConfig,
    EvalConfig,
    GenerateConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.paths import Dataclass
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import shown
from quadriga.containment import ExitGuard, open_output
from quadriga.errors import ConfigError, InputError, QuadrigaError, nearest_name
from quadriga.files import refusal_in
from quadriga.lazy import imported
from quadriga.observability.quiet import silence_libraries

MAX_LINE = 2000  # characters of the one line for wrong input
LOST = 75  # EX_TEMPFAIL of sysexits.h
_RESUMED = ("train", "sft", "rm")  # commands whose runs can be resumed
_TRAINER, _SHOW = "quadriga.trainer", "quadriga.cli.show"


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: one or two words.
        target: "module:function" that is called with the settings.
        settings: their class; None for a command without settings.
        variants: first word after the name → the settings that follow in place of `settings`.
    """

    name: str
    summary: str
    target: str
    settings: type[Dataclass] | None = None
    variants: Mapping[str, type[Dataclass]] = field(default_factory=dict)


PLANNED: dict[str, type[Dataclass]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "generate": GenerateConfig,
}
"""The word after `plan` → the settings that follow."""

COMMANDS = (
    Command("train", "Train a model with reinforcement learning",
            f"{_TRAINER}.main:run_training", TrainConfig),
    Command("sft", "Fine-tune a model on reference answers",
            f"{_TRAINER}.fine_tuning:run_sft", SFTConfig),
    Command("rm", "Train a reward model on pairs of responses",
            f"{_TRAINER}.fine_tuning:run_rm", RMConfig),
    Command("generate", "Generate responses to a prompt or to files of prompts",
            f"{_SHOW}:show_generation", GenerateConfig),
    Command("eval", "Generate or read responses to files of prompts, and score them",
            f"{_SHOW}:show_evaluation", EvalConfig),
    Command("data make", "Make arithmetic problems, and optionally a tiny model",
            "quadriga.cli.make_data:run_make_data", ArithmeticDataConfig),
    Command("plan", "Show batches and memory of a run: plan, plan sft, plan rm, plan generate",
            f"{_SHOW}:show_plan", TrainConfig, PLANNED),
    Command("report", "Write what runs have recorded to one HTML page",
            f"{_SHOW}:show_report"),
    Command("settings", "Search the settings of all commands by name and meaning",
            f"{_SHOW}:show_settings"),
    Command("algorithms", "Show estimators, losses and their settings",
            f"{_SHOW}:show_algorithms", AlgorithmsConfig),
    Command("doctor", "Show installed packages and the resources of this machine",
            f"{_SHOW}:show_doctor"),
    Command("demo", "Make data and a tiny model, and train it",
            "quadriga.cli.demo:run_demo", DemoConfig),
)  # fmt: skip


class Invocation(argparse.Namespace):
    """A parsed command line. `verl`: a settings file of verl; the overrides are verl's then.
    `measured`: the run whose times `plan` uses; `trace`: the file for its timeline. `allow_code`: a
    command that only shows something may run code that the settings name. `runs`: the folders that
    `report` reads; `output`: the file that it writes. `search`: the words for `settings`."""

    command: Command
    overrides: Sequence[str] = ()
    file: str | None = None
    print_config: bool = False
    verl: str | None = None
    measured: str | None = None
    allow_code: bool = False
    search: Sequence[str] = ()
    supervise: bool = False
    trace: Path | None = None
    runs: Sequence[Path] = ()
    output: Path | None = None

    @property
    def words(self) -> list[str]:
        """The command line without `--supervise`."""
        files = (("--config", self.file), ("--verl", self.verl))
        options = [word for name, path in files if path is not None for word in (name, path)]
        return [*self.command.name.split(), *self.overrides, *options]

    def run(self) -> None:
        """Load the settings and call the function of the command, or only print them."""
        if self.command.settings is None:
            given = (self.runs, self.output) if self.runs else self.search
            imported(self.command.target)(*given)
            return
        if self.measured is not None:
            imported("quadriga.cli.async_plan:show_async_plan")(Path(self.measured), self.trace)
            return
        from quadriga.cli.own_code import Settings, may_run
        from quadriga.config.loading import given_user_files, to_yaml

        def call(config: Dataclass) -> None:
            if self.print_config:
                if name == "train":  # with what the user's files add
                    imported(f"{_TRAINER}.checks.settings:check_train_settings")(config)
                print(to_yaml(config), end="")
            else:
                imported(self.command.target)(config)

        load, name = self.load, self.command.name
        settings = Settings.read(
            load, partial(given_user_files, self.overrides, self.file) if not self.verl else list
        )
        shows = self.print_config or name == "plan"
        imported(f"{_TRAINER}.checks.early:check_early")(settings.config, complete=not shows)
        told = f"{name} --print-config" if self.print_config else name
        if shows and settings.code and not self.allow_code and not may_run(settings.code, told):
            with settings.without_code() as config:
                call(config)
            return
        if settings.code and not shows and name != "algorithms":  # which only shows that code
            settings.announce(name)
        # Files of the user can add sections; a settings file of verl has none of them.
        whole = None if self.verl is None and settings.code else settings.config
        call(whole or load())

    def load(self) -> Dataclass:
        """Return the settings of a command line; those of a training run with the sections of
        roles that the user's files add."""
        settings, overrides = self.command.settings, self.overrides
        assert settings is not None
        if overrides and overrides[0] in self.command.variants:
            settings, overrides = self.command.variants[overrides[0]], overrides[1:]
        if self.verl is not None:
            from quadriga.compat.verl_settings import TRAIN, read_verl

            if self.file is not None:
                raise ConfigError("--verl and --config: two files; pass one", key="--verl")
            translation = read_verl(settings, TRAIN, self.verl, overrides)
            print(translation.report(), file=sys.stderr)
            return translation.config
        if settings is TrainConfig:
            from quadriga.trainer.roles.registry import load_train_config

            return load_train_config(overrides, self.file)
        from quadriga.config.loading import load_config

        return load_config(settings, overrides, self.file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` None: those of the process."""
    silence_libraries()
    open_output()
    guard = ExitGuard()
    guard.install()
    try:
        guard.code = _run(sys.argv[1:] if arguments is None else list(arguments))
    finally:
        # What runs at the exit of the process must not change the exit code either.
        if arguments is not None:
            guard.remove()
    return guard.code


def _run(arguments: Sequence[str]) -> int:
    invocation: Invocation | None = None
    try:
        invocation = parse(arguments)
        if invocation.supervise and not invocation.print_config:
            return int(imported("quadriga.cli.supervise:supervise")(invocation))
        with _stopped_by_sigterm():
            invocation.run()
        open_output()
        sys.stdout.flush()
    except InputError as error:
        return _report(f"error: {_one_line(error)}", 2)
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if signal.SIGTERM in error.args else signal.SIGINT
        resumes = invocation is not None and invocation.command.name in _RESUMED
        how = "; the same command continues with trainer.resume_mode=auto" if resumes else ""
        return _report(f"stopped{how}", 128 + number)
    except SystemExit as error:
        if invocation is None:  # help was asked for, or the command line is not valid
            raise
        # The system keeps the lowest 8 bits: 256 would become 0.
        code = error.code if isinstance(error.code, int) and error.code & 0xFF else 1
        return _report(f"error: the command ended early, by sys.exit({error.code!r})", code)
    except MemoryError:
        return _report("error: this machine has not enough memory for the run", 1)
    except Exception as error:
        if (failed := _failed(error, invocation)) is None:
            raise
        return failed
    return 0


def _failed(error: Exception, invocation: Invocation | None) -> int | None:
    """Report an error of a run, and return the exit code; None: the traceback is to be shown."""
    if (refused := refusal_in(error)) is not None:
        return _report(f"error: {_one_line(refused)}", 2)
    if isinstance(error, QuadrigaError):
        losses = imported("quadriga.trainer.restarts:LOSSES")  # imports torch
        lost = isinstance(getattr(error, "cause", None) or error, losses)
        return _report(_one_screen(error), LOST if lost else 1)
    # A connection that code of the user has opened raises `BrokenPipeError`, too.
    if isinstance(error, BrokenPipeError) and _output_has_no_reader():
        return _end_without_reader(invocation)
    trace = "".join(traceback.format_exception(error)).rstrip()
    return None if shown(trace) == trace else _report(trace, 1)


def _output_has_no_reader() -> bool:
    """Return whether the reader of standard output has exited, as in `… | head`."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # 0: the events to report are errors only
    except (OSError, ValueError):  # it is closed, or no file
        return False
    return bool(poll.poll(0))


def _end_without_reader(invocation: Invocation | None) -> int:
    """Return the exit code of a command that could not print its output."""
    # Python flushes standard output once more at exit; without a valid target it would report the
    # error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # A command of `show` has done everything else before it prints.
    if invocation is None or invocation.print_config or invocation.command.target.startswith(_SHOW):
        return 0
    problem = "the command ended early, because the reader of standard output has exited"
    return _report(f"error: {problem}; write the output to a file", 1)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C, so that what was started in it is stopped."""

    def stop(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse(arguments: Sequence[str]) -> Invocation:
    """Return the parsed command line. Exits with code 2 if it is not valid."""
    parser = _parser()
    _check_command(parser, arguments)
    # argparse ends the list of overrides at the first option, so overrides after an option
    # (`train --print-config data.seed=1`) are returned as unknown arguments.
    known, rest = parser.parse_known_args(arguments, Invocation())
    options = [text for text in rest if text.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}; write settings as key=value")
    if rest and known.command.settings is None:
        parser.error(f"{known.command.name} has no settings, got {rest[0]}")
    measured, known.overrides = known.measured, (*known.overrides, *rest)
    given = known.overrides or known.file or known.verl or known.print_config
    if measured is not None and given:
        parser.error(f"plan --async {measured} takes all settings from this run, and no others")
    if known.allow_code and not (known.print_config or known.command.name == "plan"):
        parser.error(f"--allow-code: {known.command.name} runs the code that its settings name")
    if known.trace and measured is None:
        parser.error(f"plan --trace {known.trace} needs --async RUN, whose timeline it writes")
    return known


def _check_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Exit with code 2 and the nearest name if the first word is not a command."""
    names = list(dict.fromkeys(command.name.split()[0] for command in COMMANDS))
    word = next((text for text in arguments if not text.startswith("-")), names[0])
    if word not in names:
        near = nearest_name(word, names)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(names)}"
        parser.error(f"no command {word!r}; {hint}")


class _Parser(argparse.ArgumentParser):
    """Adds the settings of its command to the help; they are collected only for `--help`."""

    command: Command | None = None

    def format_help(self) -> str:
        text = super().format_help()
        if self.command is None or self.command.settings is None:
            return text
        from quadriga.config.convert import help_text

        return f"{text}\nsettings and their defaults:\n{help_text(self.command.settings())}"


def _parser() -> _Parser:
    text = "Reinforcement-learning post-training for large language models."
    parser = _Parser(prog="quadriga", description=text)
    parser.add_argument("--version", action="version", version=f"quadriga {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        parent = commands
        *group, name = command.name.split()
        for word in group:
            words = commands.add_parser(word, help=f"Commands for {word}")
            parent = words.add_subparsers(metavar="command", required=True)
        own = parent.add_parser(name, help=command.summary, description=f"{command.summary}.")
        own.command = command
        own.set_defaults(command=command)
        if command.name == "report":
            text = "The folder of a run; several runs are compared"
            own.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=text)
            text = "The page; without it RUN/report.html, of several runs report.html"
            own.add_argument("--output", type=Path, metavar="FILE", help=text)
        if name == "settings":
            own.add_argument("search", nargs="+", metavar="WORD", help="A word, or its beginning")
        if command.settings is None:
            continue
        own.add_argument("overrides", nargs="*", metavar="key=value", help="Settings, listed below")
        own.add_argument("--config", dest="file", metavar="FILE", help="A YAML file of settings")
        if command.settings is TrainConfig:
            text = "A settings file of verl; settings are verl's then"
            own.add_argument("--verl", metavar="FILE", help=text)
        if command.name == "plan":
            text = "The folder of a run: show what generation beside training would give it"
            own.add_argument("--async", dest="measured", metavar="RUN", help=text)
            text = "With --async: write the timeline of the run, for Perfetto, to this file"
            own.add_argument("--trace", type=Path, metavar="FILE", help=text)
        text = "Let plan and --print-config run code of yours that the settings name"
        own.add_argument("--allow-code", action="store_true", help=text)
        if command.name in _RESUMED:
            text = "Start the run again, from its newest checkpoint, when its process is lost"
            own.add_argument("--supervise", action="store_true", help=text)
        text = "Print all settings as YAML and exit"
        own.add_argument("--print-config", action="store_true", help=text)
    return parser


def _report(text: str, code: int) -> int:
    """Write a message to standard error as `shown` does, and return the exit code."""
    open_output()
    sys.stdout.flush()
    print(shown(text), file=sys.stderr)
    return code


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"


def _one_screen(error: QuadrigaError) -> str:
    """Return the cause, then the traceback of the worker or the last calls on the controller."""
    remote = getattr(error, "remote_traceback", None)
    frames = traceback.format_tb(error.__traceback__)[-3:]
    where = str(remote).rstrip().splitlines()[-20:] if remote else "".join(frames).splitlines()
    if where and where[-1] in str(error):  # the message of a worker has its traceback
        return f"error: {error}"
    return "\n".join([f"error: {error}", "", *where])


if __name__ == "__main__":
    sys.exit(main())
