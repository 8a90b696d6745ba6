"""Check the settings of `quadriga rm` against each other."""

from __future__ import annotations

from quadriga.config.checks.engine import check_engine_ranks
from quadriga.config.checks.settings import KnownNames
from quadriga.config.checks.trained_part import check_one_part
from quadriga.config.checks.unread import check_unread_optim, check_warmup_of_run
from quadriga.config.commands import RMConfig
from quadriga.config.convert import check_choice, check_values
from quadriga.errors import ConfigError


def check_rm_settings(config: RMConfig, known: KnownNames | None = None) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga rm`."""
    check_values(config)
    trainer, pairs = config.trainer, config.data.train_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    check_engine_ranks("engine", config.engine, ranks, config.optim)
    together = config.engine.model_parallel_size
    parts = ranks // together
    if pairs % parts:
        shared = "" if together == 1 else f" / {together} ranks that compute the same rows"
        raise ConfigError(
            f"data.train_batch_size={pairs} pairs do not divide over {parts} ranks "
            f"(trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node}{shared}); set it to a multiple of {parts}",
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
    if config.engine.fused_head:
        raise ConfigError(
            "engine.fused_head=true is for log-probabilities, and a reward model computes one "
            "number a sequence; set it to null",
            key="engine.fused_head",
        )
    check_one_part("model", config.model)
    check_unread_optim("optim", config.optim)
    if trainer.total_training_steps is not None:
        check_warmup_of_run("optim", config.optim, trainer.total_training_steps)
