"""`quadriga train`: check everything, start the backend, run the trainer, close what was opened."""

from __future__ import annotations

from quadriga.config.schema import TrainConfig
from quadriga.trainer.preflight import check_train_config


def run_training(config: TrainConfig) -> None:
    """Run PPO's family as `config` says.

    Raises:
        InputError: settings, files, model folders or machines do not fit. Nothing was started.
    """
    check_train_config(config)
    from quadriga.trainer.ppo import RayPPOTrainer

    trainer = RayPPOTrainer(config)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
