"""The progress of long work on the controller, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(
    title: str, total: int, *, file: IO[str] | None = None
) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done: a bar on a terminal, else one line before the work.

    The bar disappears at the end. The function that is yielded adds to what is done.
    """
    console = Console(file=file, stderr=file is None, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.print(f"{title}: {total:,}", soft_wrap=True)
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24))
    with Progress(
        *columns, MofNCompleteColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
