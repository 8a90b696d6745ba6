"""The memory of `quadriga generate` and `quadriga eval`, for rows of full length."""

from __future__ import annotations

import math

from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import GenerationConfig, TrainConfig
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.memory import GeneratedRows, generation_memory
from quadriga.trainer.evaluation.ranks import trainer_settings
from quadriga.trainer.memory.machine import device_limit, planned_device
from quadriga.trainer.memory.plan import ROLLOUT, MemoryPlan, pool_memory
from quadriga.trainer.memory.report import table_text
from quadriga.trainer.run.checks.images import uncounted_images


def rows_at_once(config: GenerationConfig) -> tuple[int, int]:
    """Return the responses that one rank generates of a batch, and those that it has at once."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    of_rank = math.ceil(config.batch_size * config.n / ranks)
    return of_rank, min(of_rank, config.rollout.micro_batch_size)


def generation_memory_plan(config: GenerationConfig, device_type: str) -> MemoryPlan:
    """Return the memory of generation with these settings.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    pool = RolePool((ROLLOUT,), tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes)
    if config.rollout.name != "hf":
        alone = pool_memory(TrainConfig(), device_type, pool, {}, None)
        left_out = f"rollout (engine {config.rollout.name})"
        return MemoryPlan(device_type, (alone,), trainer.n_gpus_per_node, (left_out,))
    _, rows = rows_at_once(config)
    sampling = config.sampling
    memory = generation_memory(
        config.model,
        GeneratedRows(
            rows,
            math.ceil(rows / config.n),
            config.max_prompt_length,
            config.max_response_length,
        ),
        SamplingParams(
            max_new_tokens=config.max_response_length,
            eos_token_ids=(),
            pad_token_id=0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        ),
        dtype=config.rollout.dtype,
        device_type=device_type,
    )
    missing = uncounted_images(config.model)
    if memory.uncounted:
        missing.append(f"KV cache and buffers ({memory.uncounted})")
    planned = pool_memory(TrainConfig(), device_type, pool, {}, memory)
    return MemoryPlan(device_type, (planned,), trainer.n_gpus_per_node, tuple(missing))


def generation_plan_text(config: GenerationConfig) -> str:
    """Return the numbers of rows and the memory, and whether it fits.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer = trainer_settings(config.trainer)
    device_type = planned_device(trainer) or "cuda"
    of_rank, rows = rows_at_once(config)
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    lines = [
        f"responses of a batch   {config.batch_size * config.n} = {config.batch_size} prompts × "
        f"{config.n}, {of_rank} on each of {ranks} ranks",
        f"  at once on a rank    {rows} of up to {config.max_prompt_length} + "
        f"{config.max_response_length} tokens",
    ]
    table = table_text(
        generation_memory_plan(config, device_type),
        device_limit(trainer, device_type),
        lambda: [
            f"lower rollout.micro_batch_size={config.rollout.micro_batch_size} or batch_size="
            f"{config.batch_size}",
            "lower max_prompt_length or max_response_length",
        ],
    )
    return "\n".join([*lines, table])
