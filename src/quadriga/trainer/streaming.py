"""The batches of a run whose generation goes on while the policy is trained.

    data ──► PromptQueue ──► SlicedGeneration ──► scores ──► StalenessBound ──► batch of a step

On ranks of their own, the replicas of the rollout generate in a thread of the controller, and
responses are scored in another one as soon as their prompt group is complete. On the ranks of the
actor, and on the local backend, they generate while a step draws its batch; groups that are not
complete then go on in the next step, with newer weights.

waits for     complete prompt groups of the step, which `StalenessBound.choose` names
unblocked by  the end of calls to the replicas and of scoring; an error of either is raised here
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from quadriga.algorithms.advantages import get_advantage
from quadriga.checkpoint.files import SavedFile
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, FieldError
from quadriga.observability.jsonl import JsonlFile, keep_rows
from quadriga.observability.run_folder import STREAM
from quadriga.protocol import DataProto
from quadriga.streams.episodes import Episodes
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Applying, Replicas
from quadriga.streams.saved import load_groups, save_groups, without_images
from quadriga.streams.staleness import StalenessBound
from quadriga.streams.timeline import StreamEvent, read_events
from quadriga.trainer import stages
from quadriga.trainer.checkpoints import STREAMED
from quadriga.trainer.dataflow import EARLY
from quadriga.trainer.record import Metrics, StageResult, spans_of_versions
from quadriga.workers.method_fields import GENERATE_SEQUENCES

_STEPS = 4
"""The place of the number of steps in `StreamedSampler._settings`."""


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
        overlaps: they generate in a thread, while the actor is trained.
        episodes: None: responses are one turn.
    """

    config: TrainConfig
    replicas: Replicas
    reward: stages.BatchReward
    stream: Iterator[DataProto]
    runner: stages.StageRunner
    total_steps: int
    apart: bool
    overlaps: bool
    episodes: Episodes | None = None
    queue: PromptQueue = field(init=False)

    def __post_init__(self) -> None:
        data, rollout = self.config.data, self.config.actor_rollout_ref.rollout
        self._update = rollout.update
        bound = StalenessBound(data.train_batch_size, self.config.trainer.max_staleness)
        most = math.ceil((rollout.oversample or bound.steps + 1) * bound.groups - 1e-6)
        self.queue = PromptQueue(bound, most, overlaps=self.overlaps)
        self._greedy = get_advantage(self.config.algorithm.adv_estimator).needs_baseline_scores
        self._n = rollout.n + self._greedy  # rows of a prompt, with the greedy one
        share = -(-self.queue.most * self._n // self.replicas.count)
        self.generation = SlicedGeneration(
            self.replicas,
            self.queue,
            stages.generation_inputs,
            slice_tokens=rollout.slice_tokens,
            response_tokens=data.max_response_length,
            rows=min(rollout.micro_batch_size, share) if self.apart else share,
            # A run that is repeated has kept the rows of all its replicas.
            kept_rows=share if self.config.trainer.replay_order else rollout.micro_batch_size,
            episodes=self.episodes,
            loses=self.apart,
            note=self._note,
        )
        trainer, record = self.config.trainer, self.runner.record
        self._calls = None if record is None else JsonlFile(record.folder.stream)
        replayed = trainer.replay_order
        events = in_order(Path(replayed) / STREAM) if replayed else []
        self._script = iter(events) if replayed else None
        # The last settings of the run that is repeated.
        self._last = [[], *(event.numbers for event in events if event.name == "settings")][-1]
        # Stages of added roles are run by the thread of the loop, on whole batches.
        self._roles_score = any(placed.stage.neighbour in EARLY for placed in self.runner.added)
        self._drawn = 0  # batches of prompts
        # Prompt groups without variance that were dropped: since the last step, and in all.
        self._dropped, self._all_dropped = 0, 0
        self._scoring: dict[PromptGroup, DataProto] = {}  # groups whose scores are awaited
        self._metrics: list[tuple[int, Metrics]] = []  # rows that were scored since the last step
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._pauses, self._closed, self._drains = 0, False, False  # drains: rows go on, none begin

    def draw(self, step: int) -> StageResult:
        """Let prompts begin, and return the batch of a step. Its rows are scored.

        Raises:
            QuadrigaError: a replica or the reward function has failed.
        """
        with self._changed:
            self.queue.ended = step - 1
            if not self._drawn:
                self._note("settings", self._settings())
            self._fill()
        taken = self._take_ready() if self.overlaps else self._take_in_turns()
        self._note("take", [group.number for group in taken])
        batch = DataProto.concat([group.batch for group in taken if group.batch is not None])
        self._note("versions", spans_of_versions(batch))
        with self._changed:
            scores, self._metrics, self._dropped = self._metrics, [], 0
        if self._roles_score:
            batch = self.runner.run_added("after", batch, GENERATE_SEQUENCES.name)
            batch, metrics = self.runner.result(stages.score_responses, batch, self.reward)
            scores.append((len(batch), metrics))
        scored = stages.merged(*(own for _, own in scores), rows=[rows for rows, _ in scores])
        return StageResult(batch, {**scored, **_staleness(self.queue, taken), **self._counts()})

    def _fill(self) -> None:
        """Let prompts begin, until the groups on their way are as many as may be, or all that the
        rest of the run trains."""
        left = (self.total_steps - self.queue.ended) * self.queue.bound.groups
        with self._changed:
            while self._script is None and len(self.queue.groups) < min(self.queue.most, left):
                self._begin()
            self._changed.notify_all()

    def _begin(self) -> None:
        """Add the groups of a batch of prompts, with the seeds that a step would give them."""
        prompts = next(self.stream)
        self._drawn += 1
        self._note("begin", [self._drawn])
        n, step, seed = self._n - self._greedy, self._drawn, self.config.trainer.seed
        rows = self.runner.result(stages.expand_prompts, prompts, n=n, step=step, seed=seed).batch
        if self._greedy:
            rows = stages.add_greedy_rows(rows, n)
        rows = self.runner.run_added("before", rows, GENERATE_SEQUENCES.name)
        if not self.queue.groups:
            _check_saved(rows, self.config)
        first = (step - 1) * len(prompts)
        groups = enumerate(rows.split(self._n), first)
        self.queue.add([PromptGroup(number, own) for number, own in groups])

    def _counts(self) -> Metrics:
        """Count the groups on their way, and the groups that the run has moved or dropped."""
        waiting = len(self.queue.waiting)
        return {
            "stream/waiting": float(waiting),
            "stream/started": float(len(self.queue.groups) - waiting),
            "stream/restarted": float(self.queue.restarted),
            "stream/moved": float(self.generation.moved),
            "stream/dropped": float(self._all_dropped),
        }

    # Generation while a step draws its batch

    def _take_in_turns(self) -> list[PromptGroup]:
        if self._script is not None:
            groups = self.queue.pop(self._repeat("take"))
            self._repeat("sync")  # with the weights that the step is to change
            return groups
        while (taken := self.queue.take()) is None:
            self._fill()
            self.generation.submit()
            assert self.generation.has_rows, "a group that must be trained is on its way"
            self._end_call()
        # Now: after the update, an engine that shares the weights of the actor cannot generate.
        drains = self._update == "drain"
        while self.generation.has_rows if drains else self.generation.calling:
            if drains:
                self.generation.submit(joins=False)
            self._end_call()
        if not self.apart:  # the actor needs the memory
            self.generation.forget_caches()
        return taken

    def _end_call(self) -> None:
        self._score(_batches(self.generation.keep(self.generation.wait())))

    def _score(self, complete: Mapping[PromptGroup, DataProto]) -> None:
        """Score complete groups in one call of the reward function."""
        parts, algorithm = list(complete.values()), self.config.algorithm
        if parts and not self._roles_score:
            whole, began = DataProto.concat(parts), time.perf_counter()
            batch, metrics = self.runner.result(stages.score_responses, whole, self.reward)
            self._note("score", [g.number for g in complete], seconds=time.perf_counter() - began)
            if self._greedy:
                batch = stages.take_greedy_rows(batch, self._n)
            parts = batch.split(len(batch) // len(complete))
            with self._changed:
                self._metrics.append((len(batch), metrics))
        with self._changed:
            for (group, before), scored in zip(complete.items(), parts, strict=True):
                if group.batch is before:  # otherwise its replica was lost meanwhile
                    group.batch = scored
                    self.queue.ready(group)
                    drawn = 1 + self._dropped // self.queue.bound.groups
                    decides = algorithm.filter_groups.refills and self._script is None
                    if decides and stages.sampled(scored, algorithm, 1, drawn).action == "refill":
                        self._drop([group.number])
            self._changed.notify_all()

    def _drop(self, numbers: Sequence[int]) -> None:
        self._note("drop", numbers)
        self.queue.remove(numbers)
        self._dropped += 1
        self._all_dropped += 1

    # Generation in a thread of its own

    def _take_ready(self) -> list[PromptGroup]:
        if not self._threads:
            for work in (self._generate, self._score_complete):
                thread = threading.Thread(target=self._noting_errors, args=(work,), daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._changed:
            self.generation.reclaim()
            self._changed.notify_all()
            while (taken := self.queue.take()) is None:
                if self._error is not None:
                    raise self._error
                self._fill()
                self._changed.wait()
            self._changed.notify_all()  # groups may begin in the place of these
            return taken

    def _noting_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread of the loop
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _generate(self) -> None:
        def waits() -> bool:
            return self.generation.calling or self.generation.acting

        def calls() -> bool:
            begun = bool(self.generation.paused) and (self._drains or not self._pauses)
            return begun or (self.queue.can_start and not self._pauses)

        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or waits() or calls())
                if calls() and not self._closed:
                    self.generation.submit(joins=not self._pauses)
            ended = self.generation.wait()
            with self._changed:
                if not self._closed:
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
    def syncing(self) -> Iterator[Applying | None]:
        """Within the block the replicas receive weights. In flight they go on generating, and the
        value is a context manager: calls submitted before it is entered use the old weights.
        Otherwise, also if a replica is to be started again, it is None, and none is called."""
        in_flight = self._update == "in_flight" and self.overlaps
        if in_flight and not any(True for _ in self.replicas.to_start()):
            yield self._between_calls
            return
        with self.paused("sync"):
            yield None

    @contextmanager
    def paused(self, event: Literal["sync", "validate", "save"]) -> Iterator[None]:
        """Within the block no replica is called. During a validation no response is scored,
        because it calls the reward function, too. With `rollout.update=drain` the responses that
        have begun end before a sync."""

        def goes_on() -> bool:
            calls = self.generation.has_rows if self._drains else self.generation.calling
            return calls or (event == "validate" and bool(self._scoring))

        with self._changed:
            self._pauses += 1
            self._drains = self.overlaps and event == "sync" and self._update == "drain"
            self._changed.wait_for(lambda: self._error or not goes_on())
            self._drains = False
            if self._error is not None:
                raise self._error
            self._note(event, [])
            began = time.perf_counter()
            if event != "sync" and self._script is None:
                self.generation.forget_caches()
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._note("resume", [event], seconds=time.perf_counter() - began)
                self._changed.notify_all()

    @contextmanager
    def _between_calls(self) -> Iterator[None]:
        """Within the block no call is submitted: those before have the weights of before."""
        with self._changed:
            self._note("sync", [])
            yield

    # Checkpoints

    def save(self, checkpoint: Path) -> list[SavedFile]:
        """Write the prompt groups on their way, with their responses so far, to a checkpoint.

        The caller has paused the generation.
        """
        with self._changed:  # a group whose scores come now is saved without them
            (folder := checkpoint / STREAMED).mkdir()
            about = {
                "drawn": self._drawn, "dropped": self._dropped, "all_dropped": self._all_dropped,
                "restarted": self.queue.restarted, "moved": self.generation.moved,
                "scored": [list(scored) for scored in self._metrics],
            }  # fmt: skip
            files = save_groups(folder, self.queue, self.generation, about)
            return [file.under(STREAMED) for file in files]

    def load(self, checkpoint: Path | None, step: int) -> None:
        """Continue with the prompt groups that were on their way at the end of a step; None: with
        none of them.
        """
        self._drawn = self.queue.ended = self.queue.taken = step
        if self._calls is not None:
            self._calls, self.generation.synced = _resumed(self._calls, step)
        self._note("settings", self._settings())
        if checkpoint is None:
            return
        found = load_groups(checkpoint / STREAMED, self.queue, self.generation)
        if found:
            self._drawn, self._dropped = found["drawn"], found["dropped"]
            self._all_dropped, self.queue.restarted = found["all_dropped"], found["restarted"]
            self.generation.moved = found["moved"]
            self._metrics = [(rows, metrics) for rows, metrics in found["scored"]]
        groups = self.queue.groups.values()
        ready = self.queue.complete
        self._scoring = _batches(group for group in groups if group not in ready)
        if not self.overlaps:
            self._score(self._scoring)
            self._scoring = {}

    def close(self) -> None:
        """End the threads. A call that a replica still computes is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.generation.close()
        if self._calls is not None:
            self._calls.close()

    def wait_ended(self) -> None:
        """Wait a minute at most until each thread has ended, after `close` and the end of the
        replicas: the next sampler calls the same reward function."""
        for thread in self._threads:
            thread.join(60.0)

    # The order of the calls

    def _note(
        self, event: str, numbers: Sequence[object], ended: int | None = None, **more: float
    ) -> None:
        """Write what decides on the tokens of the run, one event a line: the rows of each call, the
        groups that each step takes, and where weights and checkpoints come between. Beside these
        the versions of the tokens that a step trains, and times: `seconds` is what ends now took.
        """
        record, step = self.runner.record, 1 + (self.queue.ended if ended is None else ended)
        if event == "sync":
            self.generation.synced = step
        if self._calls is not None and record is not None and not self._closed:
            self._calls.write({"step": step, event: numbers, "at": record.elapsed, **more})

    def _settings(self) -> list[int]:
        """Return what a run must have to repeat another one; with an eighth number, none can."""
        bound, rollout = self.queue.bound, self.config.actor_rollout_ref.rollout
        sampled = self._n, rollout.slice_tokens, self.total_steps, self.generation.response_tokens
        own = [bound.groups, bound.steps, *sampled, self.config.trainer.seed]
        return own if rollout.reset_caches else [*own, 0]

    def _repeat(self, until: str) -> list[int]:
        """Make the calls of the run that is repeated, up to an event. Return its numbers."""
        assert self._script is not None
        step = self.queue.ended + 1
        actions: dict[str, Callable[[Any], object]] = {
            "begin": lambda _: self._begin(),
            "drop": self._drop,
            "restart": self.generation.forget,
            **dict.fromkeys(
                ("forget", "save", "validate"), lambda _: self.generation.forget_caches()
            ),
        }
        for event in self._script:
            name, numbers = event.name, event.numbers
            if event.step > step:
                if until == "take":
                    break
                self._script = chain([event], self._script)
                return []  # the step was without a weight sync
            self.queue.ended = event.step - 1
            named = numbers if name in ("take", "drop", "restart") else []
            if not set(named) <= self.queue.groups.keys():
                break
            if name == "call":
                if (complete := self.generation.repeat(list(map(tuple, numbers)))) is None:
                    break
                self._score(_batches(complete))
            elif name in actions:
                actions[name](numbers)
            elif name == until:
                found: list[int] = numbers
                return found
            elif name == "settings" and not _fits(
                numbers, self._last, self._settings(), self.config
            ):
                break
        raise _unfit(self.config, step)


def _check_saved(rows: DataProto, config: TrainConfig) -> None:
    """Raise `FieldError` for prompts that no checkpoint can hold, before a step is trained."""
    with TemporaryDirectory() as folder:
        try:
            without_images(rows).save_to_disk(Path(folder) / "prompts.batch")
        except FieldError as error:
            key = f"trainer.max_staleness={config.trainer.max_staleness}"
            text = f"{key} saves the prompts on their way with each checkpoint, but {error}"
            raise FieldError(text) from error


def _fits(settings: list[int], last: list[int], own: list[int], config: TrainConfig) -> bool:
    """Return whether the run that is repeated had the settings of this one, `own`. If it was
    resumed with more steps, the number in its `last` settings counts, and no learning rate may
    depend on it."""
    for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
        depends = optim.lr_scheduler != "constant" or optim.lr_warmup_ratio
        if depends and settings[_STEPS] != own[_STEPS]:
            return False
    return last == [*settings[:_STEPS], last[_STEPS], *settings[_STEPS + 1 :]] == own


def _unfit(config: TrainConfig, step: int) -> ConfigError:
    return ConfigError(
        f"trainer.replay_order={config.trainer.replay_order} does not fit this run at step {step}: "
        "repeat it with its data.train_batch_size, data.max_response_length, rollout.n, "
        "rollout.slice_tokens, trainer.max_staleness, trainer.seed and number of steps (a run with "
        "rollout.reset_caches=false cannot be repeated), and with "
        "its model, data, rewards and sampling. Learning rates that depend on the number of steps "
        "are not repeated if a resumption has changed it",
        key="trainer.replay_order",
    )


def _resumed(calls: JsonlFile, step: int) -> tuple[JsonlFile, int]:
    """Remove the events after the checkpoint of a step, which a resumed run writes again. Return
    the file, and the step of the last weights in it."""
    last = synced = found = 0
    for event in read_events(calls.path):
        found = event.step if event.name == "sync" else found
        if event.name == "save" and event.step <= step:
            last, synced = event.line, found
    numbers = count(1)
    calls.close()
    keep_rows(calls.path, lambda _: next(numbers) <= last)
    return JsonlFile(calls.path), synced


def in_order(path: Path) -> list[StreamEvent]:
    """Return the events of a run. Calls that ended after weights in flight had come, but had those
    of an earlier step (`synced`), are before these weights."""
    synced, found = 0, list[tuple[int, bool, StreamEvent]]()
    for event in read_events(path):
        syncs = event.name == "sync"
        found.append((synced if event.synced is None else event.synced, syncs, event))
        synced = event.step if syncs else synced
    return [event for _, _, event in sorted(found, key=lambda event: event[:2])]


def _staleness(queue: PromptQueue, taken: Sequence[PromptGroup]) -> Metrics:
    """Measure how old the groups of a step are."""
    ages = np.array([queue.ended - (group.started or 0) for group in taken])
    found = {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}
    for age in range(queue.bound.steps + 1):
        found[f"staleness/share_{age}"] = float((ages == age).mean())
    return found


def _batches(groups: Iterable[PromptGroup]) -> dict[PromptGroup, DataProto]:
    return {group: group.batch for group in groups if group.batch is not None}
