"""The Python blocks of a page, run as a reader would run them: top to bottom, in one namespace.

Markers are HTML comments on a line of their own:

- `<!-- needs: ray -->` anywhere in a page: its blocks start Ray. Blocks of other pages must not
  import it.
- `<!-- not run: reason -->` before a block: the block is a fragment that cannot run.
"""

import os
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from processes import forks

FENCE = re.compile(r"^```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = ("python", "python3", "py", "pycon")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.*?) -->\s*\Z", re.DOTALL)
NEEDS_RAY = "<!-- needs: ray -->"
TIME_LIMIT_S, RAY_TIME_LIMIT_S = 60, 170
RAY_WITHOUT_MARKER = "this page imports ray; mark it with <!-- needs: ray -->"


@dataclass(frozen=True)
class Block:
    """One fenced Python block. `line` is that of its first statement, counted from 1.

    `not_run` is the reason why the block cannot run, None for a block that runs.
    """

    line: int
    code: str
    not_run: str | None = None


def python_blocks(text: str) -> list[Block]:
    """Return the Python blocks of a page in order."""
    blocks = []
    for match in FENCE.finditer(text):
        if match["language"].lower() in PYTHON:
            marker = NOT_RUN.search(text, 0, match.start())
            reason = marker["reason"].strip() if marker else None
            line = text.count("\n", 0, match.start("code")) + 1
            blocks.append(Block(line, match["code"], reason))
    return blocks


def as_script(text: str) -> str:
    """Return a page as a program: its blocks at their own lines, everything else left blank.

    A traceback of the program then shows the line numbers of the page.
    """
    lines = [""] * text.count("\n")
    for block in python_blocks(text):
        if block.not_run is None:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    if NEEDS_RAY not in text:
        lines += ["import sys", f"assert 'ray' not in sys.modules, {RAY_WITHOUT_MARKER!r}"]
    return "\n".join(lines) + "\n"


def run_page(page: Path, folder: Path) -> str:
    """Run the blocks of a page in `folder` by a process of its own. Return its errors, "" if none.

    The process is a fork of one that has imported what most pages import. A process that exceeds
    the time limit is an error as well.
    """
    text = page.read_text(encoding="utf-8")
    script, output = folder / f"{page.stem}.py", folder / "output.txt"
    script.write_text(as_script(text), encoding="utf-8")
    output.touch()
    limit = RAY_TIME_LIMIT_S if NEEDS_RAY in text else TIME_LIMIT_S
    process = forks().Process(target=_run_script, args=(script, output, dict(os.environ)))
    process.start()
    process.join(limit)
    late = process.is_alive()
    process.kill()
    process.join()
    errors = output.read_text(encoding="utf-8", errors="replace")
    if late:
        return f"time limit of {limit} s exceeded\n{errors}"
    return (errors or f"exit code {process.exitcode}") if process.exitcode else ""


def _run_script(script: Path, output: Path, environment: dict[str, str]) -> None:
    """Run a program as `python script.py` does, in its folder, with its output in a file."""
    os.chdir(script.parent)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv, sys.path[0] = [script.name], str(script.parent)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = str(script)
    exec(compile(script.read_text(encoding="utf-8"), script.name, "exec"), vars(main))
