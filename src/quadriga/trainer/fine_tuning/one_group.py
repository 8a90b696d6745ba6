"""The loop of a run with one worker group, such as fine-tuning.

consumes      batches of rows, in the order of the loader
produces      metrics, samples and checkpoints in the run folder, and the trained model
waits for     each update, since the next one needs its weights
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.protocol import DataProto
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.checks.settings import refuse, warmup_problems
from quadriga.trainer.record import RunRecord
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.workers import threads_per_rank
from quadriga.trainer.worker_groups import (
    StartedGroups,
    close_on_error,
    one_pool,
    open_backend,
    save_roles,
    start_group,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data.loader import BatchDataset
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import RankRuntime
    from quadriga.workers.roles import PairTrainingGroup, SFTGroup

ConfigT = TypeVar("ConfigT", SFTConfig, RMConfig)
GroupT = TypeVar("GroupT", bound="SFTGroup | PairTrainingGroup")
Validate = Callable[[], bool]
"""Validates and logs it. Returns whether the run has reached its goal."""


@dataclass(frozen=True)
class FineTuned:
    """The folder of the trained model, the steps that were taken, and the metrics of the last
    validation ({} without validation data)."""

    model_path: str
    steps: int
    validation: dict[str, float]


@dataclass(frozen=True)
class OneGroup(StartedGroups, Generic[GroupT]):
    """The one worker group of a run, as the trainer calls it."""

    policy: GroupT


class OneGroupTrainer(ABC, Generic[ConfigT, GroupT]):
    """Updates the model of one worker group with batch after batch.

    `init_workers` starts the worker group, `fit` runs the loop, `close` stops the group, and `run`
    does all of this.

    Attributes:
        saved_as: the role of the model, which names its folder in a checkpoint.
        step: the number of the current step.
        total_steps: the number of optimizer steps, unless the run reaches its goal earlier.
    """

    saved_as: Role

    def __init__(
        self,
        given: ConfigT,
        config: ConfigT,
        tokenizer: PreTrainedTokenizerBase,
        rows: BatchDataset[Any],
    ) -> None:
        from quadriga.data import PromptLoader

        self.given: ConfigT = given
        self.config: ConfigT = config
        self.tokenizer = tokenizer
        trainer, data = config.trainer, config.data
        self.loader = PromptLoader(
            rows, data.train_batch_size, shuffle=data.shuffle, seed=trainer.seed
        )
        self.total_steps = trainer.total_training_steps or len(self.loader) * trainer.total_epochs
        refuse(config, warmup_problems("optim", config.optim, self.total_steps))
        self.checkpoints = Checkpointing(config, self.loader, given)
        self.step = 0
        self._groups: OneGroup[GroupT] | None = None

    @abstractmethod
    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """Return the class of the worker."""

    @abstractmethod
    def update(self, policy: GroupT, rows: DataProto) -> DataProto:
        """Update the model with a batch, and return the metrics of the ranks."""

    @abstractmethod
    def validation(self, policy: GroupT, record: RunRecord) -> Validate | None:
        """Return what validates; None without validation data."""

    def reached_goal(self, metrics: dict[str, float]) -> bool:
        """Return whether these metrics of a validation end the run."""
        return False

    def init_workers(self) -> OneGroup[GroupT]:
        """Start the ranks, load the model, and return the worker group.

        A group that is started already is returned as it is.

        Raises:
            PlacementError: the nodes cannot hold the ranks. Nothing was started.
            WorkerError: a rank failed while it started.
        """
        if self._groups is not None:
            return self._groups
        from quadriga.workers import RankRuntime

        trainer = self.config.trainer
        runtime = RankRuntime(
            device=trainer.device,
            threads=threads_per_rank(trainer),
            seed=trainer.seed,
            total_steps=self.total_steps,
        )
        backend = open_backend(trainer)
        with close_on_error(backend) as groups:
            pool = one_pool(trainer, backend)
            group: Any = start_group(backend, pool, self.worker(runtime), groups, trainer)
            group.init_model()
        self._groups = OneGroup(backend=backend, groups=groups, policy=group)
        return self._groups

    def run(self) -> FineTuned:
        """Run the loop, and stop the worker group.

        Raises:
            KeyboardInterrupt: a signal has stopped the run; its argument is the signal's number.
        """
        try:
            with self.checkpoints.stop.listening():
                return self.fit()
        finally:
            self.close()

    def fit(self) -> FineTuned:
        """Run the loop: update, and where it is due validate and save."""
        policy, key = self.init_workers().policy, self.saved_as.key
        # Loaded before the run folder is opened: a folder of a run that cannot be continued keeps
        # all that it holds.
        resumed = self.checkpoints.resume()
        if resumed is not None:
            self.step = resumed.state.step
            policy.load_checkpoint(str(resumed.folder / key), self.step)
        with RunRecord(
            self.config, self.total_steps, self.tokenizer, resumed, self.given
        ) as record:
            validate = self.validation(policy, record)
            every = self.config.trainer.test_freq
            for rows in () if self.reached_goal(record.last_validation) else self.schedule():
                with record.span("step"):
                    record.log_update(self.update(policy, rows))
                last = self.step == self.total_steps
                due = last or (every > 0 and self.step % every == 0)
                if self.checkpoints.end_step(
                    record,
                    self.step,
                    last=last,
                    validate=validate if due else None,
                    save=partial(save_roles, groups={key: policy}),
                ):
                    break
            path = str(record.folder.model)
            policy.export_hf(path)
            return FineTuned(path, self.step, record.last_validation)

    def schedule(self) -> Iterator[DataProto]:
        """Yield one batch of rows per step, epoch after epoch, and count `step`. Within a step the
        first signal lets the step end."""
        with self.checkpoints.stop.steps():
            while self.step < self.total_steps:
                for rows in self.loader:
                    self.step += 1
                    yield rows
                    if self.step == self.total_steps:
                        break

    def close(self) -> None:
        """Stop the worker group, if it is started."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None
