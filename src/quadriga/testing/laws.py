"""`Law`: a named statement with a function that checks it. And the check of many laws at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from quadriga.errors import QuadrigaError

SubjectT = TypeVar("SubjectT")
ErrorT = TypeVar("ErrorT", bound=Exception)


class LawBroken(QuadrigaError, AssertionError):
    """A law of the kit does not hold. Attribute `laws`: the names of the broken laws."""


@dataclass(frozen=True)
class Law(Generic[SubjectT]):
    """A named statement, and a function that raises `LawBroken` if it does not hold."""

    name: str
    statement: str
    check: Callable[[SubjectT], None]

    def __str__(self) -> str:
        return self.name


def law(name: str, statement: str) -> Callable[[Callable[[SubjectT], None]], Law[SubjectT]]:
    """Return a decorator that makes a law of a check function."""
    return lambda function: Law(name, statement, function)


def check_all(laws: Iterable[Law[SubjectT]], subject: SubjectT, title: str) -> None:
    """Check every law. Raises `LawBroken`, which lists all broken laws, from the first error."""
    broken: list[tuple[Law[SubjectT], Exception]] = []
    for one in laws:
        try:
            one.check(subject)
        except Exception as error:  # any error of the subject breaks the law and is reported
            broken.append((one, error))
    if broken:
        lines = [
            f"  {one.name}: {one.statement}\n    {type(error).__name__}: {_first_line(error)}"
            for one, error in broken
        ]
        raise LawBroken(
            f"{title} breaks {len(broken)} law(s):\n" + "\n".join(lines),
            laws=[one.name for one, _ in broken],
        ) from broken[0][1]


def expect(seen: object, expected: object, what: str) -> None:
    """Raise LawBroken unless `seen` equals `expected`."""
    if seen != expected:
        raise LawBroken(f"{what}: expected {expected!r}, got {seen!r}")


def expect_raises(run: Callable[[], object], kind: type[ErrorT], what: str) -> ErrorT:
    """Return the error that `run` raises. Raises `LawBroken` if it does not raise one of `kind`."""
    try:
        value = run()
    except kind as error:
        return error
    raise LawBroken(f"{what}: expected {kind.__name__}, got the value {value!r}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
