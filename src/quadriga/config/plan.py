"""The batch arithmetic of a run.

Example: 32 prompts per step, n=8, 4 ranks, mini-batches of 8 prompts, 3 epochs, micro-batches of 5:

    32 prompts × 8 responses  = 256 sequences per step; 256 / 4 ranks = 64 on each rank
    32 / 8 prompts            = 4 mini-batches per epoch
    4 mini-batches × 3 epochs = 12 optimizer steps per training step
    8 prompts × 8 responses   = 64 sequences per mini-batch; 64 / 4 ranks = 16 on each rank
    ceil(16 / 5)              = 4 micro-batches per rank, of 5 + 5 + 5 + 1 sequences
"""

import math
from dataclasses import dataclass

from quadriga.config.role_ranks import num_ranks
from quadriga.config.schema import TrainConfig


@dataclass(frozen=True)
class UpdatePlan:
    """How one role splits the sequences of a training step into optimizer steps.

    Attributes:
        micro_batch: most sequences per forward and backward pass of one rank; None: any number.
        micro_batches: forward and backward passes per mini-batch of one rank. With `max_tokens`,
            for sequences of full length.
        max_tokens: most tokens per micro-batch; None: any number.
    """

    role: str
    mini_batch_prompts: int
    mini_batch_sequences: int
    mini_batch_per_rank: int
    mini_batches: int
    epochs: int
    micro_batch: int | None
    micro_batches: int
    max_tokens: int | None

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per training step."""
        return self.mini_batches * self.epochs


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of one training step.

    Attributes:
        config: the settings of the run.
        ranks: ranks of the actor.
        total_steps: None if the data size is unknown.
    """

    config: TrainConfig
    ranks: int
    total_steps: int | None
    actor: UpdatePlan
    critic: UpdatePlan

    @property
    def sequences(self) -> int:
        """Sequences per step, over all ranks."""
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    @property
    def sequences_per_rank(self) -> int:
        """Sequences per step on one rank, or on each group of ranks that compute the same rows."""
        return self.sequences // (self.ranks // self._together)

    @property
    def _together(self) -> int:
        """Ranks of the actor that compute the same rows."""
        return self.config.actor_rollout_ref.actor.engine.model_parallel_size

    def optimizer_steps(self, total_steps: int) -> tuple[int, int]:
        """Return the optimizer steps of the actor and of the critic in a run of `total_steps`.

        In the first `critic.warmup_steps` steps only the critic is updated. With 10 steps, 4 of
        them for warm-up, 2 optimizer steps per step of the actor and 1 of the critic:

            actor    (10 − 4) × 2 = 12
            critic    10 × 1      = 10
        """
        actor_updates = max(0, total_steps - self.config.critic.warmup_steps)
        of_critic = total_steps * self.critic.optimizer_steps
        return actor_updates * self.actor.optimizer_steps, of_critic

    def text(self, *, with_critic: bool = True) -> str:
        """Return the plan as lines of text; each number is shown with its calculation."""
        data, ranks = self.config.data, f"{self.ranks} ranks"
        longest = data.max_prompt_length + data.max_response_length
        if self._together > 1:
            ranks = f"({ranks} / {self._together} that compute the same rows)"
        lines = [
            f"prompts per step       {data.train_batch_size}",
            f"sequences per step     {self.sequences} = {data.train_batch_size} prompts × "
            f"{self.config.actor_rollout_ref.rollout.n} responses",
            f"  on each rank         {self.sequences_per_rank} = {self.sequences} / {ranks}",
            f"  tokens, at most      {self.sequences * longest:,} = {self.sequences} × {longest}",
        ]
        for update in (self.actor, self.critic) if with_critic else (self.actor,):
            lines += _update_lines(update, data.train_batch_size)
        if self.total_steps is not None:
            actor_steps, critic_steps = self.optimizer_steps(self.total_steps)
            of_critic = f" and {critic_steps} of the critic" if with_critic else ""
            lines.append(
                f"run                    {self.total_steps} steps, "
                f"{actor_steps} optimizer steps of the actor{of_critic}"
            )
        return "\n".join(lines)


def mini_batch_prompts(config: TrainConfig) -> tuple[int, int]:
    """Return the prompts per optimizer step of the actor and of the critic, over all ranks."""
    actor = config.actor_rollout_ref.actor.ppo_mini_batch_size or config.data.train_batch_size
    return actor, config.critic.ppo_mini_batch_size or actor


def batch_plan(config: TrainConfig, *, train_rows: int | None = None) -> BatchPlan:
    """Return the plan of a run.

    Args:
        config: settings that passed `checks.check_train_settings`; they are not checked again.
        train_rows: rows of training data, from which the number of steps is computed if
            `total_training_steps` is not given. The last, smaller batch of an epoch is dropped.
    """
    steps = config.trainer.total_training_steps
    if steps is None and train_rows is not None:
        steps = config.trainer.total_epochs * (train_rows // config.data.train_batch_size)
    actor, critic = (_update(config, role) for role in ("actor", "critic"))
    return BatchPlan(config, num_ranks(config, "actor"), steps, actor, critic)


def _update(config: TrainConfig, role: str) -> UpdatePlan:
    actor, (mini, critic_mini) = config.actor_rollout_ref.actor, mini_batch_prompts(config)
    section, mini = (config.critic, critic_mini) if role == "critic" else (actor, mini)
    engine, micro = section.engine, section.ppo_micro_batch_size_per_gpu
    sequences = mini * config.actor_rollout_ref.rollout.n
    per_rank = sequences // (num_ranks(config, role) // engine.model_parallel_size)
    size = max(1, per_rank) if micro is None else micro
    if engine.use_dynamic_bsz:
        # A sequence is never split, so one that is longer than the limit is a micro-batch by
        # itself: 300 tokens // 128 per sequence = 2 sequences, 100 // 128 = 0 → 1 sequence.
        length = config.data.max_prompt_length + config.data.max_response_length
        size = min(size, max(1, engine.micro_batch_tokens // length))
    return UpdatePlan(
        role=role, mini_batch_prompts=mini, mini_batch_sequences=sequences,
        mini_batch_per_rank=per_rank, mini_batches=math.ceil(config.data.train_batch_size / mini),
        epochs=section.ppo_epochs or actor.ppo_epochs,
        micro_batch=micro if engine.use_dynamic_bsz else size,
        micro_batches=math.ceil(per_rank / size),
        max_tokens=engine.micro_batch_tokens if engine.use_dynamic_bsz else None,
    )  # fmt: skip


def _update_lines(update: UpdatePlan, prompts: int) -> list[str]:
    limits = [(update.micro_batch, "sequences"), (update.max_tokens, "tokens")]
    limit = " and ".join(f"{most} {of}" for most, of in limits if most is not None)
    bound = "at most " if update.max_tokens is not None else ""
    micro = f"{bound}{update.micro_batches}, of up to {limit} each"
    return [
        update.role,
        f"  mini-batch           {update.mini_batch_prompts} prompts = "
        f"{update.mini_batch_sequences} sequences = {update.mini_batch_per_rank} on each rank",
        f"  micro-batches        {micro}",
        f"  optimizer steps      {update.optimizer_steps} per step = {prompts} / "
        f"{update.mini_batch_prompts} mini-batches × {update.epochs} epochs",
    ]
