"""What a law is, and checking many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quadriga.errors import QuadrigaError

SubjectT = TypeVar("SubjectT")


class LawBroken(QuadrigaError, AssertionError):
    """A law of the kit does not hold. Attribute `laws`: the names of those that are broken."""


@dataclass(frozen=True)
class Law(Generic[SubjectT]):
    """A named statement, and a function that raises `LawBroken` where it is not true."""

    name: str
    statement: str
    check: Callable[[SubjectT], None]

    def __str__(self) -> str:
        return self.name


def law(name: str, statement: str) -> Callable[[Callable[[SubjectT], None]], Law[SubjectT]]:
    """Make a law of a function."""
    return lambda function: Law(name, statement, function)


def check_all(laws: Iterable[Law[SubjectT]], subject: SubjectT, title: str) -> None:
    """Check every law. Raises LawBroken with all that do not hold, the first one's cause kept."""
    broken: list[tuple[Law[SubjectT], Exception]] = []
    for one in laws:
        try:
            one.check(subject)
        except Exception as error:  # whatever the subject does belongs into the report
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


def expect(seen: Any, wanted: Any, what: str) -> None:
    """Raises LawBroken unless `seen` equals `wanted`."""
    if seen != wanted:
        raise LawBroken(f"{what}: expected {wanted!r}, got {seen!r}")


def expect_raises(
    run: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...], what: str
) -> Any:
    """Raises LawBroken unless `run` raises one of `kinds`; returns the error."""
    try:
        value = run()
    except kinds as error:
        return error
    names = [k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,))]
    raise LawBroken(f"{what}: expected {' or '.join(names)}, got the value {value!r}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
