"""The figures of the data plane and their goals."""

from __future__ import annotations

from typing import Any

Result = dict[str, Any]

FIVE_CALLS = {
    "five_calls_64MB_2": ("five_calls_4MB_2", 6),
    "five_calls_256MB_4": ("five_calls_16MB_4", 8),
}
"""Case → (the same case with a batch 16 times smaller, required factor over verl)."""


class Goals:
    """Compute figures from {case: {system: numbers}}. Systems that did not run are left out."""

    def __init__(self, results: dict[str, Result]) -> None:
        self.results = results
        self.found: dict[str, Result] = {}

    def system(self, case: str, name: str) -> Result | None:
        """Return the numbers of one system, None if it did not run."""
        return self.results.get(case, {}).get(name)

    def at_most(self, name: str, value: float, goal: float) -> None:
        self._add(name, value, f"at most {goal:g}", value <= goal)

    def at_least(self, name: str, value: float, goal: float) -> None:
        self._add(name, value, f"at least {goal:g}", value >= goal)

    def reported(self, name: str, value: float) -> None:
        """Report a figure without a goal."""
        self._add(name, value, "reported", True)

    def _add(self, name: str, value: float, goal: str, met: bool) -> None:
        self.found[name] = {"value": round(value, 4), "goal": goal, "met": met}


def goals(results: dict[str, Result]) -> dict[str, Result]:
    """Return {figure: {"value", "goal", "met"}}."""
    table = Goals(results)
    for case, (small, faster) in FIVE_CALLS.items():
        _five_calls(table, case, small, faster)
    _put_get(table)
    for case in ("fan_out_4_4", "fan_out_4_3"):
        _fan_out(table, case)
    for case in ("tiny_2", "tiny_8"):
        _compare(table, case, "raw", "wall_s", "wall_times_raw_ray", 2)
    _scaling(table)
    return table.found


def _compare(table: Goals, case: str, system: str, number: str, name: str, goal: float) -> None:
    ours, other = table.system(case, "ours"), table.system(case, system)
    if ours and other:
        table.at_most(f"{case}: {name}", ours[number] / max(other[number], 1e-9), goal)


def _five_calls(table: Goals, case: str, small_case: str, faster: float) -> None:
    _compare(table, case, "raw", "wall_s", "wall_times_raw_ray", 1.5)
    _compare(table, case, "raw_pipelined", "wall_s", "wall_times_raw_ray_pipelined", 1.5)
    _compare(table, case, "raw", "cpu_s", "controller_cpu_times_raw_ray", 2)
    ours, peer, small = (
        table.system(case, "ours"), table.system(case, "peer"), table.system(small_case, "ours"),
    )  # fmt: skip
    if ours and peer:
        table.at_least(f"{case}: times_faster_than_verl", peer["wall_s"] / ours["wall_s"], faster)
    if ours:
        share = ours["extra_bytes"] / ours["payload_bytes"]
        table.at_most(f"{case}: controller_memory_of_payload", share, 0.05)
    if ours and small:
        growth = (ours["extra_bytes"] - small["extra_bytes"]) / 2**20
        table.at_most(f"{case}: controller_memory_growth_mb_at_16_times_the_batch", growth, 1)


def _put_get(table: Goals) -> None:
    """Compare `put` and `get` with verl, without and with reading every field into private memory.

    verl's `get` always does the latter.
    """
    case = "put_get_117MB"
    ours = table.system(case, "ours")
    for system, name, goal in (("peer", "verl", 20), ("peer_numpy", "verl_numpy_mode", 4)):
        peer = table.system(case, system)
        if ours and peer:
            theirs, mine = peer["put_s"] + peer["get_s"], ours["put_s"] + ours["get_s"]
            table.at_least(f"{case}: times_faster_than_{name}", theirs / mine, goal)
            read = theirs / (mine + ours["read_s"])
            table.at_least(f"{case}: all_fields_read_times_faster_than_{name}", read, 1)


def _fan_out(table: Goals, case: str) -> None:
    ours, peer = table.system(case, "ours"), table.system(case, "peer")
    if ours:
        for rank, (got, needed) in enumerate(
            zip(ours["received_bytes"], ours["needed_bytes"], strict=True)
        ):
            # Fewer, because integers are sent in the smallest type that holds them.
            table.at_most(f"{case}: bytes_received_by_rank_{rank}", got, needed)
    if ours and peer:
        faster = peer["wall_s"] / ours["wall_s"]
        table.at_least(f"{case}: times_faster_than_verls_future_path", faster, 5)


def _scaling(table: Goals) -> None:
    """Compare the controller's microseconds per rank at 8 and 1024 ranks, and for more rows.

    Both ratios should be near 1.
    """
    by_size: dict[int, dict[int, float]] = {}
    for key, numbers in (table.system("scaling", "scaling") or {}).items():
        ranks, rows = (int(word) for word in key.split() if word.isdigit())
        by_size.setdefault(rows, {})[ranks] = sum(numbers.values())
    if not by_size:
        return
    small, large = by_size[min(by_size)], by_size[max(by_size)]
    few, many = min(large), max(large)
    for ranks in (few, many):
        table.reported(f"scaling: us_per_rank_at_{ranks}_ranks", large[ranks])
    growth = max(size[many] / size[few] for size in (small, large))
    table.at_most(f"scaling: us_per_rank_at_{many}_over_{few}_ranks", growth, 1.5)
    worst = max(large[ranks] / small[ranks] for ranks in large)
    table.at_most("scaling: time_at_16_times_the_bytes_over_time", worst, 1.25)
