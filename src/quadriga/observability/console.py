"""The output of a run: a progress line on a terminal, a few plain lines in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from quadriga.config.secrets import shown
from quadriga.containment import open_output

SHOWN = {
    "reward/mean": ("reward", "{:.3f}"),
    "sft/loss": ("loss", "{:.3f}"),
    "rm/loss": ("loss", "{:.3f}"),
    "reward/failed": ("failed", "{:.1%}"),
    "val/score": ("score", "{:.3f}"),
    "val/loss": ("val loss", "{:.3f}"),
    "val/accuracy": ("accuracy", "{:.1%}"),
    "perf/tokens_per_second": ("tokens/s", "{:,.0f}"),
}
SHOWN_ABOVE_ZERO = ("reward/failed",)
PLAIN_LINES = 20  # about how many lines a run writes to a file or a pipe


class RunConsole:
    """Shows step, reward, validation score, tokens per second and time left, then a table.

    The progress line is drawn when a step is logged, in the calling thread, and standard output is
    not redirected: a debugger in this process can use the terminal.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "train",
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self._clock = total_steps, clock
        self.console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._title = title = shown(title)
        self._began = clock()
        self._first_step: int | None = None
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self.console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(title, total=total_steps, numbers="")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step. A metric that the step does not have is shown with its last value."""
        open_output()
        if self._first_step is None:
            self._first_step = step
        self._latest.update({name: metrics[name] for name in SHOWN if name in metrics})
        # A validation score is shown under one name: as a percentage where it is an accuracy.
        if "val/score" in metrics:
            self._latest.pop("val/score" if "val/accuracy" in metrics else "val/accuracy", None)
        if self.console.is_terminal:
            self._draw(step)
        elif self._is_printed(step, metrics):
            self.console.print(f"{self._title} {step}/{self.total_steps}  {self._numbers(step)}",
                               soft_wrap=True)  # fmt: skip

    def note(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(shown(text), soft_wrap=True)

    def close(self) -> None:
        """Stop updating the progress line; it stays on the terminal."""
        if self._progress.live.is_started:
            self._progress.stop()

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Close the progress line, then print a table of two columns."""
        self.close()
        table = Table(title=shown(title), title_justify="left", show_header=False, expand=False)
        for name, value in rows:
            table.add_row(shown(name), shown(value))
        self.console.print(table)

    def _draw(self, step: int) -> None:
        self._progress.update(self._task, completed=step, numbers=self._numbers(step))
        if not self._progress.live.is_started:
            self._progress.start()
            self.console.show_cursor(True)  # `start` hid it, and a debugger prompt needs it
        self._progress.refresh()

    def _is_printed(self, step: int, metrics: Mapping[str, float]) -> bool:
        every = max(1, self.total_steps // PLAIN_LINES)
        return step in (1, self.total_steps) or step % every == 0 or "val/score" in metrics

    def _numbers(self, step: int) -> str:
        parts = [
            f"{label} {form.format(self._latest[name])}"
            for name, (label, form) in SHOWN.items()
            if name in self._latest and (self._latest[name] or name not in SHOWN_ABOVE_ZERO)
        ]
        left = self.seconds_left(step)
        return "  ".join(parts if left is None else [*parts, f"left {duration(left)}"])

    def seconds_left(self, step: int) -> float | None:
        """Return the seconds to the last step at the average speed so far; None before step 1."""
        # Steps that this process has done. A run resumed at step 11 has done 1 step after step 11:
        # 11 - 11 + 1. Step 0 is a validation before training and not a step: 3 - 0 + 0 = 3.
        done = step - (self._first_step or 0) + (1 if self._first_step else 0)
        if done <= 0 or step <= 0:
            return None
        return (self._clock() - self._began) / done * max(0, self.total_steps - step)


def duration(seconds: float) -> str:
    """Return a duration as text: 42s, 3m05s, 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@contextmanager
def progress(
    title: str, total: int, *, file: IO[str] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done: a bar on a terminal, else one line before the work.

    The bar disappears at the end. The function that is yielded adds to what is done.
    """
    console = Console(file=file, stderr=file is None, highlight=False, markup=False, emoji=False)
    title = shown(title)
    if not console.is_terminal:
        console.print(f"{title}: {total:,}", soft_wrap=True)
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24))
    with Progress(
        *columns, MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
