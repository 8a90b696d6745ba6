"""PPO and related algorithms: the training loop.

        prompts ──► rollout ──► reward ─────────┐
                       │  ├───► actor  log_prob ─┤
                       │  ├───► ref    log_prob ─┼──► advantages ──► critic update
                       │  └───► critic values ───┘        └────────► actor update ──► weights
                       ▲                                                                 │
                       └─────────────────────── next step ◄──────────────────────────────┘

consumes      batches of prompts, in the order of the loader
produces      metrics, samples and checkpoints in the run folder, and the trained model
waits for     each call waits for the batch that it is given and for nothing else, so roles on
              different processes run side by side; `gather` waits for all of them

Batches are by reference: the controller holds the shapes of all fields, and the values only of
those fields that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quadriga.algorithms.kl import make_kl_controller
from quadriga.checkpoint.folders import ControllerState, Resumed
from quadriga.config.paths import absolute_paths
from quadriga.config.role_ranks import has_replicas
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, MismatchError, PlacementError, QuadrigaError
from quadriga.parallel.balancing import Balance
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rewards.tensors import BatchFunction, batch_reward
from quadriga.rollout import REFERENCE
from quadriga.streams.playing import EpisodeGenerator, EpisodeReward, make_episodes
from quadriga.streams.replicas import Applying
from quadriga.trainer import stages
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.checks.settings import refuse, run_length_problems
from quadriga.trainer.dataflow import PASSES, StepPlan, balance_of
from quadriga.trainer.ingredients import Ingredients, check_ingredients, load_ingredients
from quadriga.trainer.preflight import check_sizes, check_train_config, profile_problems
from quadriga.trainer.record import RunRecord
from quadriga.trainer.restarts import restarted
from quadriga.trainer.roles.registry import ResourcePoolManager, Role, added_stages
from quadriga.trainer.roles.workers import POLICY_ROLES, correction_of
from quadriga.trainer.stages import (
    BatchReward,
    ModelReward,
    Sampler,
    StageRunner,
    rows_with_advantage,
)
from quadriga.trainer.streaming import StreamedSampler
from quadriga.trainer.validation import Validator
from quadriga.trainer.worker_groups import PPOGroups, gather, open_backend, start_groups
from quadriga.workers.roles import GeneratingGroup
from quadriga.workers.updates import MISMATCH

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, Worker

_log = logging.getLogger("quadriga")


class RayPPOTrainer:
    """Trains a policy, with a critic (PPO) or without (GRPO and related algorithms).

    `init_workers` starts the worker groups, `fit` runs the algorithm on them, `close` stops them.

    Args:
        config: checked settings.
        ingredients: tokenizer, prompts and reward function; None: those that the settings name.
        role_worker_mapping: role → worker class, in place of the built-in or registered class.
        resource_pool_manager: which role runs on which pool; None: as `config.placement` says.
        reward_fn: scores a batch (`BatchReward`), or returns its scores [B, R] as a tensor
            (`rewards.tensors`); None: the reward function of the ingredients.
        val_reward_fn: the same for the validation; None: that of the training.
        callbacks: objects or classes that are told what happens (`observability.callbacks`), beside
            those of `trainer.callbacks`.

    Raises:
        ConfigError: with these settings a stage reads a field that no earlier stage writes, or a
            role has no worker class or place that fits, or the settings do not fit the pools.
        InputError: a setting, file or folder does not fit: what `quadriga train` checks, without
            what the arguments give in place of the settings.
    """

    def __init__(
        self,
        config: TrainConfig,
        ingredients: Ingredients | None = None,
        *,
        role_worker_mapping: Mapping[Role, type[Worker]] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        reward_fn: BatchReward | BatchFunction | None = None,
        val_reward_fn: BatchReward | BatchFunction | None = None,
        callbacks: Iterable[object] = (),
    ) -> None:
        mapping = role_worker_mapping or {}
        own_data, own_reward = ingredients is not None, reward_fn is not None
        self.given, placed, self.plan = check_train_config(
            config, mapping, resource_pool_manager, own_data=own_data, own_reward=own_reward
        )
        self.config = config = absolute_paths(self.given)
        self.placed = absolute_paths(placed)
        if ingredients is not None and not any(role in POLICY_ROLES for role in mapping):
            check_ingredients(config, ingredients)
        components = config.algorithm.reward_components
        reward = None if reward_fn is None else batch_reward(reward_fn, components)
        if config.agent.path is not None:
            if reward is not None:
                problem = "scores the episodes, so reward_fn is never called; pass no reward_fn"
                raise ConfigError(f"agent.path={config.agent.path} {problem}", key="agent.path")
            rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
            reward = EpisodeReward(config.agent, rows)
        self.ingredients = ingredients or load_ingredients(config, reward)
        self.role_worker_mapping = mapping
        self.resource_pool_manager = resource_pool_manager
        refuse(config, run_length_problems(config, self.total_steps))
        refuse(config, profile_problems(config.trainer, self.total_steps))
        self.reward_fn = reward or batch_reward(self.ingredients.reward, components)
        self.val_reward_fn = self.reward_fn
        if val_reward_fn is not None:
            self.val_reward_fn = batch_reward(val_reward_fn, key="val_reward_fn")
        kl = config.algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            kl.type, kl_coef=kl.kl_coef, horizon=kl.horizon, target_kl=kl.target_kl
        )
        self.episodes = make_episodes(config, self.ingredients.tokenizer)
        self.mismatch_watch = MismatchWatch(config)
        # One iterator for the whole run. Refilling draws from it too, so that no prompt is used
        # twice in an epoch, and the state of the loader counts every batch that was drawn.
        self.stream = endless(self.ingredients.train_loader)
        self.step = 0
        loader = self.ingredients.train_loader
        self.checkpoints = Checkpointing(config, loader, self.given, callbacks)
        self.stop, self.restarts = self.checkpoints.stop, self.checkpoints.restarts
        self._kl_beginning = self.kl_controller.state_dict()
        self._groups: PPOGroups | None = None
        self._lost: list[str] = []  # pools that are to be started again
        self._session: Backend | None = None  # keeps Ray running while all groups are ended
        self._streamed: StreamedSampler | None = None

    @property
    def total_steps(self) -> int:
        """The number of training steps of the whole run."""
        trainer, loader = self.config.trainer, self.ingredients.train_loader
        return trainer.total_training_steps or len(loader) * trainer.total_epochs

    def init_workers(self) -> PPOGroups:
        """Start the processes of every role, load the models, and return the worker groups.

        Groups that are started already are returned as they are.

        Raises:
            PlacementError: the nodes cannot hold the pools. Nothing was started.
            WorkerError: a rank failed while it started.
        """
        if self._groups is not None and self._lost:
            lost, self._lost = self._lost, []
            try:
                self._groups = self._groups.starter.start(lost)
            except PlacementError:  # too few nodes are left for these pools beside the others
                self.end_groups()
        if self._groups is None:
            start = partial(
                start_groups,
                total_steps=self.total_steps,
                role_worker_mapping=self.role_worker_mapping,
                resource_pool_manager=self.resource_pool_manager,
            )
            check = check_sizes if self.resource_pool_manager is None else None
            self._groups = self.restarts.placed(start, self.placed, check)
            self._session = self._session or open_backend(self.config.trainer)
        return self._groups

    @restarted
    def fit(self) -> dict[str, float]:
        """Run the algorithm. Return the metrics of the last validation, {} if there was none."""
        groups, plan = self.init_workers(), self.plan
        actor, critic = groups.actor, groups.critic
        # The checkpoint is loaded before the run folder is opened: if it cannot be loaded, the
        # folder keeps all that it holds.
        resumed = self.resume(groups)
        save = partial(self.save, groups)
        with self.open_record(resumed) as record, self.checkpoints.finishing(record, save):
            # Calls a stage, and the stages of added roles before and after it; logs their metrics.
            runner = StageRunner(added_stages(self.config), groups.added, record)
            validator = self.make_validator(groups, record)
            due = resumed is None and self.config.trainer.val_before_train
            validator.run(step=0, due=due)
            sampler = self.make_sampler(groups, runner, resumed)
            balance = self.balance_of(groups)
            for step in self.schedule():
                with record.span("step"):
                    with record.span("rollout"), groups.generating(record.add):
                        batch = record.log_stage(sampler.draw(step))

                    with record.span("evaluate"):
                        if plan.masks_before_passes:
                            batch = self.score(batch, runner)
                        if plan.advantages_before_passes:
                            batch = self.estimate_advantages(batch, runner)
                        batch = runner.run(stages.balance_over_ranks, batch, balance)
                        batch = runner.run_added("before", batch, *PASSES)
                        pending = submit_passes(groups, batch, plan)
                        if not plan.masks_before_passes:  # while the roles compute
                            batch = self.score(batch, runner)
                        for evaluated in gather(pending):
                            batch = batch.union(evaluated)
                        batch = runner.run_added("after", batch, *PASSES)

                    with record.span("advantages"):
                        if not plan.advantages_before_passes:
                            batch = self.estimate_advantages(batch, runner)
                        elif plan.old_log_prob_pass:  # only for its metrics
                            self.measure_policy(rows_with_advantage(batch), runner)

                    self.checkpoints.begin_update()
                    if critic:
                        with record.span("update_critic"):
                            order = balance.critic_order(len(batch))
                            batch = runner.update(critic.update_critic, batch, order)
                    # In the first `warmup_steps` steps only the critic learns.
                    if self.step > self.config.critic.warmup_steps or not critic:
                        with record.span("update_actor"):
                            batch = runner.update(actor.update_actor, batch)
                        with record.span("sync_weights"), self.syncing() as applying:
                            record.add(groups.sync_weights(applying))

                self.end_step(groups, batch, validator, record)
            actor.export_hf(str(record.folder.model))
            return validator.last

    def end_step(
        self, groups: PPOGroups, batch: DataProto, validator: Validator, record: RunRecord
    ) -> None:
        """Show the step to the sampler of the data, validate and save where these are due, and log
        the step. Then stop if a signal asks for it."""
        self.ingredients.train_loader.update(batch)
        self.checkpoints.complete = (self.step, self.kl_controller.state_dict())
        record.log_samples(self.step, batch)
        try:
            self.mismatch_watch.check(self.step, record.measured)
        except MismatchError:
            record.end_step(self.step)
            self.checkpoints.complete = None  # a step whose mismatch ends the run is not saved
            raise

        def validate() -> None:
            with self.paused("validate"):
                validator.run(step=self.step, due=True)

        self.checkpoints.end_step(
            record,
            validate=None if validator.loader is None else validate,
            save=partial(self.save, groups),
            groups=groups.saved,
        )

    def score(self, batch: DataProto, runner: StageRunner) -> DataProto:
        """Score the responses, and mask those that take no part in the update."""
        config = self.config.algorithm
        if not self.plan.sampler_scores:
            assert runner.record is not None, "times need a record"
            with runner.record.span("reward"):
                batch = runner.run(stages.score_responses, batch, self.training_reward())
        batch = runner.run(stages.measure_batch, batch)
        batch = runner.run(stages.mask_truncated, batch, config)
        return runner.run(stages.mask_zero_variance_groups, batch, config)

    def estimate_advantages(self, batch: DataProto, runner: StageRunner) -> DataProto:
        """From scores to advantages, on the controller: after the passes, or before them if they
        leave out rows without an advantage."""
        config, kl = self.config.algorithm, self.kl_controller
        batch = runner.run(stages.shape_scores, batch, config)
        if config.use_kl_in_reward:
            batch = runner.run(stages.penalise_kl, batch, kl, config.kl_penalty)
        if self.plan.old_log_prob_pass and not self.plan.advantages_before_passes:
            batch = self.measure_policy(batch, runner)
        batch = runner.run(stages.estimate_advantages, batch, config)
        return runner.run(stages.select_update_tokens, batch, self.config.actor_rollout_ref.actor)

    def measure_policy(self, batch: DataProto, runner: StageRunner) -> DataProto:
        """Measure entropy and mismatch from the pass over the log-probabilities, and correct the
        mismatch. Without such a pass the update measures both."""
        correction = correction_of(self.config)
        bound = self.config.actor_rollout_ref.rollout.mismatch.bound
        batch = runner.run(stages.measure_entropy, batch)
        return runner.run(stages.correct_mismatch, batch, correction, bound)

    def balance_of(self, groups: PPOGroups) -> Balance:
        """Return how rows are ordered for the ranks, each with parts of its own, of both roles."""
        actor, critic = self.config.actor_rollout_ref.actor.engine, self.config.critic.engine
        ranks, critic_ranks = groups.actor.world_size // actor.model_parallel_size, None
        if groups.critic is not None:
            critic_ranks = groups.critic.world_size // critic.model_parallel_size
        return balance_of(self.config, self.plan, ranks, critic_ranks)

    def schedule(self) -> Iterator[int]:
        """Count `step` up to the last step of the run, and yield it."""
        with self.stop.steps():
            while self.step < self.total_steps and not self.checkpoints.callbacks.stopped(
                self.step
            ):
                self.checkpoints.begin_step(self.step, self.kl_controller.state_dict())
                self.step += 1
                with self.init_workers().profiled(self.config.trainer, self.step):
                    yield self.step

    def open_record(self, resumed: Resumed | None) -> AbstractContextManager[RunRecord]:
        """Open the run folder, for all attempts. `resumed`: the point at which the run goes on."""
        tokenizer = self.ingredients.tokenizer
        make = partial(
            RunRecord, self.config, self.total_steps, tokenizer, self.checkpoints.uploads, resumed,
            self.given, self.checkpoints.callbacks,
        )  # fmt: skip
        return self.restarts.record(make, resumed)

    def make_validator(self, groups: PPOGroups, record: RunRecord) -> Validator:
        """Return the validator of the run."""
        added, loader = added_stages(self.config, validation=True), self.ingredients.val_loader
        if loader is not None:
            loader.rewind()  # a loss may have ended a validation in its middle
        return Validator(
            self.config.trainer.seed, loader, self._generator(groups), self.val_reward_fn, record,
            n=self.config.actor_rollout_ref.rollout.val_n, generating=groups.generating,
            runner=StageRunner(added, groups.added, record, prefix="val/"),
        )  # fmt: skip

    def make_sampler(
        self, groups: PPOGroups, runner: StageRunner, resumed: Resumed | None = None
    ) -> Sampler | StreamedSampler:
        """Return the sampler of the run."""
        given = self.training_reward(), self.stream, runner
        trainer = self.config.trainer
        if not trainer.max_staleness:
            return Sampler(self.config, self._generator(groups), *given)
        apart = has_replicas(self.placed)
        if self._streamed is not None:
            self._streamed.close()  # that of a `fit` that has failed
        self._streamed = StreamedSampler(
            self.config, groups.replicas, *given, self.total_steps,
            apart, overlaps=apart and not (trainer.backend == "local" or trainer.replay_order),
            episodes=make_episodes(self.config, self.ingredients.tokenizer),
        )  # fmt: skip
        if resumed is not None:
            folder = None if resumed.data_changed else resumed.folder
            self._streamed.load(folder, resumed.state.step)
        return self._streamed

    def _generator(self, groups: PPOGroups) -> GeneratingGroup | EpisodeGenerator:
        """Return what generates whole batches: the rollout, or what plays episodes with it."""
        if self.episodes is None:
            return groups.generator
        apart = has_replicas(self.placed)
        return EpisodeGenerator(self.config, groups.replicas, self.episodes, apart)

    def training_reward(self) -> BatchReward:
        """Return the reward of a training step: the rules, with the reward model if enabled."""
        model = self.init_workers().reward_model
        if model is None:
            return self.reward_fn
        return ModelReward(self.reward_fn, model, self.config.reward_model)

    def save(self, groups: PPOGroups, folder: Path, state: ControllerState, ends: bool) -> None:
        """Write a checkpoint of every role that learns, and of the controller."""
        more = None if self._streamed is None else self._streamed.save
        with self.paused("save"):
            self.checkpoints.writer.save(folder, state, ends, groups.saved, more)

    def syncing(self) -> AbstractContextManager[Applying | None]:
        """Within the block the rollout receives weights: see `StreamedSampler.syncing`."""
        return nullcontext() if self._streamed is None else self._streamed.syncing()

    def paused(self, event: Literal["validate", "save"]) -> AbstractContextManager[None]:
        """Within the block no batch is generated. Without `max_staleness` none is anyway."""
        return nullcontext() if self._streamed is None else self._streamed.paused(event)

    def resume(self, groups: PPOGroups) -> Resumed | None:
        """Load the checkpoint that `trainer.resume_mode` names, or after a loss the newest point,
        if there is one, and return it.

        Raises:
            CheckpointError: it is damaged, or belongs to other data or another model.
        """
        resumed = self.checkpoints.resume(groups.saved)
        if resumed is not None:
            self.kl_controller.load_state_dict(resumed.state.kl_controller)
            groups.load(resumed)
            self.step = resumed.state.step
        elif self.restarts.count:
            self.kl_controller.load_state_dict(self._kl_beginning)
            self.step = 0
        if self.restarts.count:
            # The loop over the batches of the attempt before was left within a batch.
            self.stream = endless(self.ingredients.train_loader)
        return resumed

    def end_lost(self, error: QuadrigaError) -> str:
        """End the groups that cannot be used after a loss: those that are lost, if all others hold
        the state of the beginning of the step, else all. Return which, for a message.

        Prompt groups on their way belong to a checkpoint: with `max_staleness`, all groups end.
        """
        held, self.checkpoints.held = self.checkpoints.held, None
        if self._groups is not None and held is not None and self._streamed is None:
            self._lost = self._groups.lost_alone(error)
        if self._groups is not None and self._lost:
            self.checkpoints.held = held
            for pool in self._lost:
                self._groups.starter.end(pool)
            uses = (use for pool in self._lost for use in self._groups.starter.pools[pool])
            return f"started again: {', '.join(uses)}"
        self.mismatch_watch = MismatchWatch(self.config)
        self.end_groups()
        return "started again: all roles"

    def end_groups(self) -> None:
        """End all groups; the next call of `init_workers` starts them again."""
        if self._streamed is not None:
            self._streamed.close()
        self._lost, self.checkpoints.held = [], None
        if self._groups is not None:
            groups, self._groups = self._groups, None
            groups.close()
        if self._streamed is not None:
            self._streamed.wait_ended()

    def close(self) -> None:
        """Stop the worker groups and the reward processes, if they are started."""
        from quadriga.rewards import RewardManager

        with closing(self.ingredients), ExitStack() as stack:
            if self.episodes is not None:
                stack.callback(self.episodes.close)
            if self._session is not None:
                stack.callback(self._session.shutdown)
            if self._streamed is not None:
                self._streamed.close()
            if isinstance(self.val_reward_fn, RewardManager):
                self.val_reward_fn.close()
            if self._groups is not None:
                self._groups.close()
                self._groups = None


@dataclass
class MismatchWatch:
    """Compares the share of tokens beyond `mismatch.bound` with `mismatch.max_share` in each step.

    A run logs a warning at its first alarm, and then at the 10th, 100th, … alarm.
    """

    config: TrainConfig
    alarms: int = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise or log an alarm if the metrics of a step ask for one.

        Args:
            metrics: of the step. A step in which nothing was compared has no `mismatch/beyond`.

        Raises:
            MismatchError: more tokens than allowed, and `mismatch.on_alarm` is "fail".
        """
        rollout, engine = self.config.actor_rollout_ref.rollout, "actor_rollout_ref.actor.engine"
        settings, key = rollout.mismatch, "actor_rollout_ref.rollout"
        share = metrics.get(f"{MISMATCH}beyond", 0.0)
        if share <= settings.max_share:
            return
        self.alarms += 1
        text = (
            f"step {step}: for {share:.1%} of the response tokens, the log-probabilities of "
            f"rollout and training differ by more than {settings.bound:g} nats "
            f"({key}.mismatch.bound); at most {settings.max_share:.1%} may "
            f"({key}.mismatch.max_share). Try equal dtypes "
            f"({key}.dtype={rollout.dtype}, {engine}.dtype="
            f"{self.config.actor_rollout_ref.actor.engine.dtype}), no top_p, top_k and min_p, "
            f"{key}.name={REFERENCE}, or algorithm.rollout_correction.level=token"
        )
        if staleness := self.config.trainer.max_staleness:
            text += f". Old responses differ, too: lower trainer.max_staleness={staleness}"
        if settings.on_alarm == "fail":
            raise MismatchError(text, step=step, share=share)
        if str(self.alarms).strip("0") == "1":
            _log.warning(
                "%s. Alarm %d of this run; the next warning is at alarm %d. "
                "%s.mismatch.on_alarm=fail ends the run instead",
                text, self.alarms, 10 * self.alarms, key,
            )  # fmt: skip


def endless(loader: Iterable[DataProto]) -> Iterator[DataProto]:
    """Yield the batches of the loader, epoch after epoch."""
    while True:
        yield from loader


def submit_passes(groups: PPOGroups, batch: DataProto, plan: StepPlan) -> list[DataProtoFuture]:
    """Start the passes that the run has, and return the futures of their fields.

    `submit` does not wait: roles on different processes compute side by side. Rows without an
    advantage are left out if the plan says so; what is computed is 0 there.
    """
    rows = rows_with_advantage(batch) if plan.advantages_before_passes else batch
    pending = []
    if plan.old_log_prob_pass:
        pending.append(groups.actor.compute_log_prob.submit(rows))
    if groups.ref:
        pending.append(groups.ref.compute_ref_log_prob.submit(rows))
    if groups.critic:
        pending.append(groups.critic.compute_values.submit(rows))
    return pending
