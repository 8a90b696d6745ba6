"""Training of a reward model on pairs of responses.

With validation pairs the loop computes their loss, and the share in which the chosen response has
the higher score, every `test_freq` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.commands import RMConfig
from quadriga.config.paths import absolute_paths
from quadriga.data.pairs import MARGINS, PairDataset, PairLengths
from quadriga.models.folder import local_folder
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.trainer.fine_tuning.sft import FineTuned, OneGroupTrainer, Validate
from quadriga.trainer.preflight import check_fine_tuning_config
from quadriga.trainer.record import RunRecord
from quadriga.trainer.roles.placement import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import RankRuntime
    from quadriga.workers.roles import PairTrainingGroup


def run_rm(config: RMConfig) -> FineTuned:
    """Run `quadriga rm`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    return RMTrainer(config).run()


class RMTrainer(OneGroupTrainer[RMConfig, "PairTrainingGroup"]):
    """Minimises the mean of −log σ(s_chosen − s_rejected − margin) over the pairs of a batch."""

    saved_as = Role.RewardModel

    def __init__(self, config: RMConfig) -> None:
        from quadriga.trainer.memory import RunMemory  # imports torch

        given, config = config, absolute_paths(config)
        pairs = load_pairs(config)
        self.val_pairs = pairs.val
        RunMemory(config, pairs.lengths).check()
        super().__init__(given, config, pairs.tokenizer, pairs.train)

    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """See `OneGroupTrainer`."""
        from quadriga.single_controller import ClassWithInitArgs
        from quadriga.workers import PairTrainingWorker

        return ClassWithInitArgs(PairTrainingWorker, config=self.config, runtime=runtime)

    def update(self, policy: PairTrainingGroup, rows: DataProto) -> DataProto:
        """See `OneGroupTrainer`."""
        return policy.update_rm(rows)

    def validation(self, policy: PairTrainingGroup, record: RunRecord) -> Validate | None:
        """Return what logs `val/loss` and `val/accuracy` over the validation pairs."""
        pairs = self.val_pairs
        if pairs is None:
            return None

        def validate() -> bool:
            with record.span("validate"):
                metrics = validate_pairs(policy, pairs, self.config.data.train_batch_size)
            record.log_validation(self.step, metrics)
            return False

        return validate


def validate_pairs(policy: PairTrainingGroup, pairs: PairDataset, size: int) -> dict[str, float]:
    """Return the loss of pairs, and the share whose chosen response has the higher score."""
    from quadriga.algorithms.value_loss import pairwise_loss
    from quadriga.data import PromptLoader

    losses: list[float] = []
    right = 0
    for batch in PromptLoader(pairs, size, shuffle=False, drop_last=False):
        # The ranks take equal parts. Rows that are added to that end do not count.
        rows, added = pad_dataproto_to_divisor(batch, policy.world_size)
        scores_B = unpad_dataproto(policy.compute_pair_scores(rows), added)
        chosen_P, rejected_P = scores_B.batch[fields.RM_SCORES].sum(-1).view(-1, 2).unbind(-1)
        losses += pairwise_loss(chosen_P, rejected_P, batch.batch[MARGINS][0::2]).loss_P.tolist()
        right += int((chosen_P > rejected_P).sum())
    return {"val/loss": sum(losses) / len(losses), "val/accuracy": right / len(losses)}


@dataclass(frozen=True)
class Pairs:
    """The tokenizer and the pairs of a run. `val` is None without files for validation."""

    tokenizer: PreTrainedTokenizerBase
    train: PairDataset
    val: PairDataset | None

    @property
    def lengths(self) -> PairLengths:
        """Bounds of the tokens of all pairs."""
        both = [data.lengths for data in (self.train, self.val) if data is not None]
        return PairLengths(max(one.longest for one in both), max(one.own for one in both))


def load_pairs(config: RMConfig) -> Pairs:
    """Load the tokenizer and all pairs, and check them against the model.

    Raises:
        InputError: a file, a row or the model does not fit.
    """
    from quadriga.models.limits import LongestSequence
    from quadriga.models.loading import padding_token
    from quadriga.trainer.checks.data import check_fine_tuning_data
    from quadriga.workers.reward_model import tokenizer_of

    model, data = config.model, config.data
    tokenizer, folder = tokenizer_of(model), local_folder(model.path)
    padding = padding_token(
        folder, model.tokenizer_path or folder, trust_remote_code=model.trust_remote_code
    )
    train, val = (
        PairDataset.from_settings(files, tokenizer, data, pad_token_id=padding) if files else None
        for files in (data.train_files, data.val_files)
    )
    assert train is not None
    found = Pairs(tokenizer, train, val)
    longest = LongestSequence(
        found.lengths.longest + 1,
        f"the longest conversation has {found.lengths.longest} tokens, and one is added",
        "lower data.max_length, beyond which pairs are left out,",
    )
    check_fine_tuning_data(config, tokenizer, longest, [train] if val is None else [train, val])
    return found
