"""One forward of a micro-batch: from rows of tokens to one number per response token.

Shapes: B rows, R response columns, K targets (the response tokens that count), D hidden, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.algorithms.full_kl import kl_full
from quadriga.engines.base import Batch, Outputs
from quadriga.engines.fused_head import SMALLEST_FUSED, FusedHead, output_layer, why_not_fused
from quadriga.engines.micro_batches import filler_batch
from quadriga.engines.packed_attention import supports_packing, use_packed_attention
from quadriga.errors import ConfigError
from quadriga.models.linear_full_kl import linear_full_kl
from quadriga.models.linear_log_prob import linear_log_probs
from quadriga.models.log_prob import log_probs_and_entropy
from quadriga.parallel.packing import pack_rows

Head = Literal["lm", "value"]


@dataclass(frozen=True)
class LaidOut:
    """A micro-batch as the model takes it.

    `inputs`: the model's arguments. `labels` [K]. `pick`: what the output layer is given or gives,
    to [K, …]. `unpack`: [K] to [B, R], zero at every other place.
    """

    inputs: dict[str, Any]
    labels: Tensor
    pick: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


class TokenModel:
    """A Hugging Face model seen as a function of micro-batches.

    Packed where the model allows it: no padding, shared prompts once, the head applied only where
    a response token is predicted. Padded otherwise: the same numbers, more work.

    `fused` None: the fused head where a micro-batch of `tokens` makes many logits and the model
    allows it. Raises `ConfigError` for `fused` True and a model that does not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        device: torch.device,
        *,
        packed: bool | None = None,
        fused: bool | None = False,
        tokens: int = 0,
    ) -> None:
        self.model = model
        self.head = head
        self.device = device
        self.packed = supports_packing(model) if packed is None else packed
        # A mask costs accelerators their fastest kernel; CPUs gain from less padding.
        self.split_attention = device.type == "cpu"
        if self.packed:
            use_packed_attention(model)
        self._fused_head = self._fuse(fused, tokens) if head == "lm" else None

    @property
    def fused(self) -> bool:
        """Whether log-probabilities are made from hidden states, without all the logits."""
        return self._fused_head is not None

    def __call__(
        self,
        rows: Batch,
        *,
        temperature: float,
        entropy: bool,
        reference: TokenModel | None = None,
    ) -> Outputs:
        """`rows` as `engines.base.Batch` (any device); outputs [B, R] on the model's device.

        With a `reference`, `full_kl` too: KL(this ‖ reference) over the vocabulary.
        """
        laid = self._lay_out(rows)
        if self.head == "value":
            return {"values": laid.unpack(laid.pick(self._run(laid))[:, 0].float())}
        wanted = Wanted(temperature, entropy, full_kl=reference is not None)
        if self._fused_head is None or not (reference is None or reference.fused):
            ref_logits = None if reference is None else reference.logits(rows)
            found = wanted.from_logits(laid.pick(self._run(laid)), laid.labels, ref_logits)
        else:
            state = None if reference is None else reference.last_state(rows)
            with self._fused_head.doing(
                lambda hidden, weight: wanted.from_hidden(
                    laid.pick(hidden), weight, laid.labels, state
                )
            ):
                found = self._run(laid)
        return {name: laid.unpack(found[:, i]) for i, name in enumerate(wanted.names)}

    def logits(self, rows: Batch) -> Tensor:
        """[K, V] without gradient."""
        laid = self._lay_out(rows)
        with torch.no_grad():
            return laid.pick(self._run(laid))

    def last_state(self, rows: Batch) -> tuple[Tensor, Tensor]:
        """(hidden states that the fused head is given [K, D], its weight [V, D]), no gradient.

        The weight is good until the model's weights are sharded again.
        """
        assert self._fused_head is not None
        laid = self._lay_out(rows)
        weights: list[Tensor] = []

        def keep(hidden: Tensor, weight: Tensor) -> Tensor:
            weights.append(weight.detach())
            return laid.pick(hidden)

        with torch.no_grad(), self._fused_head.doing(keep):
            return self._run(laid), weights[0]

    def _run(self, laid: LaidOut) -> Tensor:
        logits: Tensor = self.model(**laid.inputs, use_cache=False).logits
        return logits

    def _fuse(self, fused: bool | None, tokens: int) -> FusedHead | None:
        vocabulary = self.model.config.get_text_config().vocab_size
        if fused is False or (fused is None and tokens * vocabulary < SMALLEST_FUSED):
            return None
        reason = why_not_fused(self.model, lambda: self._run(self._lay_out(filler_batch())))
        if reason is None:
            return FusedHead(output_layer(self.model))
        if fused:
            raise ConfigError(f"engine.fused_head=true: {reason}; set it to null or false")
        return None

    def _lay_out(self, rows: Batch) -> LaidOut:
        return self._packed(rows) if self.packed else self._padded(rows)

    def _packed(self, rows: Batch) -> LaidOut:
        packed = pack_rows(
            rows["input_ids"],
            rows["attention_mask"],
            rows["response_mask"],
            split_attention=self.split_attention,
        ).to(self.device)
        inputs = {
            "input_ids": packed.input_ids,
            "position_ids": packed.position_ids,
            "row_layout": packed.layout,
        }
        if self.head == "value":
            return LaidOut(inputs, packed.labels, lambda x: x[0, packed.predictors], packed.unpack)
        inputs["logits_to_keep"] = packed.predictors
        return LaidOut(inputs, packed.labels, lambda x: x[0], packed.unpack)

    def _padded(self, rows: Batch) -> LaidOut:
        names = ("input_ids", "attention_mask", "response_mask")
        ids, attention, mask = (rows[name].to(self.device) for name in names)
        start = ids.shape[1] - mask.shape[1]
        kept = mask.bool()

        def unpack(values: Tensor) -> Tensor:
            return values.new_zeros(kept.shape).masked_scatter(kept, values)

        inputs = {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        }
        return LaidOut(inputs, ids[:, start:][kept], lambda x: x[:, start - 1 : -1][kept], unpack)


@dataclass(frozen=True)
class Wanted:
    """What is made of each target's logits; a column each, in the order of `names`."""

    temperature: float
    entropy: bool
    full_kl: bool

    @property
    def names(self) -> list[str]:
        """The outputs' names."""
        return ["log_probs", *["entropy"] * self.entropy, *["full_kl"] * self.full_kl]

    def from_logits(
        self, logits_KV: Tensor, labels_K: Tensor, ref_logits_KV: Tensor | None
    ) -> Tensor:
        """[K, number of names], at least float32."""
        columns = self._asked_for(
            log_probs_and_entropy(logits_KV, labels_K, self.temperature, entropy=self.entropy)
        )
        if ref_logits_KV is not None:
            columns.append(kl_full(logits_KV, ref_logits_KV, self.temperature))
        return torch.stack(columns, -1)

    def from_hidden(
        self,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        labels_K: Tensor,
        reference: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """The same from hidden states and the output layer's weight, no [K, V] tensor made."""
        columns = self._asked_for(
            linear_log_probs(hidden_KD, weight_VD, labels_K, self.temperature, entropy=self.entropy)
        )
        if reference is not None:
            columns.append(linear_full_kl(hidden_KD, weight_VD, *reference, self.temperature))
        return torch.stack(columns, -1)

    def _asked_for(self, log_probs_and_entropy: tuple[Tensor, Tensor]) -> list[Tensor]:
        return list(log_probs_and_entropy) if self.entropy else [log_probs_and_entropy[0]]
