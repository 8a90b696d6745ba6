"""Check the settings of `quadriga rm` against each other."""

from __future__ import annotations

from quadriga.config.checks.ranges import check_values
from quadriga.config.checks.settings import KnownNames
from quadriga.config.checks.trained_part import check_one_part
from quadriga.config.checks.unread import (
    check_unread_engine,
    check_unread_optim,
    check_warmup_of_run,
)
from quadriga.config.convert import check_choice
from quadriga.config.schema import RMConfig
from quadriga.errors import ConfigError


def check_rm_settings(config: RMConfig, known: KnownNames | None = None) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga rm`."""
    check_values(config)
    trainer, pairs = config.trainer, config.data.train_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    if pairs % ranks:
        raise ConfigError(
            f"data.train_batch_size={pairs} pairs do not divide over {ranks} ranks "
            f"(trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node}); set it to a multiple of {ranks}",
            key="data.train_batch_size",
        )
    if trainer.backend == "local" and ranks > 1:
        raise ConfigError(
            f"trainer.backend=local runs one rank, because its ranks are in one process and run no "
            f"collectives, but there are {ranks}; set trainer.backend=ray",
            key="trainer.backend",
        )
    if known and known.engines:
        check_choice("engine.name", config.engine.name, sorted(known.engines))
    size = config.engine.fsdp_size
    if size != -1 and (size < 1 or ranks % size):
        raise ConfigError(
            f"engine.fsdp_size={size} must be -1 (all ranks) or divide the {ranks} ranks",
            key="engine.fsdp_size",
        )
    if config.engine.fused_head:
        raise ConfigError(
            "engine.fused_head=true is for log-probabilities, and a reward model computes one "
            "number a sequence; set it to null",
            key="engine.fused_head",
        )
    check_one_part("model", config.model)
    check_unread_engine("engine", config.engine)
    check_unread_optim("optim", config.optim)
    if trainer.total_training_steps is not None:
        check_warmup_of_run("optim", config.optim, trainer.total_training_steps)
