"""The conversations of supervised fine-tuning: their data, their end tokens and their loss."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.commands import SFTConfig, SFTDataConfig
from quadriga.data.conversations.turns import turn_end_ids
from quadriga.models.folder import end_token_ids
from quadriga.protocol import fields, pad_dataproto_to_divisor, unpad_dataproto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import SFTDataset, SFTLoader
    from quadriga.workers.roles import SFTGroup

_log = logging.getLogger("quadriga")


def conversations(
    data: SFTDataConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> SFTDataset:
    """Return the conversations of `files`, as the settings describe their columns.

    Raises:
        DataError: a file is missing, or a row cannot be used.
        ModelError: it is unknown which tokens of a conversation the assistant writes.
    """
    from quadriga.data import SFTDataset

    return SFTDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        messages_key=data.messages_key,
        loss_turns=data.loss_turns,
        max_length=data.max_length,
        chat_template_kwargs=data.chat_template_kwargs,
        cache_dir=data.cache_dir,
    )


def evaluation_rows(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> SFTDataset | None:
    """Return the first `trainer.val_size` validation conversations; None if no loss is computed.

    Raises:
        As `conversations`.
    """
    data = config.data
    if not data.val_files or not data.val_loss:
        return None
    return conversations(data, data.val_files, tokenizer).head(config.trainer.val_size)


@dataclass(frozen=True)
class EvaluationLoss:
    """The mean of −log p over the tokens of the assistant in the validation conversations.

    Attributes:
        loader: the conversations; None: there are none.
    """

    loader: SFTLoader | None

    @classmethod
    def of(cls, rows: SFTDataset | None, batch_size: int) -> EvaluationLoss:
        """Return the loss of `evaluation_rows`."""
        from quadriga.data import SFTLoader

        if rows is None:
            return cls(None)
        return cls(SFTLoader(rows, batch_size, shuffle=False, drop_last=False))

    def measure(self, policy: SFTGroup) -> dict[str, float]:
        """Return `val/loss`, nats per token; nothing without validation conversations."""
        if self.loader is None:
            return {}
        total, count = 0.0, 0
        for batch in self.loader:
            # The ranks take equal parts. Rows that are added to that end do not count.
            rows, added = pad_dataproto_to_divisor(batch, policy.world_size)
            found = unpad_dataproto(policy.compute_sft_log_prob(rows), added)
            mask = batch.batch[fields.RESPONSE_MASK]
            log_probs = found.batch[fields.OLD_LOG_PROBS].double()
            total -= float((log_probs * mask).sum())
            count += int(mask.sum())
        return {"val/loss": total / count}


def tell_other_ends(
    model_path: str, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> None:
    """Log a warning if conversations end with a token that does not end generation.

    The arguments of the chat template can change the token with which it ends a turn.
    """
    other = set(ends) - {*end_token_ids(model_path, tokenizer), *turn_end_ids(tokenizer)}
    if other:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(other))))
        _log.warning(
            "the chat template ends a turn of the assistant with %s, which does not end generation "
            "of a response; add its id (%s) to trainer.val_sampling.stop_token_ids here, and to "
            "eos_token_id in generation_config.json of the trained model",
            names,
            ", ".join(map(str, sorted(other))),
        )
