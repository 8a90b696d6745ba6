"""PPO's family: the training loop.

        prompts ──► rollout ──► reward (rules) ─┐
                       │  ├───► actor  log_prob ─┤
                       │  ├───► ref    log_prob ─┼──► advantages ──► critic update
                       │  └───► critic values ───┘        └────────► actor update ──► weights
                       ▲                                                                 │
                       └─────────────────────── next step ◄──────────────────────────────┘

The loop consumes prompts from the loader, in its order. Each call waits for the batch it is given
and for nothing else, so independent roles run side by side; `gather` is where they meet. Batches
are by reference: what the controller does not read, it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.kl import make_kl_controller
from quadriga.config.schema import TrainConfig
from quadriga.protocol import DataProto
from quadriga.trainer import stages
from quadriga.trainer.groups import PPOGroups, gather, start_groups
from quadriga.trainer.ingredients import Ingredients, load_ingredients
from quadriga.trainer.placement import ResourcePoolManager, Role
from quadriga.trainer.record import RunRecord
from quadriga.trainer.resuming import ControllerState, checkpoint_to_resume, read_state
from quadriga.trainer.sampling import Sampler
from quadriga.trainer.validation import Validator


class RayPPOTrainer:
    """Trains a policy with a critic (PPO) or without (GRPO and its kin).

    Args:
        config: a checked `TrainConfig`.
        ingredients: tokenizer, prompts and reward; None: loaded as the settings say.
        role_worker_mapping: role → worker class, to replace or add roles; None: the built-in ones.
        resource_pool_manager: which role runs where; None: all roles on one pool.
        reward_fn: scores a batch, `DataProto -> DataProto` with `token_level_scores` [B, R];
            None: the rule rewards of the settings.
    """

    def __init__(
        self,
        config: TrainConfig,
        ingredients: Ingredients | None = None,
        *,
        role_worker_mapping: dict[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        reward_fn: Callable[[DataProto], DataProto] | None = None,
    ) -> None:
        self.config = config
        self.ingredients = ingredients or load_ingredients(config)
        self.role_worker_mapping = role_worker_mapping or {}
        self.resource_pool_manager = resource_pool_manager
        self.reward_fn = reward_fn or self.ingredients.reward
        self.kl_controller = make_kl_controller(config.algorithm.kl_ctrl.type, **_kl(config))
        self.stream = endless(self.ingredients.train_loader)
        self.step = 0
        self.groups: PPOGroups | None = None
        self.record: RunRecord | None = None

    @property
    def total_steps(self) -> int:
        """Training steps of the whole run."""
        per_epoch = len(self.ingredients.train_loader)
        return self.config.trainer.total_training_steps or (
            per_epoch * self.config.trainer.total_epochs
        )

    @property
    def use_reference(self) -> bool:
        """Whether the policy's workers hold the reference too."""
        return (
            self.config.algorithm.use_kl_in_reward
            or self.config.actor_rollout_ref.actor.use_kl_loss
        )

    @property
    def reads_ref_log_prob(self) -> bool:
        """Whether anything reads the reference's log-probabilities of the sampled tokens."""
        actor = self.config.actor_rollout_ref.actor
        return self.config.algorithm.use_kl_in_reward or (
            actor.use_kl_loss and not actor.reads_full_kl
        )

    @property
    def use_critic(self) -> bool:
        """Whether the estimator reads values."""
        return ADVANTAGES[self.config.algorithm.adv_estimator].needs_values

    def init_workers(self) -> None:
        """Start every role's processes and load its model.

        Raises:
            PlacementError: the machines cannot hold the pools; nothing was started.
            WorkerError: a rank failed while it started.
        """
        self.groups = start_groups(
            self.config,
            total_steps=self.total_steps,
            use_critic=self.use_critic,
            use_reference=self.use_reference,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.resource_pool_manager,
        )

    def fit(self) -> dict[str, float]:
        """The algorithm. Returns the last validation's metrics."""
        actor, rollout, ref, critic = self._roles()
        resumed = self.resume()
        with RunRecord.open(
            self.config, self.total_steps, self.ingredients.tokenizer, resume_after=resumed
        ) as record:
            self.record = record
            validator = Validator(
                self.config.trainer.seed,
                self.ingredients.val_loader,
                rollout,
                self.reward_fn,
                record,
            )
            validator.run(step=0, due=self.config.trainer.val_before_train and resumed is None)

            sampler = Sampler(
                self.config, rollout, self.reward_fn, self.stream, self._ranks_to_balance()
            )
            for prompts in self.schedule():
                with record.span("step"):
                    with record.span("rollout"):
                        batch, metrics = sampler.draw(prompts, self.step)
                        record.add(metrics)

                    with record.span("evaluate"):
                        pending = [actor.compute_log_prob.submit(batch)]
                        if ref:
                            pending.append(ref.compute_ref_log_prob.submit(batch))
                        if critic:
                            pending.append(critic.compute_values.submit(batch))
                        if "token_level_scores" not in batch.batch:
                            pending.append(self.reward_fn(batch))
                        record.add(getattr(self.reward_fn, "metrics", {}))
                        for part in gather(pending):
                            batch = batch.union(part)

                    with record.span("advantages"):
                        self.estimate_advantages(batch)

                    if critic:
                        with record.span("update_critic"):
                            record.add_worker(critic.update_critic(batch))
                    if self.step > self.config.critic.warmup_steps or not critic:
                        with record.span("update_actor"):
                            record.add_worker(actor.update_actor(batch))
                        with record.span("sync_weights"):
                            actor.sync_weights()

                record.samples(self.step, batch)
                validator.run(step=self.step, due=self._due(self.config.trainer.test_freq))
                record.end_step(self.step)
                self.save(due=self._due(self.config.trainer.save_freq))
            self.export()
            return validator.last

    def estimate_advantages(self, batch: DataProto) -> None:
        """From scores to advantages, on the controller; fields are added to `batch`."""
        assert self.record is not None
        config, add = self.config.algorithm, self.record.add
        add(stages.batch_metrics(batch))
        stages.drop_cut_off(batch, config)
        add(stages.drop_dead_groups(batch, config))
        add(stages.shape_scores(batch, config))
        if config.use_kl_in_reward:
            add(stages.penalise_kl(batch, self.kl_controller, config.kl_penalty))
        add(stages.correct_mismatch(batch, config.rollout_correction))
        add(stages.estimate_advantages(batch, config))
        stages.select_update_tokens(batch, self.config.actor_rollout_ref.actor)

    def schedule(self) -> Iterator[DataProto]:
        """Batches of prompts up to the last step; counts `step`."""
        while self.step < self.total_steps:
            self.step += 1
            yield next(self.stream)

    def save(self, *, due: bool) -> None:
        """Write a checkpoint of every role that learns."""
        if due and self.groups is not None and self.record is not None:
            state = ControllerState(
                self.step,
                self.ingredients.train_loader.state_dict(),
                self.kl_controller.state_dict(),
            )
            with self.record.span("save"):
                self.groups.save(
                    self.record.folder.checkpoints, state, self.config.trainer.max_ckpt_to_keep
                )

    def resume(self) -> int | None:
        """Take up the checkpoint that the settings mean. Returns its step, None if there is none.

        Raises:
            CheckpointError: it is not complete, or belongs to other data or another model.
        """
        checkpoint = checkpoint_to_resume(self.config.trainer)
        if checkpoint is None or self.groups is None:
            return None
        state = read_state(checkpoint)
        self.ingredients.train_loader.load_state_dict(state.loader)
        self.kl_controller.load_state_dict(state.kl_controller)
        self.groups.load(checkpoint, state.step)
        self.step = state.step
        return state.step

    def export(self) -> None:
        """Write the trained policy as a Hugging Face folder into the run folder."""
        if self.groups is not None and self.record is not None:
            self.groups.actor.export_hf(str(self.record.folder.path / "model"))

    def close(self) -> None:
        """Stop what was started."""
        if self.groups is not None:
            self.groups.close()
            self.groups = None

    def _roles(self) -> tuple[Any, Any, Any, Any]:
        if self.groups is None:
            self.init_workers()
        assert self.groups is not None
        ref = self.groups.ref if self.reads_ref_log_prob else None
        return self.groups.actor, self.groups.rollout, ref, self.groups.critic

    def _ranks_to_balance(self) -> int:
        assert self.groups is not None
        return self.groups.actor.world_size if self.config.trainer.balance_batch else 1

    def _due(self, every: int) -> bool:
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)


def endless(loader: Iterable[DataProto]) -> Iterator[DataProto]:
    """The loader's batches, epoch after epoch."""
    while True:
        yield from loader


def _kl(config: TrainConfig) -> dict[str, float]:
    kl = config.algorithm.kl_ctrl
    return {"kl_coef": kl.kl_coef, "horizon": kl.horizon, "target_kl": kl.target_kl}
