"""Training of a reward model on pairs of responses.

consumes      batches of pairs, in the order of the loader
produces      metrics and checkpoints in the run folder, and a sequence classifier
waits for     each update, since the next one needs its weights

With validation pairs the loop computes their loss, and the share in which the chosen response has
the higher score, every `test_freq` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quadriga.config.commands import RMConfig
from quadriga.config.paths import absolute_paths
from quadriga.models.folder import local_folder, with_absolute_paths
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.checks.settings import check_warmup
from quadriga.trainer.fine_tuning.one_group import (
    is_due,
    start_one_group,
    steps_of,
    total_steps_of,
)
from quadriga.trainer.preflight import check_fine_tuning_config
from quadriga.trainer.record import RunRecord
from quadriga.trainer.role_workers import threads_per_rank
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.worker_groups import StartedGroups, save_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data.pairs import PairDataset, PairLengths
    from quadriga.workers.roles import PairTrainingGroup

_KEY = Role.RewardModel.key
"""Folder of the model in a checkpoint."""


@dataclass(frozen=True)
class RMResult:
    """The folder of the trained model, the steps that were taken, and the metrics of the last
    validation ({} without validation data)."""

    model_path: str
    steps: int
    validation: dict[str, float]


def run_rm(config: RMConfig) -> RMResult:
    """Run `quadriga rm`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    trainer = RMTrainer(config)
    try:
        with trainer.checkpoints.stop.listening():
            return trainer.fit()
    finally:
        trainer.close()


class RMTrainer:
    """Minimises the mean of −log σ(s_chosen − s_rejected − margin) over the pairs of a batch."""

    def __init__(self, config: RMConfig) -> None:
        from quadriga.data import PromptLoader
        from quadriga.trainer.memory.check import rm_memory  # imports torch

        self.given, config = config, absolute_paths(config)
        self.config, data = config, config.data
        rows = load_pairs(config)
        self.tokenizer, self.val_pairs = rows.tokenizer, rows.val
        rm_memory(config, rows.lengths).check()
        self.loader = PromptLoader(
            rows.train, data.train_batch_size, shuffle=data.shuffle, seed=config.trainer.seed
        )
        check_warmup("optim", config.optim, self.total_steps)
        self.checkpoints = Checkpointing(config, self.loader, self.given)
        self._started: StartedGroups | None = None

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps."""
        return total_steps_of(self.config.trainer, self.loader)

    def fit(self) -> RMResult:
        """Run the loop: update, and where it is due validate and save."""
        total, group = self.total_steps, self._start()
        # Loaded before the run folder is opened: a folder of a run that cannot be continued keeps
        # all that it holds.
        resumed, first = self.checkpoints.resume(), 0
        if resumed is not None:
            first = resumed.state.step
            group.load_checkpoint(str(resumed.folder / _KEY), first)
        with RunRecord.open(self.config, total, self.tokenizer, resumed, self.given) as record:
            if resumed is not None and self.val_pairs is not None:
                self.checkpoints.end_pending(
                    resumed, record, lambda: self._log_validation(record, group, first)
                )
            for step, rows in steps_of(self.checkpoints, self.loader, total, first):
                with record.span("step"):
                    record.log_update(group.update_rm(rows))
                self._end_step(record, group, step)
            path = str(record.folder.model)
            group.export_hf(path)
            return RMResult(path, total, record.last_validation)

    def _end_step(self, record: RunRecord, group: PairTrainingGroup, step: int) -> None:
        total = self.total_steps
        due = self.val_pairs is not None and is_due(self.config.trainer, step, total)
        validate = partial(self._log_validation, record, group, step)
        self.checkpoints.end_step(
            record,
            step,
            last=step == total,
            validate=validate if due else None,
            save=partial(save_roles, groups={_KEY: group}),
        )

    def _log_validation(self, record: RunRecord, group: PairTrainingGroup, step: int) -> bool:
        """Validate. Return False: a run has no goal that ends it."""
        with record.span("validate"):
            metrics = self.validate(group)
        record.log_validation(step, metrics)
        return False

    def validate(self, group: PairTrainingGroup) -> dict[str, float]:
        """Return `val/loss` and `val/accuracy` over the validation pairs; {} if there are none."""
        if self.val_pairs is None:
            return {}
        from quadriga.algorithms.pairwise_loss import pairwise_loss
        from quadriga.data import PromptLoader
        from quadriga.data.pairs import MARGINS

        losses: list[float] = []
        right = 0
        size = self.config.data.train_batch_size
        for rows in PromptLoader(self.val_pairs, size, shuffle=False, drop_last=False):
            margins_P = rows.batch[MARGINS][0::2]
            scores_B = _scores(group, rows)
            chosen_P, rejected_P = scores_B.batch[fields.RM_SCORES].sum(-1).view(-1, 2).unbind(-1)
            losses += pairwise_loss(chosen_P, rejected_P, margins_P).loss_P.tolist()
            right += int((chosen_P > rejected_P).sum())
        count = len(losses)
        return {"val/loss": sum(losses) / count, "val/accuracy": right / count}

    def close(self) -> None:
        """Stop the worker group, if it is started."""
        if self._started is not None:
            self._started.close()
            self._started = None

    def _start(self) -> PairTrainingGroup:
        from dataclasses import replace

        from quadriga.single_controller import ClassWithInitArgs
        from quadriga.workers import PairTrainingWorker, RankRuntime

        trainer = self.config.trainer
        runtime = RankRuntime(
            device=trainer.device,
            threads=threads_per_rank(trainer),
            seed=trainer.seed,
            total_steps=self.total_steps,
        )
        config = replace(self.config, model=with_absolute_paths(self.config.model))
        worker = ClassWithInitArgs(PairTrainingWorker, config=config, runtime=runtime)
        self._started, group = start_one_group(trainer, Role.RewardModel, worker)
        return group


@dataclass(frozen=True)
class Pairs:
    """The tokenizer and the pairs of a run. `val` is None without files for validation."""

    tokenizer: PreTrainedTokenizerBase
    train: PairDataset
    val: PairDataset | None

    @property
    def lengths(self) -> PairLengths:
        """Bounds of the tokens of all pairs."""
        return self.train.lengths if self.val is None else self.train.lengths | self.val.lengths


def load_pairs(config: RMConfig) -> Pairs:
    """Load the tokenizer and all pairs, and check them against the model.

    Raises:
        InputError: a file, a row or the model does not fit.
    """
    from quadriga.models import load_tokenizer
    from quadriga.models.context_window import LongestSequence
    from quadriga.trainer.checks.sequence_checks import check_pair_data

    model, data = config.model, config.data
    trusted = model.trust_remote_code
    path = model.tokenizer_path or model.path
    tokenizer = load_tokenizer(path, trust_remote_code=trusted)
    train = _dataset(config, data.train_files, tokenizer)
    val = _dataset(config, data.val_files, tokenizer) if data.val_files else None
    found = Pairs(tokenizer, train, val)
    longest = LongestSequence(
        found.lengths.longest + 1,
        f"the longest conversation has {found.lengths.longest} tokens, and one is added",
        "lower data.max_length, beyond which pairs are left out,",
    )
    check_pair_data(config, tokenizer, longest, [train] if val is None else [train, val])
    return found


def _dataset(
    config: RMConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> PairDataset:
    from quadriga.data.pairs import PairDataset
    from quadriga.models.score_head import padding_token

    data, model = config.data, config.model
    folder = local_folder(model.path)
    return PairDataset(
        files,
        tokenizer,
        pad_token_id=padding_token(
            folder,
            model.tokenizer_path or folder,
            trust_remote_code=model.trust_remote_code,
        ),
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=data.margin_key,
        max_length=data.max_length,
        chat_template_kwargs=data.chat_template_kwargs,
        cache_dir=data.cache_dir,
    )


def _scores(group: PairTrainingGroup, rows: DataProto) -> DataProto:
    padded, extra = pad_dataproto_to_divisor(rows, group.world_size)
    return unpad_dataproto(group.compute_pair_scores(padded), extra)
