"""When the controller, the replicas and the reward function of a run were at work.

    metrics.jsonl ──► phases of the controller ──┐
    stream.jsonl ───► calls, scoring, pauses ────┴──► spans ──► a file for Perfetto
                      └──► seconds of each call, for the costs of a simulation

The phases of a step follow each other and end with it, so their seconds give their starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.run_folder import METRICS, STREAM

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
    """Return the phases of the steps of a run and the scoring in them, and of a streamed run the
    rest of its work."""
    spans, stream = list[Span](), folder / STREAM
    for row in read_jsonl(folder / METRICS):
        phases = _PHASES if "time/rollout" in row else _FINE_TUNING
        seconds = {phase: row.get(f"time/{phase}", 0.0) for phase in phases.split()}
        now = row.get("progress/elapsed", 0.0) - sum(seconds.values())
        for phase in filter(seconds.get, seconds):
            spans.append(Span("controller", phase, now, now + seconds[phase], 0))
            if phase == "evaluate" and _REWARD in row:
                spans.append(Span("reward", "score", now, now + row[_REWARD], 0))
            now += seconds[phase]
    return spans + (read_stream(stream).spans if stream.is_file() else [])


def read_stream(path: Path) -> RecordedStream:
    """Read the calls, the scoring and the pauses of a run."""
    spans, calls, lengths = list[Span](), list[RecordedCall](), dict[tuple[int, int], int]()
    begun, called, taken = Counter[tuple[int, int]](), set[str](), list[int]()
    events = [event for event in read_jsonl(path) if "at" in event]
    for event in events:
        taken = event.get("take", taken)
        for i, of_row in enumerate(own := event.get("versions", ())):
            group, row = divmod(i, len(own) // len(taken))
            lengths[taken[group], row] = sum(tokens for _, tokens in of_row)
    for event in events:
        at, start = event["at"], event["at"] - event.get("seconds", 0.0)
        if "call" in event:
            rows = [(group, row) for group, row in event["call"]]
            before = np.array([begun[row] for row in rows])
            # A row without a length is not trained.
            most = events[0]["settings"][3]
            whole = np.array([lengths.get(row, begun[row] + most) for row in rows])
            tokens = (whole - before).clip(0, most)
            begun.update(dict(zip(rows, tokens.tolist(), strict=True)))
            track = f"replica {event['replica']}"
            calls.append(RecordedCall(at - start, tokens, before, track not in called))
            called.add(track)
            spans.append(Span(track, "generate", start, at, int(tokens.sum())))
        elif "restart" in event:
            begun = Counter({row: n for row, n in begun.items() if row[0] not in event["restart"]})
        elif "score" in event:
            spans.append(Span("reward", "score", start, at, 0))
        elif "resume" in event:
            called.clear()
            spans.append(Span("pause", event["resume"][0], start, at, 0))
    return RecordedStream(spans, calls, lengths)


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
