"""Generation in this process, with an unsharded Hugging Face copy of the model.

Prompts that several rows share are prefilled once, the key-value cache is written in place, and
rows that have ended leave the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from quadriga.config.schema import DtypeName, ModelConfig
from quadriga.errors import ModelError, RolloutError
from quadriga.models.architectures import architecture_of, is_listed
from quadriga.models.context_window import context_window
from quadriga.models.loading import load_causal_lm, load_tokenizer
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device
from quadriga.parallel.packing import first_row_with_same_prompt
from quadriga.rollout.abilities import ALL_SETTINGS, RolloutAbilities
from quadriga.rollout.base import FinishReason, RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.kv_cache import growing_cache, reorder_cache, sees_all_tokens
from quadriga.rollout.requests import check_request, check_sequences
from quadriga.rollout.sampling import draw
from quadriga.rollout.stop_strings import StopStrings
from quadriga.rollout.unlisted import check_generation

COMPACT_BELOW = 0.75
"""Ended rows leave the batch when at most this share of its rows is still generating. Compaction
copies the cache, so it does not pay for every single row."""

State = Literal["ready", "released", "closed"]
"""Whether the engine can generate, waits for `resume`, or has ended."""


class HFRollout:
    """See `RolloutEngine`. `micro_batch_size` rows are generated at once.

    Raises:
        ModelError: the folder does not hold a causal language model, its architecture is not
            supported, or an option is unknown.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: DtypeName = "auto",
        micro_batch_size: int = 256,
        **options: object,
    ) -> None:
        if options:
            raise ModelError(
                f"rollout engine 'hf' has no options {sorted(options)}; remove them from "
                "rollout.options",
                path=model.path,
            )
        self.model = model
        self.device = local_device(device)
        self.micro_batch_size = micro_batch_size
        self.module = load_causal_lm(
            model.path,
            dtype=compute_dtype(dtype, self.device),
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
            use_shm=model.use_shm,
        )
        self._move(self.device)
        self.module.requires_grad_(False)
        self.prompts = architecture_of(self.module.config).prompts
        self._parameters = set(inspect.signature(self.module.forward).parameters)
        if not is_listed(self.module.config):
            check_generation(self.module, self.device, self.forward)
        self._version = -1
        self._abilities = self._declared_abilities()
        self._state: State = "ready"
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def _declared_abilities(self) -> RolloutAbilities:
        window = context_window(self.module.config)
        return RolloutAbilities(
            vocabulary=self.module.config.get_text_config().vocab_size,
            window=window.tokens if window else None,
            log_probs={"policy": "always", "sampled": "always", "temperature_1": "always"},
            settings=ALL_SETTINGS,
            filter_order="top_k, top_p, min_p",
            seeded=True,
            batch_invariant=True,
            exposes_weights=True,
        )

    @property
    def name(self) -> str:
        return "hf"

    @property
    def abilities(self) -> RolloutAbilities:
        return self._abilities

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
        self._check_ready("generate")
        check_request(self.name, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
        count, width = len(prompt_ids), sampling.max_new_tokens
        ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(count, width, dtype=torch.int64)
        log_probs = torch.zeros(count, width)
        stopped = torch.zeros(count, dtype=torch.bool)
        with torch.inference_mode():
            for rows in self._micro_batches(attention_mask):
                generation = _Generation(self, sampling, sample_seeds[rows].to(self.device))
                generation.prefill(prompt_ids[rows], attention_mask[rows])
                generation.decode()
                ids[rows], mask[rows], log_probs[rows], stopped[rows] = generation.collect()
        reasons: tuple[FinishReason, ...] = tuple(
            "stop" if row_stopped else "length" for row_stopped in stopped.tolist()
        )
        versions = torch.full((count,), self._version, dtype=torch.int64)
        return RolloutOutput(ids, mask, log_probs, reasons, versions)

    def stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        """Return the check of the stop strings, or None if there are none."""
        if not sampling.stop_strings:
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                self.model.tokenizer_path or self.model.path,
                trust_remote_code=self.model.trust_remote_code,
            )
        return StopStrings(self._tokenizer, sampling.stop_strings)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_ready("score")
        check_sequences(self.name, self.abilities, ids, attention_mask)
        log_probs = torch.zeros(ids.shape)
        with torch.inference_mode():
            # One row at a time, without padding: the plain forward pass is the reference.
            for row, valid in enumerate(attention_mask.bool()):
                tokens = ids[row, valid].to(self.device)
                logits = self.module(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
                chosen = logits.gather(-1, tokens[1:, None])[:, 0] - logits.logsumexp(-1)
                columns = valid.nonzero()[1:, 0].cpu()
                log_probs[row, columns] = chosen.cpu()
        return log_probs.clone()

    def forward(
        self, cache: Cache, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Run the model on new tokens [b, added] of each row; return the last logits [b, V]."""
        return run_with_cache(self.module, self._parameters, cache, ids, mask, positions)

    def _micro_batches(self, attention_mask: Tensor) -> Iterator[Tensor]:
        """Yield the row indices of each micro-batch.

        A model that cannot compute prompts of different lengths together gets equal lengths.
        """
        # Prompt lengths 3 5 3 3 and two rows a micro-batch:
        #
        #   mixed lengths   0 1   2 3
        #   equal lengths   0 2   3   1     the rows of length 3, then those of length 5
        rows = torch.arange(len(attention_mask))
        if not len(rows):
            return
        if self.prompts == "mixed lengths":
            yield from torch.split(rows, self.micro_batch_size)
            return
        lengths = attention_mask.sum(1).cpu()
        for length in torch.unique(lengths):
            yield from torch.split(rows[lengths == length], self.micro_batch_size)

    # Weights

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open("update_weights")
        weights = self.module.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in stream:
                if name not in weights:
                    raise ModelError(
                        f"received a weight {name!r}, which the rollout model does not have; "
                        "trainer and rollout must load the same model folder"
                    )
                if weights[name].shape != tensor.shape:
                    raise ModelError(
                        f"received weight {name!r} with shape {tuple(tensor.shape)}, but in the "
                        f"rollout model it has shape {tuple(weights[name].shape)}"
                    )
                weights[name].copy_(tensor)
        self._version = version

    def weights_digest(self) -> dict[str, int]:
        self._check_open("weights_digest")
        return {name: tensor_digest(t) for name, t in self.module.state_dict().items()}

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        self._check_open("weight_dtypes")
        return {name: tensor.dtype for name, tensor in self.module.state_dict().items()}

    # State

    def release(self) -> None:
        self._check_open("release")
        self._move(torch.device("cpu"))
        self._state = "released"

    def resume(self) -> None:
        self._check_open("resume")
        self._move(self.device)
        self._state = "ready"

    def close(self) -> None:
        if self._state != "closed":
            self._move(torch.device("meta"))  # the storages of the weights are freed
            self._state = "closed"

    def _check_ready(self, method: str) -> None:
        self._check_open(method)
        if self._state == "released":
            raise RolloutError(
                f"rollout engine 'hf': {method} was called while the engine is released; call "
                "resume first",
                engine=self.name,
                method=method,
            )

    def _check_open(self, method: str) -> None:
        if self._state == "closed":
            raise RolloutError(
                f"rollout engine 'hf': {method} was called after close; build a new engine",
                engine=self.name,
                method=method,
            )

    def _move(self, device: torch.device) -> None:
        self.module.to(device)  # type: ignore[arg-type]  # its decorator hides `self`


def run_with_cache(
    module: PreTrainedModel,
    parameters: Container[str],
    cache: Cache,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """Run `module`, whose `forward` has `parameters`; see `HFRollout.forward`."""
    arguments: dict[str, object] = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "past_key_values": cache,
        "cache_params": cache,  # the name in models without attention
        "use_cache": True,
        "logits_to_keep": 1,
    }
    known = {name: value for name, value in arguments.items() if name in parameters}
    logits: Tensor = module(**known).logits
    return logits[:, -1]


def takes_bias(module: PreTrainedModel, cache: Cache) -> bool:
    """Return whether every layer takes a bias [b, 1, 1, columns] as mask, and uses it as it is."""
    return (
        bool(getattr(module, "_supports_attention_backend", False))
        and module.config._attn_implementation in ("eager", "sdpa")
        and sees_all_tokens(cache)
    )


# The columns of a micro-batch are the prompt columns in use, then one column for each new token.
# Three rows, of which 0 and 1 share a prompt; P = 4, max_new_tokens 3:
#
#             prompt_ids     columns in use    position of the first new token
#   row 0     ·  · 11 12       · 11 12                  2
#   row 1     ·  · 11 12       · 11 12                  2
#   row 2     · 13 14 15      13 14 15                  3
#
# Column 0 is padding in every row, so `prompt_width` is 3. The prefill runs the distinct prompts
# (row 0 and row 2) and gives row 0 1 2 the cache rows 0 0 1. `visible` has 3 + 3 columns and is
# False at the padding (row 0 and 1, column 0). When token t is appended it is in column 3 + t, and
# the model receives the first 3 + t + 1 columns.
#
# Compaction after row 1 ended: 2 of 3 rows are running, and 2 ≤ 0.75 · 3.
#
#              before     after
#   active      0 1 2      0 2      rows of the micro-batch to which the tensors below belong
#   seeds       s s s      s s      `seeds`, `positions`, `mask` and the cache have one row for each
#   positions   3 3 4      3 4      active row; `ids`, `log_probs`, `lengths` and `stopped` keep all
#                                   rows and are indexed by `active`
#
# `mask` tells the model which columns to hide. Its form depends on the layers of the model:
#
# - None: no row has padding.
# - a bias [b, 1, 1, columns], a large negative number where `visible` is False: every layer attends
#   to all tokens before the query. Layers use it as it is, and it is made once.
# - `visible` [b, columns]: some layers have windows, chunks, ALiBi or a recurrent state. The model
#   makes the mask of each kind of layer from it, for every token.


class _Generation:
    """The generation of one micro-batch: `prefill`, `decode`, `collect`."""

    def __init__(self, engine: HFRollout, sampling: SamplingParams, seeds: Tensor) -> None:
        self.engine = engine
        self.device = engine.device
        self.sampling = sampling
        self.seeds = seeds
        count, width = len(seeds), sampling.max_new_tokens
        self.ids = torch.full((count, width), sampling.pad_token_id, device=self.device)
        self.log_probs = torch.zeros(count, width, device=self.device)
        self.lengths = torch.full((count,), width, device=self.device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.end_tokens = torch.tensor(
            sampling.end_token_ids, dtype=torch.int64, device=self.device
        )
        self.stop_strings = engine.stop_strings(sampling)
        self.active = torch.arange(count, device=self.device)

    def prefill(self, prompt_ids: Tensor, attention_mask: Tensor) -> None:
        """Run the model on the distinct prompts, then copy their cache rows to every row."""
        valid = attention_mask.bool()
        first_column = int(valid.any(0).long().argmax())
        valid = valid[:, first_column:]
        # Padding may have any id, also one that the embedding does not have.
        prompts = prompt_ids[:, first_column:].masked_fill(~valid, 0)
        owner = first_row_with_same_prompt(prompts, valid)
        distinct, prompt_of_row = torch.unique(owner, return_inverse=True)
        prompt_of_row = prompt_of_row.to(self.device)
        prompt_mask = valid[distinct].to(self.device)
        self.cache = growing_cache(self.engine.module.config)
        padded = not bool(valid.all())
        logits = self.engine.forward(
            self.cache,
            prompts[distinct].to(self.device),
            prompt_mask if padded else None,
            (prompt_mask.cumsum(1) - 1).clamp(min=0),
        )
        reorder_cache(self.cache, prompt_of_row)
        self.logits = logits.index_select(0, prompt_of_row)
        self.positions = prompt_mask.sum(1).index_select(0, prompt_of_row)
        self.prompt_width = prompt_mask.shape[1]
        self.mask = self._decoding_mask(prompt_mask, prompt_of_row) if padded else None

    def _decoding_mask(self, prompt_mask: Tensor, prompt_of_row: Tensor) -> Tensor:
        """Return `visible` [b, columns] or a bias [b, 1, 1, columns] for all columns to come."""
        new = prompt_mask.new_ones(len(prompt_of_row), self.sampling.max_new_tokens)
        visible = torch.cat([prompt_mask.index_select(0, prompt_of_row), new], 1)
        if not takes_bias(self.engine.module, self.cache):
            return visible
        dtype = self.logits.dtype
        bias = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return bias.masked_fill_(~visible, torch.finfo(dtype).min)[:, None, None]

    def decode(self) -> None:
        """Sample a token for each active row and run the model on it, until every row has ended."""
        running = torch.ones_like(self.active, dtype=torch.bool)
        last = self.sampling.max_new_tokens - 1
        for t in range(last + 1):
            token, log_prob = draw(self.logits, self.sampling, self.seeds, t)
            # Rows that ended but were not removed yet are written too; `collect` masks them.
            self.ids[self.active, t] = token
            self.log_probs[self.active, t] = log_prob
            ended = self.active[running & (torch.isin(token, self.end_tokens) | self._complete(t))]
            self.lengths[ended] = t + 1
            self.stopped[ended] = True
            running = ~self.stopped[self.active]
            running_count = int(running.sum())
            if running_count == 0 or t == last:
                return
            if running_count <= COMPACT_BELOW * len(running):
                kept = running.nonzero()[:, 0]
                token, running = token[kept], running[kept]
                self._keep(kept)
            self._step(token, self.prompt_width + t + 1)

    def _complete(self, t: int) -> Tensor:
        """Return [b] bool: whether token t of each active row completes a stop string."""
        if self.stop_strings is None or t + 1 < self.sampling.min_new_tokens:
            return torch.zeros_like(self.active, dtype=torch.bool)
        rows = self.ids[self.active, : t + 1].tolist()
        return torch.tensor([self.stop_strings.completed_by_last(r) for r in rows]).to(self.device)

    def _keep(self, kept: Tensor) -> None:
        """Remove all rows from the batch but `kept`, indices into the active rows."""
        self.active = self.active[kept]
        self.seeds = self.seeds[kept]
        self.positions = self.positions[kept]
        if self.mask is not None:
            self.mask = self.mask[kept]
        reorder_cache(self.cache, kept)

    def _step(self, token: Tensor, columns: int) -> None:
        """Run the model on one new token of each active row; `columns` includes that token."""
        mask = None if self.mask is None else self.mask[..., :columns]
        self.logits = self.engine.forward(self.cache, token[:, None], mask, self.positions[:, None])
        self.positions = self.positions + 1

    def collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask, log-probabilities and `stopped` on the CPU, masked behind the end."""
        mask = torch.arange(self.ids.shape[1], device=self.device) < self.lengths[:, None]
        ids = self.ids.masked_fill(~mask, self.sampling.pad_token_id)
        log_probs = self.log_probs.masked_fill(~mask, 0.0)
        return ids.cpu(), mask.long().cpu(), log_probs.cpu(), self.stopped.cpu()
