"""The output of a run: a progress line on a terminal, a few plain lines in a file or a pipe."""

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from quadriga.config.secrets import shown
from quadriga.containment import open_output
from quadriga.observability.jsonl import Turn

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
NO_PHASES = ("time/step", "time/written")
PLAIN_LINES = 20  # about how many lines a run writes to a file or a pipe
SAMPLES = 10  # about how many responses a run shows
SAMPLE_LINES = 3  # of a prompt, a response, a turn
SAMPLE_TURNS = 4  # of an episode


class RunConsole:
    """Shows step, reward, validation score, tokens per second, time left and the seconds of each
    phase, some responses, then a table. A terminal also shows the phase that the run waits for.

    The progress lines are drawn when a phase begins or a step is logged, in the calling thread, and
    standard output is not redirected: a debugger in this process can use the terminal.
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
        self._seconds: dict[str, float] = {}  # of the phases of the last step
        self._step, self._phase = 0, ""
        self._sampled: int | None = None  # the step of the last response that was shown
        self._live: Live | None = None  # on a terminal, from the first phase or step on

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step. A metric that the step does not have is shown with its last value."""
        open_output()
        if self._first_step is None:
            self._first_step = step
        self._latest.update({name: metrics[name] for name in SHOWN if name in metrics})
        # A validation score is shown under one name: as a percentage where it is an accuracy.
        if "val/score" in metrics:
            self._latest.pop("val/score" if "val/accuracy" in metrics else "val/accuracy", None)
        self._step, self._phase = step, ""
        self._seconds = {
            name.removeprefix("time/"): seconds
            for name, seconds in metrics.items()
            if name.startswith("time/") and name not in NO_PHASES and seconds >= 0.05
        }
        if self.console.is_terminal:
            self._draw()
        elif self._is_printed(step, metrics):
            self.console.print("  ".join(self._parts()), soft_wrap=True)

    def phase(self, name: str) -> None:
        """Show on a terminal that the run waits for a phase."""
        self._phase = name
        if self.console.is_terminal:
            self._draw()

    def sample(
        self, step: int, prompt: str, response: str, reward: float, turns: Sequence[Turn] = ()
    ) -> None:
        """Show a response, or the last turns of an episode, of about `SAMPLES` steps of the run. Of
        long texts the end is shown."""
        if self._sampled is not None and step - self._sampled < self.total_steps // SAMPLES:
            return
        self._sampled = step
        self.note(f"response in step {step}, reward {reward:.3f}")
        parts = [] if turns else [("response", response)]
        for number, turn in [*enumerate(turns, 1)][-SAMPLE_TURNS:]:
            parts += [(f"turn {number}", turn["sampled"]), ("observed", turn["observed"])]
        for label, text in [("prompt", prompt), *parts]:
            for line in self._cut(text):
                self.note(f"  {label:<9} {line}")
                label = ""

    def _cut(self, text: str) -> list[str]:
        """Return the end of a text as `SAMPLE_LINES` lines that fit the terminal."""
        width = max(20, self.console.width - 12)
        words = " ".join(shown(text[-8 * width :]).split())
        lines = textwrap.wrap(words, width, break_on_hyphens=False)
        if len(lines) > SAMPLE_LINES or len(text) > 8 * width:
            lines = [f"… {lines[-SAMPLE_LINES][2:]}", *lines[1 - SAMPLE_LINES :]]
        return lines

    def note(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(shown(text), soft_wrap=True)

    def close(self) -> None:
        """Stop updating the progress line; it stays on the terminal."""
        live, self._live = self._live, None
        if live is not None:
            self._phase = ""
            live.update(self._lines(), refresh=True)
            live.stop()

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Close the progress line, then print a table of two columns."""
        self.close()
        table = Table(title=shown(title), title_justify="left", show_header=False, expand=False)
        for name, value in rows:
            table.add_row(shown(name), shown(value))
        self.console.print(table)

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self.console, auto_refresh=False, redirect_stdout=False,
                redirect_stderr=False, vertical_overflow="visible",
            )  # fmt: skip
            self._live.start()
            self.console.show_cursor(True)  # `start` hid it, and a debugger prompt needs it
        self._live.update(self._lines(), refresh=True)

    def _lines(self) -> Group:
        """Return the bar, and below it the numbers and the phases as lines of their own."""
        bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(24), MofNCompleteColumn()
        )
        bar.add_task(self._title, total=self.total_steps, completed=self._step)
        waits = f"waits for {self._phase}, step {self._step + 1}" if self._phase else ""
        lines = [*self._parts()[1:], waits]
        return Group(bar, *(Text(line) for line in lines if line))

    def _is_printed(self, step: int, metrics: Mapping[str, float]) -> bool:
        every = max(1, self.total_steps // PLAIN_LINES)
        return step in (1, self.total_steps) or step % every == 0 or "val/score" in metrics

    def _parts(self) -> list[str]:
        """Return the step, its numbers, and the seconds of its phases."""
        parts = [
            f"{label} {form.format(self._latest[name])}"
            for name, (label, form) in SHOWN.items()
            if name in self._latest and (self._latest[name] or name not in SHOWN_ABOVE_ZERO)
        ]
        left = self.seconds_left(self._step)
        parts = parts if left is None else [*parts, f"left {duration(left)}"]
        phases = ", ".join(f"{name} {seconds:.1f}s" for name, seconds in self._seconds.items())
        numbers = "  ".join(parts)
        return [
            f"{self._title} {self._step}/{self.total_steps}",
            numbers,
            *([f"({phases})"] if phases else []),
        ]

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
