"""The memory of the training of a reward model, and the refusal of a run that does not fit.

The lengths are those of the pairs, which are loaded before a process is started.
"""

from __future__ import annotations

from dataclasses import replace

from quadriga.config.commands import RMConfig
from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import TrainConfig
from quadriga.data.pairs import PairLengths
from quadriga.engines.memory.engines import engine_memory
from quadriga.engines.memory.passes import Rows
from quadriga.trainer.memory.one_engine import (
    check_one_engine,
    missing_activations,
    one_engine_text,
)
from quadriga.trainer.memory.phases import REWARD_MODEL, pool_memory
from quadriga.trainer.memory.plan import MemoryPlan


def check_rm_memory(config: RMConfig, lengths: PairLengths) -> None:
    """Check that a run of `quadriga rm` fits the memory of its ranks, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    check_one_engine(config, lambda other, device: rm_memory_plan(other, lengths, device))


def rm_plan_text(config: RMConfig, lengths: PairLengths) -> str:
    """Return the plan of a run as a table, and whether it fits.

    Raises:
        ModelError: the model folder has no config of a suitable model.
    """
    return one_engine_text(config, lambda other, device: rm_memory_plan(other, lengths, device))


def rm_memory_plan(config: RMConfig, lengths: PairLengths, device_type: str) -> MemoryPlan:
    """Return the memory of a run whose settings were checked.

    Args:
        lengths: of all pairs, those of the validation included.
        device_type: "cpu", or the type of an accelerator.
    """
    trainer, engine, given = config.trainer, config.engine, config.data.micro_batch_size_per_gpu
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    pairs = config.data.train_batch_size // (ranks // engine.model_parallel_size)
    # Each row has one more token than its conversation, and its prompt has one at least. The two
    # rows of a pair compute what they share once.
    prompt = max(1, lengths.longest - lengths.own)
    update = Rows(
        count=2 * max(1, pairs),
        prompt=prompt,
        response=lengths.longest + 1 - prompt,
        samples=2,
        micro_batch=given,
    )
    memory = engine_memory(
        config.model,
        engine,
        head="score",
        ranks=ranks,
        device_type=device_type,
        update=update,
        evaluate=replace(update, micro_batch=engine.forward_rows(given)),
        optim=config.optim,
    )
    pool = RolePool(
        (REWARD_MODEL,), tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes
    )
    settings = TrainConfig(reward_model=replace(TrainConfig().reward_model, engine=engine))
    planned = pool_memory(settings, device_type, pool, {REWARD_MODEL: memory}, None)
    missing = missing_activations(REWARD_MODEL, memory)
    return MemoryPlan(device_type, (planned,), trainer.n_gpus_per_node, missing)
