"""`quadriga train`: run the trainer, and close what it started.

A file of its own, because it is the entry point that programs import: `run_training(config)`.
"""

from collections.abc import Iterable

from quadriga.config.schema import TrainConfig


def run_training(config: TrainConfig, callbacks: Iterable[object] = ()) -> None:
    """Run PPO or a related algorithm as `config` says.

    Args:
        callbacks: of the program, see `observability.callbacks`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    from quadriga.trainer.ppo import RayPPOTrainer  # imports torch

    trainer = RayPPOTrainer(config, callbacks=callbacks)
    try:
        with trainer.stop.listening():
            trainer.fit()
    finally:
        trainer.close()
