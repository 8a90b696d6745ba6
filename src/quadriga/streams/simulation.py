"""A run in virtual time: what a staleness and a division of the ranks would give.

    lengths of the responses ─┐
    seconds of calls, steps ──┼──► PromptQueue, StalenessBound, SlicedGeneration ──► Timeline
    ranks and settings ───────┘

The queue, the bound and the generation are the classes of a real run. The replicas and the trainer
only add seconds (`Costs`) to a clock, so nothing sleeps, and equal arguments give equal results.
Scoring takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import ReplicaGroup, Replicas
from quadriga.streams.staleness import StalenessBound
from quadriga.streams.timeline import Counts, RecordedCall, Span
from quadriga.workers.method_fields import BEGUN_RESPONSES

_FIT_ROUNDS, _LEAST_RCOND, _MOST_RCOND = 20, 1e-6, 0.01
"""How often the slowest copies are chosen anew, and between which bounds the share of the largest
singular value is below which others are dropped, so that costs that the calls cannot tell apart
become equal. In between it is the share of the seconds that no costs explain."""


@dataclass(frozen=True)
class Costs:
    """Seconds of the work of a run.

    Attributes:
        decode: a decoding step of one copy of the weights.
        decode_row: more of a step for each row.
        decode_context: more of a step for each token that its rows attend to.
        prefill: a token of a row that begins or, after a weight sync, is continued.
        call: a call to a replica besides.
        train: a token of a training step, on one rank.
        step: a training step besides.
        sync: a weight sync.
    """

    decode: float
    decode_row: float = 0.0
    decode_context: float = 0.0
    prefill: float = 0.0
    call: float = 0.0
    train: float = 0.0
    step: float = 0.0
    sync: float = 0.0

    def of_call(self, tokens: Counts, contexts: Counts, computed: Counts) -> float:
        """Return the seconds of a call on one copy.

        Args:
            tokens: that each row decodes.
            contexts: tokens of each row before.
            computed: tokens of each row before, if the call has to compute them.
        """
        seconds = self.call + self.decode * tokens.max() + self.decode_row * tokens.sum()
        seconds += self.decode_context * attended(tokens, contexts).sum()
        return float(seconds + self.prefill * computed.sum())

    @classmethod
    def of_calls(cls, calls: Sequence[RecordedCall], prompt_tokens: int, copies: int) -> Costs:
        """Fit the costs of the calls of a run; none is negative.

        Args:
            copies: of the weights that share the rows of a call, which ends with the slowest one.
        """

        def parts_of(call: RecordedCall) -> list[Sequence[float]]:
            anew = (call.before == 0) | call.synced
            contexts = call.before + prompt_tokens
            parts = call.tokens, attended(call.tokens, contexts), contexts * anew
            split = np.array_split(np.stack(parts), copies, axis=1)
            return [
                (1, own.max(initial=0), own.sum(), of.sum(), new.sum()) for own, of, new in split
            ]

        parts = np.array(list(map(parts_of, calls)), dtype=float)
        seconds = np.array([call.seconds for call in calls])
        call, decode, row, context, prefill = fit_costs(parts, seconds)
        return cls(decode, row, context, prefill, call)


def attended(tokens: Counts, contexts: Counts | int) -> Counts:
    """Return how many tokens each row attends to while it decodes `tokens` behind `contexts`."""
    return tokens * contexts + tokens * (tokens - 1) // 2


def fit_costs(parts: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> list[float]:
    """Return the seconds of one unit of each part of the work, none negative.

    Args:
        parts: [calls, copies, parts], units of the work of each copy. A call ends with the slowest.
        seconds: [calls].
    """
    scale = parts.mean((0, 1)).clip(1e-9)
    parts, fitted = parts / scale, np.ones(len(scale))
    for _ in range(_FIT_ROUNDS):
        slowest = parts[np.arange(len(seconds)), (parts @ fitted).argmax(1)]
        used, spare = np.arange(len(scale)), max(len(seconds) - len(scale), 1e-9)
        rest = seconds - slowest @ np.linalg.lstsq(slowest, seconds, _LEAST_RCOND)[0]
        unexplained = np.sqrt((rest @ rest) / (seconds @ seconds) * len(seconds) / spare)
        rcond = np.clip(unexplained, _LEAST_RCOND, _MOST_RCOND) if spare >= 1 else _MOST_RCOND
        while (found := np.linalg.lstsq(slowest[:, used], seconds, rcond)[0]).min() < 0:
            used = np.delete(used, found.argmin())
        fitted = np.zeros(len(scale))
        fitted[used] = found
    return cast("list[float]", (fitted / scale).tolist())


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
        resets_caches: a weight sync frees the keys and values of rows that go on.
    """

    trainers: int
    copies: int
    apart: bool
    groups: int
    staleness: int
    slice_tokens: int
    rows: int | None = None
    on_the_way: int | None = None
    resets_caches: bool = True


@dataclass(frozen=True)
class Timeline:
    """What a run did.

    Attributes:
        ends: the end of each step.
        numbers: the groups of each step.
        ages: their ages, in training steps.
        tokens: the response tokens of each step.
    """

    spans: Sequence[Span]
    ends: npt.NDArray[np.float64]
    numbers: Counts
    ages: Counts
    tokens: Counts

    @property
    def _steady(self) -> tuple[int, int]:
        """Two steps, between which the run neither begins nor ends: it has fewer groups then."""
        steps, k = len(self.ends), int(self.ages.max())
        return (2 * k, steps - 1 - k) if steps > 3 * k + 1 else (0, steps - 1)

    @property
    def step_seconds(self) -> float:
        """The time of a step in the steady state."""
        first, last = self._steady
        return float(self.ends[last] - self.ends[first]) / (last - first)

    @property
    def tokens_per_second(self) -> float:
        """Response tokens trained per second in the steady state."""
        first, last = self._steady
        return float(self.tokens[first + 1 : last + 1].mean()) / self.step_seconds

    def share(self, track: str) -> float:
        """The share of the steady state in which the tracks whose names begin so work."""
        first, last = self.ends[list(self._steady)]
        own = [span for span in self.spans if span.track.startswith(track)]
        worked = sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in own)
        return float(worked / (last - first) / max(1, len({span.track for span in own})))


@dataclass(frozen=True, eq=False)
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
        run = self.run
        lengths = rows.batch[fields.INPUT_IDS].numpy()
        begun = np.zeros_like(lengths)
        if fields.RESPONSES in rows.batch.keys():  # noqa: SIM118
            begun = rows.batch[fields.RESPONSES].numpy()
        tokens = np.minimum(lengths - begun, rows.meta_info["at_most"])
        contexts = begun + run.prompt_tokens
        computed = contexts * ((begun == 0) | (self.synced and run.division.resets_caches))
        self.synced = False
        parts = [np.split(column, self.world_size) for column in (tokens, contexts, computed)]
        ends = run.now + max(map(run.costs.of_call, *parts))
        answers = dict.fromkeys(BEGUN_RESPONSES, torch.from_numpy(begun + tokens))
        answers[fields.PAUSED] = torch.from_numpy(begun + tokens < lengths)[:, 0]
        call = _Call(ends, DataProto.from_dict(answers))
        run.in_flight.append(call)
        run.note(f"replica {self.number}", "generate", run.now, ends, int(tokens.sum()))
        return call


class Simulation:
    """One run, which trains all groups.

    Args:
        lengths: response tokens, of each group (in the order of the data) and its responses.
        prompt_tokens: of each row.
    """

    def __init__(
        self, division: Division, costs: Costs, lengths: Counts, prompt_tokens: int = 0
    ) -> None:
        self.division, self.costs, self.prompt_tokens = division, costs, prompt_tokens
        self.now = 0.0
        self.in_flight: list[_Call] = []
        self._spans: list[Span] = []
        self._lengths, self._drawn = lengths, 0
        bound = StalenessBound(division.groups, division.staleness)
        most = min(division.on_the_way or bound.most, bound.most)
        self._queue = PromptQueue(bound, most, overlaps=division.apart)
        replicas, size = (division.copies, 1) if division.apart else (1, division.copies)
        self._groups = [_SimulatedGroup(self, number, size) for number in range(replicas)]
        share = -(-self._queue.most * lengths.shape[1] // division.copies)
        self._generation = SlicedGeneration(
            Replicas(lambda number: cast("ReplicaGroup", self._groups[number]), replicas),
            self._queue, lambda rows: rows, slice_tokens=division.slice_tokens, response_tokens=1,
            rows=size * min(division.rows or share, share), loses=False, note=lambda *_, **__: None,
        )  # fmt: skip

    def run(self) -> Timeline:
        """Train all groups, and return what happened."""
        ends, ages, numbers = [], [], []
        for step in range(len(self._lengths) // self.division.groups):
            self._queue.ended, began = step, self.now
            self._draw()
            while (taken := self._queue.take()) is None:
                self._generation.submit()
                self._end_call()
            self.note("controller", "wait for prompt groups", began, self.now)
            ages.append([step - (group.started or 0) for group in taken])
            numbers.append([group.number for group in taken])
            self._train(self._lengths[numbers[-1]])
            ends.append(self.now)
        tokens = self._lengths[numbers].sum((1, 2))
        return Timeline(self._spans, np.array(ends), np.array(numbers), np.array(ages), tokens)

    def note(self, track: str, name: str, start: float, end: float, tokens: int = 0) -> None:
        """Add a span."""
        self._spans.append(Span(track, name, start, end, tokens))

    def _draw(self) -> None:
        """Let prompts begin, as many as may be on their way."""
        end = self._drawn + self._queue.most - len(self._queue.groups)
        lengths = torch.from_numpy(self._lengths[self._drawn : end, :, None])
        prompts = [DataProto.from_dict({fields.INPUT_IDS: own}) for own in lengths]
        self._queue.add([PromptGroup(i, own) for i, own in enumerate(prompts, self._drawn)])
        self._drawn += len(prompts)

    def _end_call(self) -> None:
        """Go on to the end of the next call that ends."""
        call = min(self.in_flight, key=lambda call: call.ends)
        self.in_flight.remove(call)
        self.now = call.ends
        for group in self._generation.keep(cast("DataProtoFuture", call)):
            self._queue.ready(group)

    def _train(self, lengths: Counts) -> None:
        """A training step and a weight sync. Replicas on ranks of their own go on meanwhile."""
        costs, began = self.costs, self.now
        tokens = int((lengths + self.prompt_tokens).sum())
        trained = began + costs.step + costs.train * tokens / self.division.trainers
        while self.division.apart:
            self._generation.submit()
            if all(call.ends > trained for call in self.in_flight):
                break
            self._end_call()
        self.note("trainer", "train", began, trained, tokens)
        while self.in_flight:  # a weight sync waits for the ends of all calls
            self._end_call()
        began = max(self.now, trained)
        self.now = began + costs.sync
        self.note("sync", "weights", began, self.now)
        for group in self._groups:
            group.synced = True
