"""The batches of a run whose generation goes on while the policy is trained.

    data ──► PromptQueue ──► SlicedGeneration ──► scores ──► StalenessBound ──► batch of a step

On ranks of their own, the replicas of the rollout generate in a thread of the controller, and
responses are scored in another one as soon as their prompt group is complete. On the ranks of the
actor they generate while a step draws its batch; groups that are not complete then go on in the
next step, with newer weights.

waits for     complete prompt groups of the step, which `StalenessBound.choose` names
unblocked by  the end of calls to the replicas and of scoring; an error of either is raised here
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quadriga.checkpoint.files import SavedFile, digest_file
from quadriga.config.schema import TrainConfig
from quadriga.errors import QuadrigaError
from quadriga.protocol import DataProto, fields
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replicas
from quadriga.streams.staleness import StalenessBound
from quadriga.trainer.record import Metrics, StageResult
from quadriga.trainer.stages import (
    Sampler,
    expand_prompts,
    generation_inputs,
    merged,
    score_responses,
)

FOLDER = "stream"
"""The folder of a checkpoint with the prompt groups on their way."""


@dataclass(eq=False, kw_only=True)
class StreamedSampler(Sampler):
    """Draws the batch of a step from prompt groups that are generated meanwhile.

    Args:
        replicas: of the rollout.
        total_steps: of the run; its last steps begin no more prompts.
        beside: the replicas have ranks of their own, and generate while the actor is trained.
    """

    replicas: Replicas
    total_steps: int
    beside: bool
    queue: PromptQueue = field(init=False)

    def __post_init__(self) -> None:
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        groups, staleness = data.train_batch_size, self.config.trainer.max_staleness
        self.queue = PromptQueue(StalenessBound(groups, staleness))
        share = -(-self.queue.bound.most * rollout.n // self.replicas.count)
        self.generation = SlicedGeneration(
            self.replicas,
            self.queue,
            generation_inputs,
            slice_tokens=rollout.slice_tokens,
            response_tokens=data.max_response_length,
            rows=min(rollout.micro_batch_size, share) if self.beside else share,
            loses=self.beside,
        )
        self._drawn = 0  # batches of prompts
        self._scoring: list[PromptGroup] = []
        self._metrics: list[Metrics] = []  # of the scores since the last step
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._pauses = 0
        self._closed = False

    def draw(self, prompts: DataProto, step: int) -> StageResult:
        """Let prompts begin, and return the batch of a step. Its rows are scored.

        Raises:
            QuadrigaError: a replica or the reward function has failed.
        """
        with self._changed:
            self.queue.ended = step - 1
            while prompts is not None and self._drawn < self.total_steps:
                self.queue.add(self._groups(prompts))
                first = len(self.queue.groups) < self.queue.bound.most
                prompts = next(self.stream) if first and self._drawn < self.total_steps else None
            self._changed.notify_all()
        taken = self._taken_meanwhile() if self.beside else self._taken()
        batch = DataProto.concat([group.batch for group in taken if group.batch is not None])
        scores, self._metrics = self._metrics, []
        return StageResult(batch, {**merged(*scores), **self._staleness(batch, taken)})

    def _groups(self, prompts: DataProto) -> list[PromptGroup]:
        """Return the groups of a batch of prompts, with the seeds that a step would give them."""
        self._drawn += 1
        n, seed = self.config.actor_rollout_ref.rollout.n, self.config.trainer.seed
        rows = self.runner.result(expand_prompts, prompts, n=n, step=self._drawn, seed=seed).batch
        first = (self._drawn - 1) * len(prompts)
        groups = rows.split(n)
        return [PromptGroup(first + i, group) for i, group in enumerate(groups)]

    def _staleness(self, batch: DataProto, taken: Sequence[PromptGroup]) -> Metrics:
        """Measure how old the groups of a step are."""
        ages = np.array([self.queue.ended - (group.started or 0) for group in taken])
        shares = {
            f"staleness/share_{age}": float((ages == age).mean())
            for age in range(self.queue.bound.steps + 1)
        }
        waiting = len(self.queue.waiting)
        return {
            "staleness/mean": float(ages.mean()),
            "staleness/max": float(ages.max()),
            **shares,
            "stream/waiting": float(waiting),
            "stream/started": float(len(self.queue.groups) - waiting),
            "stream/restarted": float(self.queue.restarted),
        }

    # Generation while a step draws its batch

    def _taken(self) -> list[PromptGroup]:
        while (taken := self.queue.take()) is None:
            self.generation.submit()
            ended = self.generation.wait()
            assert ended is not None, "a group that must be trained is on its way"
            self._score(self.generation.keep(ended))
        return taken

    def _score(self, groups: Sequence[PromptGroup]) -> None:
        """Score complete groups in one call of the reward function."""
        complete = [(group, group.batch) for group in groups if group.batch is not None]
        if not complete:
            return
        whole = DataProto.concat([batch for _, batch in complete])
        batch, metrics = self.runner.result(score_responses, whole, self.reward)
        with self._changed:
            self._metrics.append(metrics)
            parts = batch.split(len(batch) // len(complete))
            for (group, before), scored in zip(complete, parts, strict=True):
                if group.batch is before:  # otherwise its replica was lost meanwhile
                    group.batch = scored
                    self.queue.ready(group)
            self._changed.notify_all()

    # Generation in a thread of its own

    def _taken_meanwhile(self) -> list[PromptGroup]:
        if not self._threads:
            for work in (self._generate, self._score_complete):
                thread = threading.Thread(target=self._noting_errors, args=(work,), daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._changed:
            while (taken := self.queue.take()) is None:
                self._raise()
                self._changed.wait()
            return taken

    def _noting_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread of the loop
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _generate(self) -> None:
        def has_work() -> bool:
            can_start = not self._pauses and (self.generation.begun or bool(self.queue.waiting))
            return self._closed or self.generation.busy or can_start

        while not self._closed:
            with self._changed:
                self._changed.wait_for(has_work)
                if not (self._pauses or self._closed):
                    self.generation.submit()
            ended = self.generation.wait()
            with self._changed:
                if ended is not None and not self._closed:
                    complete = self.generation.keep(ended)
                    self._scoring += complete
                self._changed.notify_all()

    def _score_complete(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._scoring)
                groups = list(self._scoring)
            if groups:
                self._score(groups)
            with self._changed:
                self._scoring = self._scoring[len(groups) :]
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block no replica is called, and no response is scored."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: self._error or not (self.generation.busy or self._scoring))
            self._raise()
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads. A call that a replica still computes is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
