"""A run in virtual time: what a staleness and a division of the ranks would give.

    lengths of the responses ─┐
    seconds of calls, steps ──┼──► PromptQueue, StalenessBound, SlicedGeneration ──► spans, figures
    ranks and settings ───────┘

The queue, the bound and the generation are those of a run. The replicas and the trainer only add
seconds (`Costs`) to a clock, so nothing sleeps, and equal arguments give equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import ReplicaGroup, Replicas
from quadriga.streams.staleness import StalenessBound

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Costs:
    """Seconds of the work of a run.

    Attributes:
        decode: a decoding step of one copy of the weights.
        decode_row: more of a step for each row.
        decode_context: more of a step for each token that its rows attend to.
        prefill: a token of a row that begins, or that a call continues.
        call: a call to a replica besides.
        train: a token of a training step, on one rank.
        step: a training step besides.
        sync: a weight sync.
        keeps_cache: a continued row is computed again only after a weight sync.
    """

    decode: float
    decode_row: float = 0.0
    decode_context: float = 0.0
    prefill: float = 0.0
    call: float = 0.0
    train: float = 0.0
    step: float = 0.0
    sync: float = 0.0
    keeps_cache: bool = True

    def of_call(self, tokens: Counts, contexts: Counts, computed: Counts) -> float:
        """Return the seconds of a call on one copy.

        Args:
            tokens: that each row decodes.
            contexts: tokens of each row before.
            computed: those of them that the call has to compute.
        """
        attended = tokens * contexts + tokens * (tokens - 1) // 2
        return (
            self.call
            + self.prefill * float(computed.sum())
            + self.decode * float(tokens.max(initial=0))
            + self.decode_row * float(tokens.sum())
            + self.decode_context * float(attended.sum())
        )


@dataclass(frozen=True)
class Division:
    """How a run uses its ranks.

    Attributes:
        trainers: ranks that train.
        copies: copies of the weights that generate.
        apart: on ranks of their own, while the policy is trained; False: in turns with it.
        groups: prompt groups of a step.
        staleness: `trainer.max_staleness`.
        slice_tokens: the most tokens of a row in one call.
        rows: the most rows that a copy has at once; None: any number.
        on_the_way: the most groups on their way; None: as many as the bound allows.
    """

    trainers: int
    copies: int
    apart: bool
    groups: int
    staleness: int
    slice_tokens: int
    rows: int | None = None
    on_the_way: int | None = None


class Span(NamedTuple):
    """A piece of work, from `start` to `end` in seconds. `rows` × `steps` could be decoded in a
    call, and `tokens` were."""

    track: str
    name: str
    start: float
    end: float
    tokens: int = 0
    rows: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Timeline:
    """What a run did.

    Attributes:
        ends: the end of each step.
        tokens: the response tokens that each step has trained.
        ages: of the groups of each step, in training steps.
        numbers: of the groups of each step.
    """

    division: Division
    spans: Sequence[Span]
    ends: Floats
    tokens: Counts
    ages: Sequence[Counts]
    numbers: Sequence[Counts]

    @property
    def steady(self) -> tuple[int, int]:
        """The steps between which a run neither begins nor ends: first and last."""
        steps, margin = len(self.ends), 2 * self.division.staleness + 1
        return (margin, steps - margin + 1) if steps > 3 * margin else (0, steps - 1)

    @property
    def tokens_per_second(self) -> float:
        """Response tokens trained per second."""
        first, last = self.steady
        return float(self.tokens[first + 1 : last + 1].sum() / (self.ends[last] - self.ends[first]))

    def share(self, tracks: str) -> float:
        """The share of time in which the tracks whose names begin so work, on average."""
        first, last = self.ends[list(self.steady)]
        own = [span for span in self.spans if span.track.startswith(tracks)]
        worked = sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in own)
        return float(worked / (last - first) / max(1, len({span.track for span in own})))

    @property
    def occupancy(self) -> float:
        """Decoded tokens over those that the largest call's rows could have had. It is low if
        replicas wait for a few long responses."""
        calls = [span for span in self.spans if span.rows]
        most = max(span.rows for span in calls)
        return sum(span.tokens for span in calls) / (most * sum(span.steps for span in calls))

    def chrome_trace(self) -> dict[str, object]:
        """The spans as a JSON object that Perfetto and chrome://tracing open."""
        tracks = {name: i for i, name in enumerate(dict.fromkeys(s.track for s in self.spans))}
        names: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
            for name, i in tracks.items()
        ]
        events = [
            {
                "ph": "X", "name": span.name, "pid": 0, "tid": tracks[span.track],
                "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start),
                "args": {"tokens": span.tokens, "rows": span.rows},
            }
            for span in self.spans
        ]  # fmt: skip
        return {"traceEvents": names + events}


@dataclass(eq=False)
class _Call:
    """A call whose end is known from its start."""

    ends: float
    answers: DataProto

    def get(self) -> DataProto:
        return self.answers


@dataclass(eq=False)
class _SimulatedGroup:
    """The worker group of a replica with `world_size` copies. A row's only token is its length."""

    run: Simulation
    number: int
    world_size: int
    synced: bool = True  # since the last call

    @property
    def generate_sequences(self) -> _SimulatedGroup:
        return self

    def submit(self, rows: DataProto) -> _Call:
        lengths = rows.batch[fields.INPUT_IDS][:, 0].numpy()
        begun = np.zeros_like(lengths)
        if fields.RESPONSES in rows.batch.keys():  # noqa: SIM118
            begun = rows.batch[fields.RESPONSES][:, 0].numpy()
        costs, prompt = self.run.costs, self.run.prompt_tokens
        tokens = np.minimum(lengths - begun, rows.meta_info["at_most"])
        again = self.synced or not costs.keeps_cache
        computed = np.where((begun == 0) | again, prompt + begun, 0)
        parts = np.split(np.arange(len(lengths)), self.world_size)
        seconds = [costs.of_call(tokens[p], prompt + begun[p], computed[p]) for p in parts]
        self.synced = False
        sampled = begun + tokens
        columns = {
            fields.RESPONSES: sampled, fields.RESPONSE_MASK: sampled,
            fields.TOKEN_VERSIONS: sampled, fields.ROLLOUT_LOG_PROBS: sampled.astype(np.float32),
            fields.PAUSED: sampled < lengths,
        }  # fmt: skip
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        answers = {k: v if k == fields.PAUSED else v[:, None] for k, v in tensors.items()}
        now = self.run.now
        call = _Call(now + max(seconds), DataProto.from_dict(answers))
        steps = sum(int(tokens[part].max()) for part in parts)
        count = len(lengths) // self.world_size
        span = Span(f"replica {self.number}", "generate", now, call.ends, int(tokens.sum()), count)
        self.run.spans.append(span._replace(steps=steps))
        self.run.in_flight.append(call)
        return call


class Simulation:
    """One run.

    Args:
        lengths: response tokens, of each group (in the order of the data) and its responses. All
            groups are trained; the number of steps follows.
        prompt_tokens: of each row.
    """

    def __init__(
        self, division: Division, costs: Costs, lengths: Counts, prompt_tokens: int = 0
    ) -> None:
        self.division, self.costs, self.prompt_tokens = division, costs, prompt_tokens
        self.now = 0.0
        self.spans: list[Span] = []
        self.in_flight: list[_Call] = []
        self._ages: list[Counts] = []
        self._lengths, self._drawn = lengths, 0
        self._queue = PromptQueue(StalenessBound(division.groups, division.staleness))
        self._most = division.on_the_way or self._queue.bound.most
        count = division.copies if division.apart else 1
        self._replicas = Replicas(self._start, count)
        share = -(-self._most * lengths.shape[1] // division.copies)
        rows = min(division.rows or share, share) * (1 if division.apart else division.copies)
        self._generation = SlicedGeneration(
            self._replicas, self._queue, lambda rows: rows, slice_tokens=division.slice_tokens,
            response_tokens=1, rows=rows, loses=False,
        )  # fmt: skip

    def _start(self, number: int) -> ReplicaGroup:
        size = 1 if self.division.apart else self.division.copies
        return cast("ReplicaGroup", _SimulatedGroup(self, number, size))

    def run(self) -> Timeline:
        """Train all groups, and return what happened."""
        size = self.division.groups
        ends, numbers = [], []
        for step in range(1, len(self._lengths) // size + 1):
            self._queue.ended = step - 1
            self._draw()
            began = self.now
            while (taken := self._queue.take()) is None:
                self._generation.submit()
                self._end_call()
            self._work("controller", "wait for groups", began)
            self._ages.append(np.array([step - 1 - (g.started or 0) for g in taken]))
            numbers.append(np.array([group.number for group in taken]))
            self._train(numbers[-1])
            ends.append(self.now)
        tokens = np.array([self._lengths[of_step].sum() for of_step in numbers])
        return Timeline(
            self.division, self.spans, np.array(ends), tokens, self._ages, numbers
        )

    def _draw(self) -> None:
        """Let prompts begin, as many as may be on their way."""
        left = min(len(self._lengths) - self._drawn, self._most - len(self._queue.groups))
        groups = []
        for number in range(self._drawn, self._drawn + left):
            ids = torch.from_numpy(self._lengths[number])[:, None]
            groups.append(PromptGroup(number, DataProto.from_dict({fields.INPUT_IDS: ids})))
        self._queue.add(groups)
        self._drawn += left

    def _end_call(self) -> None:
        call = min(self.in_flight, key=lambda call: call.ends)
        self.in_flight.remove(call)
        self.now = max(self.now, call.ends)
        for group in self._generation.keep(cast("DataProtoFuture", call)):
            self._queue.ready(group)

    def _train(self, numbers: Counts) -> None:
        """A training step and a weight sync. Replicas on ranks of their own go on meanwhile."""
        began, costs, lengths = self.now, self.costs, self._lengths[numbers]
        tokens = int(lengths.sum()) + self.prompt_tokens * lengths.size
        ends = began + costs.step + costs.train * tokens / self.division.trainers
        while self.division.apart:
            self._generation.submit()
            if not any(call.ends <= ends for call in self.in_flight):
                break
            self._end_call()
        self.now = ends
        self._work("trainer", "train", began, tokens)
        while self.in_flight:  # a weight sync waits for the ends of all calls
            self._end_call()
        began = self.now
        self.now += costs.sync
        self._work("sync", "weights", began)
        for replica in self._replicas.all:
            cast("_SimulatedGroup", replica.group).synced = True

    def _work(self, track: str, name: str, began: float, tokens: int = 0) -> None:
        if self.now > began:
            self.spans.append(Span(track, name, began, self.now, tokens))


def lognormal_lengths(
    groups: int, n: int, *, median: float, sigma: float, limit: int, seed: int
) -> Counts:
    """Draw lengths of responses, in tokens; those beyond the limit are cut."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, (groups, n))
    return np.clip(drawn.round(), 1, limit).astype(np.int64)
