"""`quadriga <command> [key=value …]`: reads the command line, says what went wrong in one line.

Exit codes: 0 done; 1 the run failed; 2 the input was wrong, and nothing was started; 130 stopped
by the user. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from quadriga import __version__
from quadriga.cli.commands import COMMANDS, Command, Invocation
from quadriga.errors import InputError, QuadrigaError
from quadriga.observability.quiet import silence_libraries


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `arguments` None: those of the process."""
    silence_libraries()
    try:
        invocation = parse(sys.argv[1:] if arguments is None else list(arguments))
        invocation.command.run(invocation)
        sys.stdout.flush()
    except InputError as error:
        return _say(f"error: {_one_line(error)}", 2)
    except QuadrigaError as error:
        return _say(_one_screen(error), 1)
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:  # the reader of our output has gone, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


def parse(arguments: Sequence[str]) -> Invocation:
    """The command and what it was given. Exits with code 2 where argparse cannot read it."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    strange = [text for text in rest if text.startswith("-")]
    if strange:
        parser.error(f"unknown option {strange[0]}; settings are given as key=value")
    return Invocation(
        command=known.command,
        overrides=(*known.overrides, *rest),
        file=getattr(known, "config", None),
        print_config=getattr(known, "print_config", False),
    )


class _Parser(argparse.ArgumentParser):
    """Puts the settings of its command below the help; they are gathered only then."""

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
    groups: dict[str, argparse._SubParsersAction[_Parser]] = {}
    for command in COMMANDS:
        parent = commands
        *group, name = command.name.split()
        if group:
            parent = groups.get(group[0]) or _add_group(commands, group[0])
            groups[group[0]] = parent
        _add_command(parent, name, command)
    return parser


def _add_group(
    commands: argparse._SubParsersAction[_Parser], name: str
) -> argparse._SubParsersAction[_Parser]:
    group = commands.add_parser(name, help=f"commands about {name}")
    return group.add_subparsers(metavar="command", required=True)


def _add_command(parent: argparse._SubParsersAction[_Parser], name: str, command: Command) -> None:
    parser = parent.add_parser(name, help=command.summary, description=f"{command.summary}.")
    assert isinstance(parser, _Parser)
    parser.command = command
    parser.set_defaults(command=command, overrides=[])
    if command.settings is None:
        return
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, see below")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of settings")
    parser.add_argument(
        "--print-config", action="store_true", help="show the resolved settings and stop"
    )


def _say(text: str, code: int) -> int:
    sys.stdout.flush()
    print(text, file=sys.stderr)
    return code


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _one_screen(error: QuadrigaError) -> str:
    """The cause first; then where it passed through here, the innermost calls only."""
    remote = getattr(error, "remote_traceback", None)
    frames = traceback.format_tb(error.__traceback__)[-3:]
    where = str(remote).rstrip().splitlines()[-20:] if remote else "".join(frames).splitlines()
    return "\n".join([f"error: {error}", "", *where])


if __name__ == "__main__":
    sys.exit(main())
