"""The memory of supervised fine-tuning, and the refusal of a run that does not fit.

The lengths are those of the data, which is loaded before a process is started.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import ActorRolloutRefConfig, RolloutConfig, SFTConfig, TrainConfig
from quadriga.engines.memory.engines import engine_memory
from quadriga.engines.memory.passes import Rows
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.memory import GeneratedRows, GenerationMemory, generation_memory
from quadriga.trainer.memory.one_engine import (
    check_one_engine,
    missing_activations,
    one_engine_text,
)
from quadriga.trainer.memory.plan import ACTOR, ROLLOUT, MemoryPlan, pool_memory

if TYPE_CHECKING:
    from quadriga.data import PromptDataset

Longest = tuple[int, int]
"""Tokens of the prompt and of the response in the longest row of the data."""


def check_sft_memory(config: SFTConfig, longest: Longest, validation: PromptDataset | None) -> None:
    """Check that a run of `quadriga sft` fits the memory of its ranks, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    check_one_engine(config, lambda device: sft_memory_plan(config, longest, validation, device))


def sft_plan_text(config: SFTConfig, longest: Longest, validation: PromptDataset | None) -> str:
    """Return the plan of a run as a table, and whether it fits.

    Raises:
        ModelError: the model folder has no config of a suitable model.
    """
    return one_engine_text(
        config, lambda device: sft_memory_plan(config, longest, validation, device)
    )


def sft_memory_plan(
    config: SFTConfig, longest: Longest, validation: PromptDataset | None, device_type: str
) -> MemoryPlan:
    """Return the memory of a run whose settings were checked.

    Args:
        validation: the prompts of a validation; None: there is none.
        device_type: "cpu", or the type of an accelerator.
    """
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    pool = RolePool(
        (ACTOR, ROLLOUT), tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes
    )
    prompt, response = longest
    actor = engine_memory(
        config.model,
        config.engine,
        head="lm",
        ranks=ranks,
        device_type=device_type,
        update=Rows(
            max(1, config.data.train_batch_size // (ranks // config.engine.model_parallel_size)),
            prompt,
            response,
            micro_batch=config.data.micro_batch_size_per_gpu,
        ),
        evaluate=None,
        optim=config.optim,
    )
    generation = _generation(config, validation, ranks, device_type)
    settings = TrainConfig(
        actor_rollout_ref=ActorRolloutRefConfig(
            actor=replace(TrainConfig().actor_rollout_ref.actor, engine=config.engine)
        )
    )
    memory = pool_memory(settings, device_type, pool, {ACTOR: actor}, generation)
    missing = missing_activations(ACTOR, actor)
    return MemoryPlan(device_type, (memory,), trainer.n_gpus_per_node, missing)


def _generation(
    config: SFTConfig, validation: PromptDataset | None, ranks: int, device_type: str
) -> GenerationMemory:
    """Return the rollout engine. It has weights, but generates nothing, without a validation."""
    count, prompt = 1, 1
    if validation is not None:
        rows = math.ceil(len(validation) / ranks)
        count, prompt = min(RolloutConfig().micro_batch_size, rows), validation.longest
    response = config.trainer.max_response_length
    memory = generation_memory(
        config.model,
        GeneratedRows(count, count, prompt, response),
        SamplingParams(response, eos_token_ids=(), pad_token_id=0, temperature=0.0),
        dtype=config.engine.dtype,
        device_type=device_type,
    )
    return memory if validation is not None else replace(memory, kv_cache=0, peak=0)
