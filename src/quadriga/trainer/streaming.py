"""The batches of a run whose generation goes on while the policy is trained.

    data ──► PromptQueue ──► SlicedGeneration ──► scores ──► StalenessBound ──► batch of a step

On ranks of their own, the replicas of the rollout generate in a thread of the controller, and
responses are scored in another one as soon as their prompt group is complete. On the ranks of the
actor, and on the local backend, they generate while a step draws its batch; groups that are not
complete then go on in the next step, with newer weights.

waits for     complete prompt groups of the step, which `StalenessBound.choose` names
unblocked by  the end of calls to the replicas and of scoring; an error of either is raised here
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from quadriga.checkpoint.files import SavedFile, digest_file
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, FieldError
from quadriga.observability.jsonl import JsonlFile, keep_rows, read_jsonl
from quadriga.observability.run_folder import STREAM
from quadriga.protocol import DataProto
from quadriga.streams.generation import Members, SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replicas
from quadriga.streams.staleness import StalenessBound
from quadriga.trainer.checkpoints import STREAMED
from quadriga.trainer.dataflow import EXPAND_PROMPTS, SCORE
from quadriga.trainer.record import Metrics, StageResult
from quadriga.trainer.stages import (
    BatchReward,
    StageRunner,
    expand_prompts,
    generation_inputs,
    merged,
    score_responses,
)
from quadriga.workers.method_fields import GENERATE_SEQUENCES

Pause = Literal["sync", "validate", "save"]
"""For what the generation is paused."""
_PROMPTS, _ENDED, _BEGUN, _READY = (
    f"{name}.batch" for name in ("prompts", "ended", "begun", "ready")
)


@dataclass(eq=False)
class StreamedSampler:
    """Draws the batch of a step from prompt groups that are generated meanwhile.

    Args:
        replicas: of the rollout.
        reward: scores a batch.
        stream: batches of prompts without end; the first step draws more of them.
        runner: runs the stages.
        total_steps: of the run; its last steps begin no more prompts.
        apart: the replicas have ranks of their own, and one may be lost.
        beside: they generate in a thread, while the actor is trained.
    """

    config: TrainConfig
    replicas: Replicas
    reward: BatchReward
    stream: Iterator[DataProto]
    runner: StageRunner
    total_steps: int
    apart: bool
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
            rows=min(rollout.micro_batch_size, share) if self.apart else share,
            # A run that is repeated has kept the rows of all its replicas.
            kept_rows=share if self.config.trainer.replay_order else rollout.micro_batch_size,
            loses=self.apart,
            note=self._note,
        )
        trainer, record = self.config.trainer, self.runner.record
        self._calls = None if record is None else JsonlFile(record.folder.stream)
        replayed = trainer.replay_order
        self._script = None if replayed is None else read_jsonl(Path(replayed) / STREAM)
        # Stages of added roles are run by the thread of the loop, on whole batches.
        early = EXPAND_PROMPTS.name, GENERATE_SEQUENCES.name, SCORE
        self._roles_score = any(placed.stage.neighbour in early for placed in self.runner.added)
        self._n = rollout.n
        self._drawn = 0  # batches of prompts
        self._scoring: dict[PromptGroup, DataProto] = {}  # groups whose scores are awaited
        self._metrics: list[tuple[int, Metrics]] = []  # rows that were scored since the last step
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._pauses = 0
        self._closed = False

    def draw(self, step: int) -> StageResult:
        """Let prompts begin, and return the batch of a step. Its rows are scored.

        Raises:
            QuadrigaError: a replica or the reward function has failed.
        """
        with self._changed:
            self.queue.ended = step - 1
            if not self._drawn:
                self._note("settings", self._settings())
            while self._drawn < self.total_steps and not self.queue.full:
                self._begin(next(self.stream))
            self._changed.notify_all()
        taken = self._taken_meanwhile() if self.beside else self._taken()
        self._note("take", [group.number for group in taken])
        batch = DataProto.concat([group.batch for group in taken if group.batch is not None])
        with self._changed:
            scores, self._metrics = self._metrics, []
        if self._roles_score:
            batch = self.runner.beside("after", GENERATE_SEQUENCES.name, batch)
            batch, metrics = self.runner.result(score_responses, batch, self.reward)
            scores.append((len(batch), metrics))
        scored = merged(*(own for _, own in scores), rows=[rows for rows, _ in scores])
        return StageResult(batch, {**scored, **self._staleness(taken)})

    def _begin(self, prompts: DataProto) -> None:
        """Add the groups of a batch of prompts, with the seeds that a step would give them."""
        self._drawn += 1
        seed, step = self.config.trainer.seed, self._drawn
        rows = self.runner.result(expand_prompts, prompts, n=self._n, step=step, seed=seed).batch
        rows = self.runner.beside("before", GENERATE_SEQUENCES.name, rows)
        if not self.queue.groups:
            self._check_saved(rows)
        first = (step - 1) * len(prompts)
        groups = enumerate(rows.split(self._n), first)
        self.queue.add([PromptGroup(number, own) for number, own in groups])

    def _check_saved(self, rows: DataProto) -> None:
        """Raise `FieldError` for prompts that no checkpoint can hold, before a step is trained."""
        with TemporaryDirectory() as folder:
            try:
                rows.save_to_disk(Path(folder) / _PROMPTS)
            except FieldError as error:
                key = f"trainer.max_staleness={self.config.trainer.max_staleness}"
                text = f"{key} saves the prompts on their way with each checkpoint, but {error}"
                raise FieldError(text) from error

    def _staleness(self, taken: Sequence[PromptGroup]) -> Metrics:
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
        if self._script is not None:
            groups = self.queue.pop(self._repeat("take"))
            self._repeat("sync")  # with the weights that the step is to change
            return groups
        while (taken := self.queue.take()) is None:
            self.generation.submit()
            assert self.generation.busy, "a group that must be trained is on its way"
            self._end_call()
        if not self.apart:  # the actor needs the memory
            self.generation.forget_caches()
        return taken

    def _end_call(self) -> None:
        if (ended := self.generation.wait()) is not None:
            self._score(_batches(self.generation.keep(ended)))

    def _score(self, complete: Mapping[PromptGroup, DataProto]) -> None:
        """Score complete groups in one call of the reward function."""
        parts = list(complete.values())
        if parts and not self._roles_score:
            whole = DataProto.concat(parts)
            batch, metrics = self.runner.result(score_responses, whole, self.reward)
            parts = batch.split(len(batch) // len(complete))
            with self._changed:
                self._metrics.append((len(batch), metrics))
        with self._changed:
            for (group, before), scored in zip(complete.items(), parts, strict=True):
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
            self.generation.reclaim()
            self._changed.notify_all()
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
                    self._scoring |= _batches(self.generation.keep(ended))
                self._changed.notify_all()

    def _score_complete(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._scoring)
                complete = dict(self._scoring)
            self._score(complete)
            with self._changed:
                for group, batch in complete.items():
                    if self._scoring[group] is batch:  # otherwise it is complete again
                        del self._scoring[group]
                self._changed.notify_all()

    @contextmanager
    def paused(self, why: Pause) -> Iterator[None]:
        """Within the block no replica is called. During a validation no response is scored,
        because it calls the reward function, too."""

        def at_work() -> bool:
            return self.generation.busy or (why == "validate" and bool(self._scoring))

        with self._changed:
            self._pauses += 1
            while not self.beside and self.generation.busy:
                self._end_call()
            self._changed.wait_for(lambda: self._error or not at_work())
            self._raise()
            self._note(why, [])
            if why != "sync" and self._script is None:
                self.generation.forget_caches()
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    # Checkpoints

    def save(self, checkpoint: Path) -> list[SavedFile]:
        """Write the prompt groups on their way, with their responses so far, to a checkpoint.

        The caller has paused the generation.
        """
        with self._changed:  # a group whose scores come now is saved without them
            return self._save(checkpoint / STREAMED)

    def _save(self, folder: Path) -> list[SavedFile]:
        groups = list(self.queue.groups.values())
        first = {group.number: i * self._n for i, group in enumerate(groups)}
        members, begun = self.generation.paused_rows()
        ready = self.queue.complete
        ended = [(g, *answer) for g in groups if g not in ready for answer in g.answers]
        parts = {
            _PROMPTS: [group.prompts for group in groups],
            _ENDED: [answers for _, _, answers in ended],
            _BEGUN: begun,
            _READY: [group.batch for group in ready if group.batch is not None],
        }
        meta: dict[str, dict[str, object]] = {
            _PROMPTS: {
                "drawn": self._drawn,
                "numbers": list(first),
                "started": [group.started for group in groups],
            },
            _ENDED: {"rows": [first[g.number] + int(row) for g, rows, _ in ended for row in rows]},
            _BEGUN: {"rows": [first[g.number] + int(row) for g, rows in members for row in rows]},
            _READY: {"rows": [first[g.number] + row for g in ready for row in range(self._n)]},
        }
        folder.mkdir()
        files = []
        for name, batches in parts.items():
            if batches:
                path = folder / name
                batch = DataProto.concat(batches)
                batch.meta_info = meta[name]
                batch.save_to_disk(path)
                files.append(SavedFile(path.name, path.stat().st_size, digest_file(path)))
        return [file.under(STREAMED) for file in files]

    def load(self, checkpoint: Path | None, step: int) -> None:
        """Continue with the prompt groups that were on their way at the end of a step; None: with
        none of them.
        """
        self._drawn = self.queue.ended = step
        self._forget_calls_after(step)
        self._note("settings", self._settings())
        if checkpoint is None:
            return
        files = {name: checkpoint / STREAMED / name for name in (_PROMPTS, _ENDED, _BEGUN, _READY)}
        saved = {n: DataProto.load_from_disk(path) for n, path in files.items() if path.exists()}
        if _PROMPTS not in saved:  # no group was
            return
        meta = {name: batch.meta_info for name, batch in saved.items()}
        for batch in saved.values():
            batch.meta_info = {}
        numbers, prompts = meta[_PROMPTS]["numbers"], saved[_PROMPTS]
        self._drawn = meta[_PROMPTS]["drawn"]
        groups = list(map(PromptGroup, numbers, prompts.split(self._n), meta[_PROMPTS]["started"]))
        self.queue.add(groups)
        members, tokens = Members(), []
        for name in set(saved) - {_PROMPTS}:
            rows = np.array(meta[name]["rows"])
            for i in dict.fromkeys((rows // self._n).tolist()):  # in the order of the rows
                places = np.flatnonzero(rows // self._n == i)
                group, own = groups[i], saved[name].select_idxs(places)
                if name == _READY:
                    group.batch = own
                    self.queue.ready(group)
                elif name == _ENDED:
                    group.end(rows[places] % self._n, own)
                else:
                    members.append((group, rows[places] % self._n))
                    tokens.append(own)
        self.generation.go_on(members, tokens)
        ready = self.queue.complete
        self._scoring = _batches(group for group in groups if group not in ready)
        if not self.beside:
            self._score(self._scoring)
            self._scoring = {}

    def close(self) -> None:
        """End the threads. A call that a replica still computes is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._calls is not None:
            self._calls.close()

    # The order of the calls

    def _forget_calls_after(self, step: int) -> None:
        """Remove the events after the checkpoint of a step, which a resumed run writes again."""
        if self._calls is None:
            return
        path, last = self._calls.path, 0
        for number, event in enumerate(read_jsonl(path), 1):
            last = number if "save" in event and int(event["step"]) <= step else last
        numbers = count(1)
        self._calls.close()
        keep_rows(path, lambda _: next(numbers) <= last)
        self._calls = JsonlFile(path)

    def _note(self, event: str, numbers: Sequence[object]) -> None:
        """Write what decides on the tokens of the run, one event a line: the rows of each call, the
        groups that each step takes, and where weights and checkpoints come between."""
        if self._calls is not None and not self._closed:
            self._calls.write({"step": self.queue.ended + 1, event: numbers})

    def _settings(self) -> list[int]:
        """Return the settings that a run must have to repeat the order of another one."""
        bound = self.queue.bound
        slice_tokens = self.config.actor_rollout_ref.rollout.slice_tokens
        return [bound.groups, bound.steps, self._n, slice_tokens, self.total_steps]

    def _repeat(self, until: str) -> list[int]:
        """Make the calls of the run that is repeated, up to an event. Return its numbers."""
        assert self._script is not None
        step = self.queue.ended + 1
        for event in self._script:
            if event["step"] > step:
                if until == "take":
                    break
                self._script = chain([event], self._script)
                return []  # the step was without a weight sync
            self.queue.ended = event["step"] - 1
            if "call" in event:
                rows = [(number, row) for number, row in event["call"]]
                self._score(_batches(self.generation.repeat(rows)))
            elif "restart" in event:
                self.generation.forget(event["restart"])
            elif "validate" in event or "save" in event:
                self.generation.forget_caches()
            elif until in event:
                numbers: list[int] = event[until]
                return numbers
            elif event.get("settings", self._settings()) != self._settings():
                break
        raise ConfigError(
            f"trainer.replay_order={self.config.trainer.replay_order} does not fit this run at "
            f"step {self.queue.ended + 1}: repeat it with its data.train_batch_size, "
            "rollout.n, rollout.slice_tokens, trainer.max_staleness and number of steps",
            key="trainer.replay_order",
        )


def _batches(groups: Iterable[PromptGroup]) -> dict[PromptGroup, DataProto]:
    return {group: group.batch for group in groups if group.batch is not None}
