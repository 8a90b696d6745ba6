"""Calls of worker methods by name, registered or not."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.errors import UnregisteredMethodError
from quadriga.single_controller.backend import RankSet
from quadriga.single_controller.bound_method import Part, build_calls, send_calls
from quadriga.single_controller.call import Pending, unpack_results


class NamedCalls:
    """The part of `WorkerGroup` that calls methods by name, without a dispatch mode.

    `call_all(name, …)` and `call_rank_zero(name, …)` wait for the results. The forms with `_async`
    return one `Pending` per rank.

    If every argument is a list of world_size length, `call_all` sends entry i of each list to
    rank i; otherwise every rank receives the arguments as they are. No other call splits a list
    unless a dispatch mode says so.
    """

    _ranks: RankSet
    _role: str | None
    _offered: dict[str, tuple[str, str]]
    """Bound method name → (role, method)."""

    def call_all_async(self, method_name: str, *args: object, **kwargs: object) -> list[Pending]:
        """Call a method on every rank. Return one `Pending` per rank."""
        role, name = self._role_and_method(method_name)
        n = len(self._ranks)
        columns = [value for value in args if isinstance(value, list) and len(value) == n]
        named = {k: v for k, v in kwargs.items() if isinstance(v, list) and len(v) == n}
        parts: list[Part] = [(args, kwargs)] * n
        if len(columns) == len(args) and len(named) == len(kwargs) and (args or kwargs):
            parts = [
                (tuple(column[i] for column in columns), {k: v[i] for k, v in named.items()})
                for i in range(n)
            ]
        return self._send(role, name, range(n), parts)

    def call_all(self, method_name: str, *args: object, **kwargs: object) -> list[object]:
        """Call a method on every rank and wait. Return one result per rank."""
        return self._results(self.call_all_async(method_name, *args, **kwargs))

    def call_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> Pending:
        """Call a method on rank 0. Return its `Pending`."""
        role, name = self._role_and_method(method_name)
        return self._send(role, name, [0], [(args, kwargs)])[0]

    def call_rank_zero(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call a method on rank 0 and wait for its result."""
        return self._results([self.call_rank_zero_async(method_name, *args, **kwargs)])[0]

    def _send(
        self, role: str, method: str, targets: Sequence[int], parts: Sequence[Part]
    ) -> list[Pending]:
        calls = build_calls(self._ranks, targets, role, method, parts)
        return list(send_calls(self._ranks, targets, calls))

    def _results(self, pendings: Sequence[Pending]) -> list[object]:
        return unpack_results(self._ranks.backend.gather(pendings))

    def _role_and_method(self, method_name: str) -> tuple[str, str]:
        """Return the role and the method that a bound name of this group stands for."""
        if method_name in self._offered:
            return self._offered[method_name]
        if self._role is None:
            raise UnregisteredMethodError(
                f"{self} offers {sorted(self._offered)}, not {method_name!r}. Take the view of "
                "one role with spawn() to call any of its methods by name.",
                method=method_name,
                known=sorted(self._offered),
            )
        return self._role, method_name
