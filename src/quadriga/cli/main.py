"""`quadriga <command> [key=value …]`: parse the command line, run the command, report errors.

Exit codes: 0 success; 1 the run failed, or code of the user has ended it; 2 the input was wrong,
and nothing was started (the message is one line); 130 stopped by Ctrl-C, 143 by SIGTERM. torch and
Ray are imported only when a command runs.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from quadriga import __version__
from quadriga.cli.commands import COMMANDS, Command, Invocation
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import mask_secrets
from quadriga.containment import ExitGuard
from quadriga.errors import InputError, QuadrigaError, nearest_name
from quadriga.observability.quiet import silence_libraries

MAX_LINE = 2000  # characters of the one line for wrong input


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `arguments` None: those of the process."""
    silence_libraries()
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
        with _stopped_by_sigterm():
            invocation.command.run(invocation)
        sys.stdout.flush()
    except InputError as error:
        return _report(f"error: {_one_line(error)}", 2)
    except QuadrigaError as error:
        return _report(_one_screen(error), 1)
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if signal.SIGTERM in error.args else signal.SIGINT
        return _report("stopped", 128 + number)
    except SystemExit as error:
        if invocation is None:  # help was asked for, or the command line is not valid
            raise
        # The system keeps the lowest 8 bits: 256 would become 0.
        code = error.code if isinstance(error.code, int) and error.code & 0xFF else 1
        return _report(f"error: the command ended early, by sys.exit({error.code!r})", code)
    except MemoryError:
        return _report("error: this machine has not enough memory for the run", 1)
    except Exception as error:
        # A connection that code of the user has opened raises `BrokenPipeError`, too.
        if isinstance(error, BrokenPipeError) and _output_has_no_reader():
            return _end_without_reader(invocation)
        shown = "".join(traceback.format_exception(error)).rstrip()
        if mask_secrets(shown) == shown:
            raise
        return _report(shown, 1)
    return 0


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
    if invocation is None or invocation.print_config or not invocation.command.writes_files:
        return 0
    return _report(
        "error: the command ended early, because the reader of standard output has exited; write "
        "the output to a file",
        1,
    )


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
    known, rest = parser.parse_known_args(arguments)
    options = [text for text in rest if text.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}; write settings as key=value")
    return Invocation(
        command=known.command,
        overrides=(*known.overrides, *rest),
        file=getattr(known, "config", None),
        print_config=getattr(known, "print_config", False),
        verl=getattr(known, "verl", None),
    )


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
        settings = self.command.help_text() if self.command else ""
        return super().format_help() + (f"\n{settings}" if settings else "")


def _parser() -> _Parser:
    parser = _Parser(
        prog="quadriga",
        description="Reinforcement-learning post-training for large language models.",
    )
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
        own.set_defaults(command=command, overrides=[])
        if command.settings is None:
            continue
        own.add_argument("overrides", nargs="*", metavar="key=value", help="Settings, listed below")
        own.add_argument("--config", metavar="FILE", help="A YAML file of settings")
        if command.settings is TrainConfig:
            text = "A settings file of verl; settings are verl's then"
            own.add_argument("--verl", metavar="FILE", help=text)
        text = "Print all settings as YAML and exit"
        own.add_argument("--print-config", action="store_true", help=text)
    return parser


def _report(text: str, code: int) -> int:
    """Write a message to standard error, with secrets masked, and return the exit code."""
    sys.stdout.flush()
    print(mask_secrets(text), file=sys.stderr)
    return code


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"


def _one_screen(error: QuadrigaError) -> str:
    """Return the cause, then the traceback of the worker or the last calls on the controller."""
    remote = getattr(error, "remote_traceback", None)
    frames = traceback.format_tb(error.__traceback__)[-3:]
    where = str(remote).rstrip().splitlines()[-20:] if remote else "".join(frames).splitlines()
    return "\n".join([f"error: {error}", "", *where])


if __name__ == "__main__":
    sys.exit(main())
