"""Supervised fine-tuning: the warm start of reinforcement learning, over the same workers.

The loop consumes rows with answers, in the loader's order. With held-out prompts it measures
greedy accuracy every `test_freq` steps, and stops once `stop_at_accuracy` is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quadriga.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    DataConfig,
    RolloutConfig,
    SFTConfig,
)
from quadriga.protocol import DataProto
from quadriga.trainer.groups import WATCH_S, one_pool, open_backend, threads_per_rank
from quadriga.trainer.ingredients import make_reward, prompt_dataset
from quadriga.trainer.placement import Role
from quadriga.trainer.preflight import check_sft_config
from quadriga.trainer.record import RunRecord
from quadriga.trainer.validation import Validator


@dataclass(frozen=True)
class SFTResult:
    """Where the model lies, and what was reached. `accuracy` is None without held-out data."""

    model_path: str
    steps: int
    accuracy: float | None


def run_sft(config: SFTConfig) -> SFTResult:
    """`quadriga sft`.

    Raises:
        InputError: settings, files, model folders or machines do not fit. Nothing was started.
    """
    check_sft_config(config)
    trainer = SFTTrainer(config)
    try:
        trainer.init_workers()
        return trainer.fit()
    finally:
        trainer.close()


class SFTTrainer:
    """Mean negative log-probability of answer tokens, over all ranks."""

    def __init__(self, config: SFTConfig) -> None:
        from quadriga.data import SFTDataset, SFTLoader
        from quadriga.models import load_tokenizer

        self.config = config
        model, data = config.model, config.data
        self.tokenizer = load_tokenizer(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )
        self.loader = SFTLoader(
            SFTDataset(
                data.train_files,
                self.tokenizer,
                prompt_key=data.prompt_key,
                response_key=data.response_key,
                max_length=data.max_length,
            ),
            data.train_batch_size,
            shuffle=data.shuffle,
            seed=config.trainer.seed,
        )
        self.held_out = _held_out(config, self.tokenizer)
        self.reward_fn = make_reward(config.reward, self.tokenizer)
        self.worker: Any = None
        self.group: Any = None
        self.backend: Any = None
        self.step = 0

    @property
    def total_steps(self) -> int:
        """Optimizer steps, unless `stop_at_accuracy` ends the run before."""
        return (
            self.config.trainer.total_training_steps
            or len(self.loader) * self.config.trainer.total_epochs
        )

    def init_workers(self) -> None:
        """Start the ranks and load the model."""
        from quadriga.single_controller import ClassWithInitArgs
        from quadriga.workers import RankRuntime, SFTWorker

        trainer = self.config.trainer
        self.backend = open_backend(trainer)
        manager = one_pool(trainer, [Role.ActorRollout], self.backend)
        manager.create_resource_pool()
        runtime = RankRuntime(
            device=trainer.device,
            threads=threads_per_rank(trainer),
            seed=trainer.seed,
            total_steps=self.total_steps,
            max_response_length=trainer.max_response_length,
        )
        self.group = self.backend.worker_group(
            manager.get_resource_pool(Role.ActorRollout),
            ClassWithInitArgs(
                SFTWorker, config=_worker_config(self.config), role="actor_rollout", runtime=runtime
            ),
            timeout=trainer.call_timeout_s,
        )
        self.group.start_worker_aliveness_check(WATCH_S)
        self.worker = self.group
        self.worker.init_model()

    def fit(self) -> SFTResult:
        """The loop."""
        settings = self.config.trainer
        with RunRecord.open(self.config, self.total_steps, self.tokenizer) as record:
            validator = Validator(settings.seed, self.held_out, self.worker, self.reward_fn, record)
            for rows in self.schedule():
                with record.span("step"):
                    record.add_worker(self.worker.update_sft(rows))
                due = settings.test_freq > 0 and self.step % settings.test_freq == 0
                if due or self.step == self.total_steps:
                    with record.span("sync_weights"):
                        self.worker.sync_weights()
                reached = validator.run(step=self.step, due=due or self.step == self.total_steps)
                record.end_step(self.step)
                if self._good_enough(reached):
                    break
            path = str(record.folder.path / "model")
            self.worker.export_hf(path)
            return SFTResult(path, self.step, validator.last.get("val/accuracy"))

    def schedule(self) -> Iterator[DataProto]:
        """Batches of rows, epoch after epoch; counts `step`."""
        for _ in range(math.ceil(self.total_steps / max(1, len(self.loader)))):
            for rows in self.loader:
                if self.step >= self.total_steps:
                    return
                self.step += 1
                yield rows

    def close(self) -> None:
        """Stop what was started."""
        if self.group is not None:
            self.group.shutdown()
        if self.backend is not None:
            self.backend.shutdown()

    def _good_enough(self, metrics: dict[str, float]) -> bool:
        goal = self.config.trainer.stop_at_accuracy
        return goal is not None and metrics.get("val/accuracy", -1.0) >= goal


def _worker_config(config: SFTConfig) -> ActorRolloutRefConfig:
    return ActorRolloutRefConfig(
        model=config.model,
        actor=ActorConfig(
            optim=config.optim,
            engine=config.engine,
            ppo_micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
        ),
        rollout=RolloutConfig(dtype=config.engine.dtype),
    )


def _held_out(config: SFTConfig, tokenizer: Any) -> Any:
    """A loader over the first `val_size` held-out prompts, or None."""
    from quadriga.data import PromptDataset, PromptLoader

    if not config.data.val_files:
        return None
    data = DataConfig(prompt_key=config.data.prompt_key, max_prompt_length=config.data.max_length)
    prompts = prompt_dataset(PromptDataset, config.data.val_files, data, tokenizer)
    return PromptLoader(
        prompts.head(config.trainer.val_size),
        config.trainer.val_size,
        shuffle=False,
        drop_last=False,
    )
