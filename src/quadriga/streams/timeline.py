"""When the controller, the replicas and the reward function of a run were at work.

    metrics.jsonl ─────────► phases of the controller ──┐
    profile/calls.jsonl ───► methods of each rank ──────┤
    stream.jsonl ──────────► calls, scoring, pauses ────┴──► spans ──► a file for Perfetto
                             └──► seconds of each call, for the costs of a simulation

The phases of a step follow each other and end with it, so their seconds give their starts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from annotated_types import Len

from quadriga.errors import DataError
from quadriga.observability.jsonl import check_row, read_jsonl, read_metrics
from quadriga.observability.run_folder import CALLS, METRICS, STREAM

Counts = npt.NDArray[np.int64]
_PHASES = (
    "rollout evaluate advantages update_critic update_actor sync_weights validate save snapshot"
)
_FINE_TUNING = "step sync_weights evaluate validate save snapshot"
_REWARD = "time/reward"


class Span(NamedTuple):
    """A piece of work, from `start` to `end` in seconds."""

    track: str
    name: str
    start: float
    end: float
    tokens: int


class StreamEvent(NamedTuple):
    """A line of `stream.jsonl`. `name` says what has happened, `numbers` to what (`_NUMBERS`), at
    `at` seconds of the run. `step`: the first one that has not ended. Of a call also its seconds,
    the number of its replica, and the step of its weights."""

    line: int
    name: str
    numbers: list[Any]
    step: int
    at: float
    seconds: float
    replica: int | None
    synced: int | None


_Pair = Annotated[list[int], Len(2, 2)]
_NUMBERS: dict[str, object] = {
    **dict.fromkeys(("begin", "take", "score", "drop", "restart", "forget"), list[int]),
    **dict.fromkeys(("sync", "validate", "save"), list[int]), "call": list[_Pair],
    "versions": list[list[_Pair]], "resume": Annotated[list[str], Len(1, 1)],
    "settings": Annotated[list[int], Len(7, 8)],
}  # fmt: skip
_RANK_CALLS = {"step": int, "calls": list[Annotated[list[str | float], Len(4, 4)]]}
"""Track, method, and its start and end in seconds after the end of the step."""
_COMMON = {"step": int, "at": float, **dict.fromkeys(("replica", "synced"), int | None)}


class RecordedCall(NamedTuple):
    """A call to a replica: its seconds, and the tokens of each row that it sampled and those before
    them. `synced`: the weights of the replica were new."""

    seconds: float
    tokens: Counts
    before: Counts
    synced: bool


class RecordedStream(NamedTuple):
    """What `stream.jsonl` says of a run. `lengths`: (group, row) → response tokens."""

    spans: list[Span]
    calls: list[RecordedCall]
    lengths: dict[tuple[int, int], int]


def recorded_spans(folder: Path) -> list[Span]:
    """Return the phases of the steps of a run and the scoring in them, of profiled steps the work
    of each rank, and of a streamed run the rest of its work."""
    spans, stream, own = list[Span](), folder / STREAM, folder / CALLS
    calls = dict[int, list[Any]]()  # of each step; if it was repeated, of the last time
    for line, row in enumerate(read_jsonl(own) if own.is_file() else (), 1):
        check_row(own, line, row, _RANK_CALLS)
        calls[row["step"]] = row["calls"]
    for row in read_metrics(folder / METRICS):
        phases = _PHASES if "time/rollout" in row else _FINE_TUNING
        seconds = {phase: row.get(f"time/{phase}", 0.0) for phase in phases.split()}
        now = row.get("progress/elapsed", 0.0) - sum(seconds.values())
        for phase in filter(seconds.get, seconds):
            spans.append(Span("controller", phase, now, now + seconds[phase], 0))
            if phase == "evaluate" and _REWARD in row:
                spans.append(Span("reward", "score", now, now + row[_REWARD], 0))
            now += seconds[phase]
        for track, name, start, end in calls.get(int(row["step"]), ()):
            spans.append(Span(track, name, now + start, now + end, 0))
    return spans + (read_stream(stream).spans if stream.is_file() else [])


def read_events(path: Path) -> Iterator[StreamEvent]:
    """Yield the lines of a `stream.jsonl`. Raises `DataError` as `check_row`."""
    for line, row in enumerate(read_jsonl(path), 1):
        name = next((key for key in row if key in _NUMBERS), "event")
        kinds = {name: _NUMBERS.get(name, list[int]), **_COMMON, "seconds": float | None}
        check_row(path, line, row, kinds)
        more = row.get("seconds") or 0.0, row.get("replica"), row.get("synced")
        yield StreamEvent(line, name, row[name], row["step"], row["at"], *more)


def read_stream(path: Path) -> RecordedStream:
    """Read the calls, the scoring and the pauses of a run.

    Raises:
        DataError: a line does not fit the lines before it, or see `read_events`.
    """
    spans, calls, begun = list[Span](), list[RecordedCall](), Counter[tuple[int, int]]()
    called, most, events = set[str](), 0, list(read_events(path))
    lengths = _lengths(path, events)
    for event in events:
        at, start = event.at, event.at - event.seconds
        if event.name == "settings":
            most = event.numbers[3]
        elif event.name == "call":
            rows = [(group, row) for group, row in event.numbers]
            before = np.array([begun[row] for row in rows])
            # A row without a length is not trained.
            whole = np.array([lengths.get(row, begun[row] + most) for row in rows])
            tokens = (whole - before).clip(0, most)
            begun.update(dict(zip(rows, tokens.tolist(), strict=True)))
            track = f"replica {event.replica}"
            calls.append(RecordedCall(at - start, tokens, before, track not in called))
            called.add(track)
            spans.append(Span(track, "generate", start, at, int(tokens.sum())))
        elif event.name == "restart":
            begun = Counter({row: n for row, n in begun.items() if row[0] not in event.numbers})
        elif event.name == "score":
            spans.append(Span("reward", "score", start, at, 0))
        elif event.name == "resume":
            called.clear()
            spans.append(Span("pause", event.numbers[0], start, at, 0))
    return RecordedStream(spans, calls, lengths)


def _lengths(path: Path, events: Sequence[StreamEvent]) -> dict[tuple[int, int], int]:
    """Return (group, row) → response tokens, of the responses that were trained."""
    lengths, taken = dict[tuple[int, int], int](), list[int]()
    for event in events:
        if event.name == "take":
            taken = event.numbers
        elif event.name == "versions":
            n, rest = divmod(len(event.numbers), max(1, len(taken)))
            if rest or not n or not taken:
                text = f"field versions must have rows of {len(taken)} groups"
                text = f"{path}:{event.line}: {text}, got {len(event.numbers)}; the file is damaged"
                raise DataError(text, path=str(path))
            for i, of_row in enumerate(event.numbers):
                lengths[taken[i // n], i % n] = sum(tokens for _, tokens in of_row)
    return lengths


def chrome_trace(spans: Sequence[Span]) -> dict[str, object]:
    """Return spans as a JSON object that Perfetto and chrome://tracing open."""
    events: list[dict[str, object]] = []
    for tid, track in enumerate(sorted({span.track for span in spans})):
        of_track = {"pid": 0, "tid": tid}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": track}, **of_track})
        for _, name, start, end, tokens in (span for span in spans if span.track == track):
            own = {"ts": 1e6 * start, "dur": 1e6 * (end - start), "args": {"tokens": tokens}}
            events.append({"ph": "X", "name": name, **own, **of_track})
    return {"traceEvents": events}
