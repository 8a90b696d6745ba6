"""The memory of supervised fine-tuning, and the refusal of a run that does not fit.

The lengths are those of the data, which is loaded before a process is started.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from quadriga.config.commands import SFTConfig
from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import ActorRolloutRefConfig, EngineConfig, RolloutConfig, TrainConfig
from quadriga.engines.memory.engines import engine_memory
from quadriga.engines.memory.passes import Rows
from quadriga.rollout.memory import (
    GeneratedRows,
    GenerationMemory,
    planned_sampling,
)
from quadriga.trainer.memory.one_engine import (
    check_one_engine,
    missing_activations,
    one_engine_text,
)
from quadriga.trainer.memory.phases import ACTOR, PASSES, ROLLOUT, pool_memory
from quadriga.trainer.memory.plan import MemoryPlan, planned_generation

if TYPE_CHECKING:
    from quadriga.data import PromptDataset
    from quadriga.data.conversations import ConversationLengths


def check_sft_memory(
    config: SFTConfig,
    train: ConversationLengths,
    prompts: PromptDataset | None,
    evaluated: ConversationLengths | None,
) -> None:
    """Check that a run of `quadriga sft` fits the memory of its ranks, if that is known.

    For the arguments see `sft_memory_plan`.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    check_one_engine(
        config, lambda other, device: sft_memory_plan(other, train, prompts, evaluated, device)
    )


def sft_plan_text(
    config: SFTConfig,
    train: ConversationLengths,
    prompts: PromptDataset | None,
    evaluated: ConversationLengths | None,
) -> str:
    """Return the plan of a run as a table, and whether it fits.

    For the arguments see `sft_memory_plan`.

    Raises:
        ModelError: the model folder has no config of a suitable model.
    """
    return one_engine_text(
        config, lambda other, device: sft_memory_plan(other, train, prompts, evaluated, device)
    )


def sft_memory_plan(
    config: SFTConfig,
    train: ConversationLengths,
    prompts: PromptDataset | None,
    evaluated: ConversationLengths | None,
    device_type: str,
) -> MemoryPlan:
    """Return the memory of a run whose settings were checked.

    Args:
        train: the conversations that are trained.
        prompts: of a validation by responses; None: there is none.
        evaluated: the conversations of a validation by their loss; None: there is none.
        device_type: "cpu", or the type of an accelerator.
    """
    trainer, engine = config.trainer, config.engine
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    roles = (ACTOR,) if prompts is None else (ACTOR, ROLLOUT)
    pool = RolePool(roles, tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes)
    actor = engine_memory(
        config.model,
        engine,
        head="lm",
        ranks=ranks,
        device_type=device_type,
        update=_updated_rows(config, train, ranks),
        evaluate=None if evaluated is None else _evaluated_rows(config, evaluated, ranks),
        optim=config.optim,
    )
    generation = None if prompts is None else _generation(config, prompts, ranks, device_type)
    settings = TrainConfig(
        actor_rollout_ref=ActorRolloutRefConfig(
            actor=replace(TrainConfig().actor_rollout_ref.actor, engine=engine),
            rollout=RolloutConfig(dtype=engine.dtype),
        )
    )
    memory = pool_memory(
        settings, device_type, pool, {ACTOR: actor}, generation, syncs=prompts is not None
    )
    phases = {_PHASES.get(name, name): size for name, size in memory.phases.items()}
    missing = missing_activations(ACTOR, actor)
    planned = (replace(memory, phases=phases),)
    return MemoryPlan(device_type, planned, trainer.n_gpus_per_node, missing)


_PHASES = {PASSES[ACTOR]: "loss of the validation"}
"""What a phase of reinforcement learning is in fine-tuning."""


def _updated_rows(config: SFTConfig, train: ConversationLengths, ranks: int) -> Rows:
    count = config.data.train_batch_size // (ranks // config.engine.model_parallel_size)
    return _rows(config.engine, train, max(1, count), config.data.micro_batch_size_per_gpu)


def _evaluated_rows(config: SFTConfig, evaluated: ConversationLengths, ranks: int) -> Rows:
    # The rows of a batch are padded to a multiple of the ranks.
    rows = min(config.data.train_batch_size, evaluated.rows)
    count = math.ceil(rows / ranks) * config.engine.model_parallel_size
    given = config.engine.forward_rows(config.data.micro_batch_size_per_gpu)
    return _rows(config.engine, evaluated, count, given)


def _rows(
    engine: EngineConfig, lengths: ConversationLengths, count: int, micro_batch: int | None
) -> Rows:
    """Return rows of the length of the longest, with as many targets as a micro-batch can have."""
    # Two rows of 900 + 100 and 10 + 950 tokens are planned as two of 50 + 950. If a budget of 3000
    # tokens limits a micro-batch, it can have many short rows of 1 + 99 tokens with 0.99 · 3000
    # targets: rows of 10 + 990 are planned.
    longest, targets = lengths.longest, lengths.targets
    together = min(count, micro_batch or count) * longest
    if engine.use_dynamic_bsz and together > engine.micro_batch_tokens:
        targets = math.ceil(lengths.share * longest)
    targets = min(max(targets, 1), longest - 1)
    return Rows(count, longest - targets, targets, micro_batch=micro_batch)


def _generation(
    config: SFTConfig, prompts: PromptDataset, ranks: int, device_type: str
) -> GenerationMemory:
    """Return the rollout engine that responds to the prompts of the validation."""
    count = min(RolloutConfig().micro_batch_size, math.ceil(len(prompts) / ranks))
    response = config.trainer.max_response_length
    return planned_generation(
        config.model,
        GeneratedRows(count, count, prompts.longest, response),
        planned_sampling(config.trainer.val_sampling, response),
        config.engine.dtype,
        device_type,
    )
