"""The memory of `quadriga generate` and `quadriga eval`, and the refusal of what does not fit.

All rows have full length. Before a rank starts, the number of prompts and the longest one are those
of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quadriga.config.commands import GenerationConfig
from quadriga.config.role_ranks import RolePool, trainer_settings
from quadriga.config.schema import TrainConfig
from quadriga.rollout import rollout_of
from quadriga.rollout.memory import (
    GeneratedRows,
    GenerationMemory,
    generation_memory,
    planned_sampling,
)
from quadriga.rollout.reserved import RESERVING, reserved_memory
from quadriga.trainer.checks.images import uncounted_images
from quadriga.trainer.memory.host import HostSettings
from quadriga.trainer.memory.machine import device_limit, planned_device
from quadriga.trainer.memory.phases import ROLLOUT, Part, pool_memory
from quadriga.trainer.memory.plan import MemoryPlan
from quadriga.trainer.memory.remedies import smaller_runs
from quadriga.trainer.memory.report import check_plan, plan_lines

if TYPE_CHECKING:
    from quadriga.data import PromptDataset


@dataclass(frozen=True)
class PromptBatch:
    """The largest batch of prompts.

    Attributes:
        count: prompts that are generated at once, over all ranks.
        longest: tokens of the longest.
    """

    count: int
    longest: int

    @staticmethod
    def of_settings(config: GenerationConfig) -> PromptBatch:
        """Return the largest batch that the settings allow."""
        return PromptBatch(config.batch_size, config.max_prompt_length)

    @staticmethod
    def of_data(config: GenerationConfig, prompts: PromptDataset) -> PromptBatch:
        """Return the largest batch of these prompts."""
        return PromptBatch(min(config.batch_size, len(prompts)), prompts.longest)


def check_generation_memory(config: GenerationConfig, prompts: PromptDataset) -> None:
    """Check that the generation of these prompts fits the memory of its ranks, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    trainer = trainer_settings(config.trainer)
    device_type = planned_device(trainer)
    if not trainer.check_memory or device_type is None:
        return
    plan = generation_memory_plan(config, device_type, PromptBatch.of_data(config, prompts))
    advice = partial(_remedies, config, plan)
    check_plan(plan, _host_settings(config), advice, "plan generate")


def _host_settings(config: GenerationConfig) -> HostSettings:
    return HostSettings(trainer_settings(config.trainer), {}, (config.model,))


def rows_at_once(config: GenerationConfig, batch: PromptBatch) -> tuple[int, int]:
    """Return the responses that one rank generates of a batch, and those that it has at once.

    Ranks that hold one copy of the weights together generate the same responses.
    """
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    copies = max(1, ranks // rollout_of(config.rollout).ranks_of_copy)
    rows = batch.count * config.n
    return math.ceil(rows / copies), config.rollout.rows_at_once(rows, copies)


def generation_memory_plan(
    config: GenerationConfig, device_type: str, batch: PromptBatch
) -> MemoryPlan:
    """Return the memory of the generation of a batch of prompts.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    pool = RolePool((ROLLOUT,), tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes)
    if config.rollout.name != "hf":
        reserved, left_out = _other_engine(config, device_type)
        alone = pool_memory(TrainConfig(), device_type, pool, {}, reserved)
        return MemoryPlan(device_type, (alone,), trainer.n_gpus_per_node, left_out)
    _, rows = rows_at_once(config, batch)
    memory = generation_memory(
        config.model,
        GeneratedRows(rows, math.ceil(rows / config.n), batch.longest, config.max_response_length),
        planned_sampling(config.sampling, config.max_response_length),
        dtype=config.rollout.dtype,
        device_type=device_type,
    )
    missing = uncounted_images(config.model)
    if memory.uncounted:
        missing.append(f"KV cache and buffers ({memory.uncounted})")
    planned = pool_memory(TrainConfig(), device_type, pool, {}, memory)
    return MemoryPlan(device_type, (planned,), trainer.n_gpus_per_node, tuple(missing))


def _other_engine(
    config: GenerationConfig, device_type: str
) -> tuple[GenerationMemory | None, tuple[str, ...]]:
    """Return what an engine other than hf reserves, and what is not counted, in words."""
    if config.rollout.name not in RESERVING:
        return None, (f"rollout (engine {config.rollout.name})",)
    limit = device_limit(trainer_settings(config.trainer), device_type)
    memory = reserved_memory(
        config.rollout,
        config.model,
        device_type=device_type,
        device=None if limit is None else limit.size,
        releasable=False,
    )
    return memory, (memory.missing,) if memory.missing else ()


def generation_plan_text(config: GenerationConfig) -> str:
    """Return the numbers of rows and the memory, and whether it fits.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer = trainer_settings(config.trainer)
    device_type = planned_device(trainer) or "cuda"
    batch = PromptBatch.of_settings(config)
    of_rank, rows = rows_at_once(config, batch)
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    lines = [
        f"responses of a batch   {batch.count * config.n} = {batch.count} prompts × "
        f"{config.n}, {of_rank} on each of {ranks} ranks",
        f"  at once on a rank    {rows} of up to {batch.longest} + "
        f"{config.max_response_length} tokens",
    ]
    plan = generation_memory_plan(config, device_type, batch)
    advice = partial(_remedies, config, plan)
    table = plan_lines(plan, _host_settings(config), advice)
    return "\n".join([*lines, *table])


def _remedies(config: GenerationConfig, plan: MemoryPlan, part: Part) -> Iterator[str]:
    """Yield what to change, most effective first. `part`: that does not fit."""
    if part == "all":
        yield from _batch_remedies(config, plan.device_type)
    if plan.device_type == "cpu":
        yield smaller_runs(plan)
    else:
        yield "use more ranks (trainer.n_gpus_per_node, trainer.nnodes), or a smaller model"


def _batch_remedies(config: GenerationConfig, device_type: str) -> Iterator[str]:
    """Yield what makes the KV cache smaller."""
    reserved = None
    if config.rollout.name != "hf":
        reserved, _ = _other_engine(config, device_type)
    if reserved is not None:
        yield f"lower rollout.{reserved.setting}"
    else:
        size, batch = config.rollout.micro_batch_size, config.batch_size
        if min(size, batch) > 1:  # else one row is generated at once
            yield f"lower rollout.micro_batch_size={size} or batch_size={batch}"
        yield (
            f"lower max_prompt_length={config.max_prompt_length} or "
            f"max_response_length={config.max_response_length}"
        )
