"""The memory of supervised fine-tuning, and the refusal of a run that does not fit.

The lengths are those of the data, which is loaded before a process is started.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import ActorRolloutRefConfig, RolloutConfig, SFTConfig, TrainConfig
from quadriga.engines.memory.passes import Rows
from quadriga.engines.memory.states import training_memory
from quadriga.errors import ConfigError
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.memory import GeneratedRows, GenerationMemory, generation_memory
from quadriga.trainer.memory.machine import device_limit, planned_device
from quadriga.trainer.memory.plan import ACTOR, ROLLOUT, MemoryPlan, pool_memory
from quadriga.trainer.memory.report import shortage, table_text

if TYPE_CHECKING:
    from quadriga.data import PromptDataset

Longest = tuple[int, int]
"""Tokens of the prompt and of the response in the longest row of the data."""


def check_sft_memory(config: SFTConfig, longest: Longest, validation: PromptDataset | None) -> None:
    """Check that a run of `quadriga sft` fits the memory of its ranks, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    counted = config.trainer.check_memory and config.engine.name == "fsdp"
    limit = device_limit(config.trainer, device_type) if counted and device_type else None
    if limit is None or device_type is None:
        return
    plan = sft_memory_plan(config, longest, validation, device_type)
    short = shortage(plan, limit, states_only=True) or shortage(plan, limit)
    if short is not None:
        raise ConfigError(
            f"{short}; {'; or '.join(_remedies(config, device_type))}; "
            "trainer.check_memory=false starts the run anyway",
            key="trainer.check_memory",
        )


def sft_plan_text(config: SFTConfig, longest: Longest, validation: PromptDataset | None) -> str:
    """Return the plan of a run as a table, and whether it fits.

    Raises:
        ModelError: the model folder has no config of a suitable model.
    """
    device_type = planned_device(config.trainer) or "cuda"
    plan = sft_memory_plan(config, longest, validation, device_type)
    limit = device_limit(config.trainer, device_type)
    return table_text(plan, limit, lambda: _remedies(config, device_type))


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
    actor = training_memory(
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
    return MemoryPlan(device_type, (memory,), trainer.n_gpus_per_node)


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


def _remedies(config: SFTConfig, device_type: str) -> Iterator[str]:
    """Yield what to change, most effective first."""
    if not config.model.gradient_checkpointing:
        yield "set model.gradient_checkpointing=true"
    if config.data.micro_batch_size_per_gpu is None and config.engine.use_dynamic_bsz:
        budget = config.engine.max_tokens_per_micro_batch
        yield f"lower engine.max_tokens_per_micro_batch={budget}"
    else:
        yield "lower data.micro_batch_size_per_gpu"
    if device_type != "cpu" and not config.engine.offload_policy:
        yield "set engine.offload_policy=true"
    if config.optim.name == "adamw":
        yield "set optim.name=adamw_8bit (a quarter of the optimizer states)"
    if device_type != "cpu":
        yield "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)"
    else:
        yield "use fewer ranks of a node, or a smaller model"
