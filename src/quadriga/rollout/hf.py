"""Generation in process, with a plain Hugging Face copy of the model.

One prefill for prompts that several rows share, a cache written in place, and rows that have
finished leave the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError, ShapeError
from quadriga.models.loading import load_causal_lm
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.digest import tensor_digest
from quadriga.parallel.distributed import local_device
from quadriga.parallel.packing import first_row_with_same_prompt
from quadriga.rollout.base import FinishReason, RolloutOutput, SamplingParams
from quadriga.rollout.kv_cache import growing_cache, select_rows
from quadriga.rollout.sampling import draw

COMPACT_BELOW = 0.75
"""Rows leave the batch once at most this share of it is still being written."""


class HFRollout:
    """See `RolloutEngine`. `micro_batch_size` rows are generated at once.

    Raises `ModelError` for a folder that is not a model.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "auto",
        micro_batch_size: int = 256,
        **options: Any,
    ) -> None:
        if options:
            raise ModelError(
                f"rollout engine 'hf' has no options {sorted(options)}; remove them from "
                "rollout.options",
                path=model.path,
            )
        self.device = local_device(device)
        self.micro_batch_size = micro_batch_size
        load: Any = load_causal_lm
        self.module = load(
            model.path,
            dtype=compute_dtype(dtype, self.device),
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
        self.module.to(self.device).eval().requires_grad_(False)
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        rows = len(prompt_ids)
        if attention_mask.shape != prompt_ids.shape or sample_seeds.shape != (rows,):
            raise ShapeError(
                "prompt_ids and attention_mask must be [B, P] and sample_seeds [B]; got "
                f"{tuple(prompt_ids.shape)}, {tuple(attention_mask.shape)}, "
                f"{tuple(sample_seeds.shape)}"
            )
        width = sampling.max_new_tokens
        ids = torch.full((rows, width), sampling.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(rows, width, dtype=torch.int64)
        log_probs = torch.zeros(rows, width)
        stopped = torch.zeros(rows, dtype=torch.bool)
        with torch.inference_mode():
            for part in torch.arange(rows).split(self.micro_batch_size):
                run = _Generation(self, sampling, sample_seeds[part].to(self.device))
                run.prefill(prompt_ids[part], attention_mask[part])
                run.decode()
                ids[part], mask[part], log_probs[part], stopped[part] = run.collect()
        reasons: tuple[FinishReason, ...] = tuple(
            "stop" if done else "length" for done in stopped.tolist()
        )
        return RolloutOutput(ids, mask, log_probs, reasons)

    # Weights

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        held = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in stream:
                if name not in held:
                    raise ModelError(
                        f"weights came under the name {name!r}, which the rollout model "
                        "does not have; trainer and rollout must load the same model folder"
                    )
                if held[name].shape != tensor.shape:
                    raise ModelError(
                        f"{name!r} came with shape {tuple(tensor.shape)}, the rollout model has "
                        f"{tuple(held[name].shape)}"
                    )
                held[name].copy_(tensor)
        self._version = version

    def weights_digest(self) -> dict[str, int]:
        return {name: tensor_digest(t) for name, t in self.module.state_dict().items()}

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype each weight is held in, by checkpoint name."""
        return {name: tensor.dtype for name, tensor in self.module.state_dict().items()}

    def release(self) -> None:
        self.module.to("cpu")

    def resume(self) -> None:
        self.module.to(self.device)


class _Generation:
    """One micro-batch on its way. Columns are left-padded prompts, then response tokens.

    `alive` are the rows still in the batch (indices into the micro-batch); tensors whose first
    dimension is the batch shrink with it.
    """

    def __init__(self, engine: HFRollout, sampling: SamplingParams, seeds: Tensor) -> None:
        self.model = engine.module
        self.device = engine.device
        self.sampling = sampling
        self.seeds = seeds
        count, width = len(seeds), sampling.max_new_tokens
        self.ids = torch.full((count, width), sampling.pad_token_id, device=self.device)
        self.log_probs = torch.zeros(count, width, device=self.device)
        self.lengths = torch.full((count,), width, device=self.device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.ends = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=self.device)
        self.alive = torch.arange(count, device=self.device)

    def prefill(self, prompt_ids: Tensor, attention_mask: Tensor) -> None:
        """Run distinct prompts once, then give every row its copy of the cache."""
        valid = attention_mask.bool()
        first_column = int(valid.any(0).long().argmax())
        prompts, valid = prompt_ids[:, first_column:], valid[:, first_column:]
        owner = first_row_with_same_prompt(prompts, valid)
        distinct, row_of = torch.unique(owner, return_inverse=True)
        row_of = row_of.to(self.device)
        attention = valid[distinct].to(self.device)
        self.cache: Cache = growing_cache(self.model.config.get_text_config().num_hidden_layers)
        logits = self.model(
            input_ids=prompts[distinct].to(self.device),
            attention_mask=attention,
            position_ids=(attention.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        select_rows(self.cache, row_of)
        self.logits = logits.index_select(0, row_of)
        self.positions = attention.sum(1).index_select(0, row_of)
        width = attention.shape[1] + self.sampling.max_new_tokens
        self.bias = torch.zeros(len(row_of), 1, 1, width, dtype=logits.dtype, device=self.device)
        hidden = ~attention.index_select(0, row_of)
        self.bias[:, 0, 0, : attention.shape[1]].masked_fill_(hidden, torch.finfo(logits.dtype).min)
        self.prompt_width = attention.shape[1]

    def decode(self) -> None:
        """Draw, append, and run the model on the new tokens, until every row has ended."""
        running = torch.ones_like(self.alive, dtype=torch.bool)
        last = self.sampling.max_new_tokens - 1
        for place in range(last + 1):
            token, log_prob = draw(self.logits, self.sampling, self.seeds, place)
            self.ids[self.alive, place] = token
            self.log_probs[self.alive, place] = log_prob
            ended = self.alive[running & torch.isin(token, self.ends)]
            self.lengths[ended] = place + 1
            self.stopped[ended] = True
            running = ~self.stopped[self.alive]
            left = int(running.sum())
            if left == 0 or place == last:
                return
            if left <= COMPACT_BELOW * len(running):
                kept = running.nonzero()[:, 0]
                token, running = token[kept], running[kept]
                self._keep(kept)
            self._step(token, self.prompt_width + place + 1)

    def _keep(self, kept: Tensor) -> None:
        self.alive = self.alive[kept]
        self.seeds = self.seeds[kept]
        self.positions = self.positions[kept]
        self.bias = self.bias[kept]
        select_rows(self.cache, kept)

    def _step(self, token: Tensor, columns: int) -> None:
        self.logits = self.model(
            input_ids=token[:, None],
            attention_mask=self.bias[..., :columns],
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.positions = self.positions + 1

    def collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids, mask, log-probabilities, stopped) on CPU; nothing is left after a row's end."""
        mask = torch.arange(self.ids.shape[1], device=self.device) < self.lengths[:, None]
        ids = self.ids.masked_fill(~mask, self.sampling.pad_token_id)
        log_probs = self.log_probs.masked_fill(~mask, 0.0)
        return ids.cpu(), mask.long().cpu(), log_probs.cpu(), self.stopped.cpu()
