"""Generation in this process, with an unsharded Hugging Face copy of the model.

Prompts that several rows share are prefilled once, the key-value cache is written in place, and
rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from quadriga.config.schema import DtypeName, ModelConfig
from quadriga.errors import ModelError, RolloutError
from quadriga.models.architectures import architecture_of, is_listed
from quadriga.models.context_window import context_window
from quadriga.models.loading import load_causal_lm
from quadriga.models.vision.processor import image_tokens_of
from quadriga.models.vision.rows import MultiModalRows, check_images
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device
from quadriga.rollout.abilities import ALL_SETTINGS, RolloutAbilities
from quadriga.rollout.base import FinishReason, RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.hf.generation import CachedModel, Generation
from quadriga.rollout.hf.kv_cache import CacheBuffers
from quadriga.rollout.hf.unlisted import check_generation
from quadriga.rollout.hf.weights import ModelWeights
from quadriga.rollout.requests import check_request, check_sequences
from quadriga.rollout.stop_strings import StopStringsOfModel

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
        releasable: bool = True,  # hf can always release
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
        self._cached = CachedModel(self.module, self.device)
        if not is_listed(self.module.config):
            check_generation(self.module, self.device, self._cached.forward)
        self._version = -1
        self._unknown: set[str] = set()  # weights that an update has left half-way
        self._abilities = self._declared_abilities()
        self._weights = ModelWeights(self.module)
        self._state: State = "ready"
        self._stop_strings = StopStringsOfModel(model)

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
        return self._generate(prompt_ids, attention_mask, sampling, sample_seeds, None)

    def generate_from_images(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows,
    ) -> RolloutOutput:
        """See `GeneratesFromImages`."""
        return self._generate(prompt_ids, attention_mask, sampling, sample_seeds, images)

    def _generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None,
    ) -> RolloutOutput:
        self._check_ready("generate")
        check_request(self.name, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
        check_images(prompt_ids, attention_mask, images, image_tokens_of(self.module.config))
        count, width = len(prompt_ids), sampling.max_new_tokens
        ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(count, width, dtype=torch.int64)
        log_probs = torch.zeros(count, width)
        stopped = torch.zeros(count, dtype=torch.bool)
        stop_strings, buffers = self._stop_strings.check(sampling.stop_strings), CacheBuffers()
        with torch.inference_mode():
            for rows in self._micro_batches(attention_mask):
                seeds = sample_seeds[rows].to(self.device)
                generation = Generation(self._cached, sampling, seeds, stop_strings, buffers)
                of_rows = None if images is None else images.select(rows)
                generation.prefill(prompt_ids[rows], attention_mask[rows], of_rows)
                generation.decode()
                ids[rows], mask[rows], log_probs[rows], stopped[rows] = generation.collect()
        reasons: tuple[FinishReason, ...] = tuple(
            "stop" if row_stopped else "length" for row_stopped in stopped.tolist()
        )
        versions = torch.full((count,), self._version, dtype=torch.int64)
        return RolloutOutput(ids, mask, log_probs, reasons, versions)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_ready("score")
        check_sequences(self.name, self.abilities, ids, attention_mask)
        check_images(ids, attention_mask, None, image_tokens_of(self.module.config))
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
        self._write(self._weights.copy, stream, version)

    def share_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> int:
        """See `SharesWeights`."""
        self._check_open("share_weights")
        self._write(self._weights.share, stream, version)
        return self._weights.shared_bytes

    def _write(
        self,
        write: Callable[[Iterator[tuple[str, Tensor]]], None],
        stream: Iterable[tuple[str, Tensor]],
        version: int,
    ) -> None:
        """Write a stream. If it breaks off, no weight is known until each is written again."""
        written: list[str] = []

        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                yield name, tensor
                written.append(name)
                self._unknown.discard(name)

        try:
            write(recorded())
        except BaseException:
            if written:  # some weights are new and some old
                self._unknown = {name for name, _ in self.module.named_parameters()}
            raise
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
        # Shared weights are in the memory of the training engine, which this engine cannot free.
        if not self._weights.shared_bytes:
            self._move(torch.device("cpu"))
        self._state = "released"

    def resume(self) -> None:
        self._check_open("resume")
        if not self._weights.shared_bytes:
            self._move(self.device)
        self._state = "ready"

    def close(self) -> None:
        if self._state != "closed":
            self._weights.unshare()
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
        if self._unknown:
            raise RolloutError(
                f"rollout engine 'hf': {method} was called after an update of weights that broke "
                f"off, and {min(self._unknown)!r} was not sent since; sync all weights first",
                engine=self.name,
                method=method,
            )
        changed = self._weights.changed()
        if changed is not None:
            raise RolloutError(
                f"rollout engine 'hf': {method} was called after the training engine changed the "
                f"weight {changed!r}, which both share, so version {self._version} is no longer "
                "right; sync weights first, or set rollout.share_weights=false to generate with "
                "the weights of the last sync",
                engine=self.name,
                method=method,
                version=self._version,
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
