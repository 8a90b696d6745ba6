"""One forward of a micro-batch: from rows of tokens to one number per response token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.engines.base import Batch, Outputs
from quadriga.engines.packed_attention import supports_packing, use_packed_attention
from quadriga.models.log_prob import log_probs_and_entropy
from quadriga.parallel.packing import pack_rows

Head = Literal["lm", "value"]


class TokenModel:
    """A Hugging Face model seen as a function of micro-batches.

    Packed where the model allows it: no padding, shared prompts once, the head applied only where
    a response token is predicted. Padded otherwise: the same numbers, more work.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: Head,
        device: torch.device,
        *,
        packed: bool | None = None,
    ) -> None:
        self.model = model
        self.head = head
        self.device = device
        self.packed = supports_packing(model) if packed is None else packed
        # A mask costs accelerators their fastest kernel; CPUs gain from less padding.
        self.split_attention = device.type == "cpu"
        if self.packed:
            use_packed_attention(model)

    def __call__(self, rows: Batch, *, temperature: float, entropy: bool) -> Outputs:
        """`rows` as `engines.base.Batch` (any device); outputs [B, R] on the model's device."""
        if self.packed:
            return self._packed(rows, temperature, entropy)
        return self._padded(rows, temperature, entropy)

    def _packed(self, rows: Batch, temperature: float, entropy: bool) -> Outputs:
        packed = pack_rows(
            rows["input_ids"],
            rows["attention_mask"],
            rows["response_mask"],
            split_attention=self.split_attention,
        ).to(self.device)
        keep = {"logits_to_keep": packed.predictors} if self.head == "lm" else {}
        scores = self.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            row_layout=packed.layout,
            **keep,
        ).logits[0]
        if self.head == "value":
            return {"values": packed.unpack(scores[packed.predictors, 0].float())}
        outputs = _policy_outputs(scores, packed.labels, temperature, entropy)
        return {name: packed.unpack(values) for name, values in outputs.items()}

    def _padded(self, rows: Batch, temperature: float, entropy: bool) -> Outputs:
        names = ("input_ids", "attention_mask", "response_mask")
        ids, attention, mask = (rows[name].to(self.device) for name in names)
        start = ids.shape[1] - mask.shape[1]
        scores = self.model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).logits[:, start - 1 : -1]
        if self.head == "value":
            return {"values": scores[..., 0].float() * mask}
        outputs = _policy_outputs(scores, ids[:, start:], temperature, entropy)
        return {name: values * mask for name, values in outputs.items()}


def _policy_outputs(logits: Tensor, labels: Tensor, temperature: float, entropy: bool) -> Outputs:
    log_probs, entropies = log_probs_and_entropy(logits, labels, temperature, entropy=entropy)
    return {"log_probs": log_probs, **({"entropy": entropies} if entropy else {})}
