"""A conformance kit: check your own rollout engine against the laws of rollout engines.

    from quadriga.testing import check_rollout

    check_rollout(build_my_engine)                          # on a small model that it writes

It raises `LawBroken`, which names every law that does not hold and the value that was seen. A law
is a function whose docstring states it. With pytest, parametrize a test over `ROLLOUT_LAWS` to get
one test per law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from quadriga.errors import QuadrigaError
from quadriga.lazy import lazy_names

SubjectT = TypeVar("SubjectT")
ErrorT = TypeVar("ErrorT", bound=Exception)


class LawBroken(QuadrigaError, AssertionError):
    """A law of the kit does not hold. Attribute `laws`: the names of the broken laws."""


def check_all(laws: Iterable[Callable[[SubjectT], None]], subject: SubjectT, title: str) -> None:
    """Check every law. Raises `LawBroken`, which lists all broken laws, from the first error."""
    broken: dict[str, Exception] = {}
    lines = [f"{title} breaks laws:"]
    for law in laws:
        try:
            law(subject)
        except Exception as error:  # any error of the subject breaks the law and is reported
            broken[law.__name__] = error
            first = (str(error).strip().splitlines() or ["no message"])[0]
            lines += [f"  {law.__name__}: {law.__doc__}", f"    {type(error).__name__}: {first}"]
    if broken:
        raise LawBroken("\n".join(lines), laws=list(broken)) from next(iter(broken.values()))


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


if TYPE_CHECKING:
    from quadriga.testing.rollouts import (
        ROLLOUT_LAWS as ROLLOUT_LAWS,
        RolloutUnderTest as RolloutUnderTest,
        check_rollout as check_rollout,
        write_reference_model as write_reference_model,
    )
else:
    __getattr__, __dir__, _ = lazy_names(__name__)
