"""Generation in this process, with an unsharded Hugging Face copy of the model.

Prompts that several rows share are prefilled once, the key-value cache is written in place, and
rows that have ended leave the batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quadriga.config.schema import ModelConfig
from quadriga.models.architectures import architecture_of, is_listed
from quadriga.models.images import MultiModalRows, check_images, image_tokens_of
from quadriga.models.limits import context_window
from quadriga.models.loading import load_causal_lm
from quadriga.models.routes import Routers
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import local_device
from quadriga.rollout import Rollout
from quadriga.rollout.base import (
    Continued,
    FinishReason,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    UpdateForm,
    check_weight,
    integer_bits,
)
from quadriga.rollout.hf.generation import (
    CachedModel,
    FoundRow,
    Generation,
    KeptRows,
    Key,
    check_generation,
)
from quadriga.rollout.responses import stop_strings_of, with_pauses

_BYTES_OF_ID = 8


class HFRollout(RolloutEngine):
    """See `RolloutEngine`. `rollout.settings.micro_batch_size` rows are generated at once.

    Raises:
        ModelError: the folder does not hold a causal language model, or its architecture is not
            supported.
    """

    name = "hf"
    shares_weights = True

    def __init__(
        self,
        rollout: Rollout,
        model: ModelConfig,
        device: str | torch.device,
        *,
        releasable: bool = True,  # it always is
        copies: Sequence[tuple[int, ...]] | None = None,  # each rank holds one
    ) -> None:
        self.model = model
        self.device = local_device(device)
        self.micro_batch_size = rollout.settings.micro_batch_size
        dtype = compute_dtype(rollout.settings.dtype, self.device)
        self.module = load_causal_lm(model, dtype=dtype)
        self._move(self.device)
        self.module.requires_grad_(False)
        config = self.module.config
        self.prompts = architecture_of(config).prompts
        routers = Routers(self.module) if rollout.records_routes else None
        self._cached = CachedModel(self.module, self.device, routers)
        self._kept: list[KeptRows] = []
        """Rows that are to go on, the oldest first. An update of the weights clears it, so that no
        row finds a cache of other weights, unless `rollout.reset_caches` is false."""
        self._resets_caches = rollout.resets_caches
        if not is_listed(config):
            check_generation(self._cached)
        window = context_window(config)
        self.abilities = rollout.abilities(
            config.get_text_config().vocab_size, window.tokens if window else None
        )
        self._weights = ModelWeights(self.module)

    # Generation

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None = None,
        continued: Continued | None = None,
    ) -> RolloutOutput:
        self._check_ready("generate")
        begun = self.check_request(prompt_ids, attention_mask, sampling, sample_seeds, continued)
        check_images(prompt_ids, attention_mask, images, image_tokens_of(self.module.config))
        count, width, keep = len(prompt_ids), begun.at_most, begun.keep
        ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(count, width, dtype=torch.int64)
        log_probs = torch.zeros(count, width)
        stopped, routed = torch.zeros(count, dtype=torch.bool), None
        stop_strings = stop_strings_of(self.model, sampling.stop_strings)
        if continued and not keep:
            self._kept.clear()
        keep = keep if images is None and self._cached.joins_rows else 0
        tokens = zip(sample_seeds.tolist(), prompt_ids.cpu(), attention_mask.bool(), strict=True)
        keys = [(seed, row[own].numpy().tobytes()) for seed, row, own in tokens if continued]
        with torch.inference_mode():
            for rows in self._micro_batches(attention_mask, keys):
                seeds = sample_seeds[rows].to(self.device)
                own_begun = replace(begun, sampled=begun.sampled[rows], at_most=width)
                of_rows = None if images is None else images.select(rows)
                own = [keys[row] for row in rows.tolist()] if keys else []
                known = self._cached, sampling, seeds, stop_strings
                generation = Generation(*known, own_begun, own)
                kept, found = self._kept, self._found(own)
                self._remove(found)  # first, because `begin` changes their caches
                generation.begin(prompt_ids[rows], attention_mask[rows], of_rows, kept, found)
                generation.decode()
                ids[rows], mask[rows], log_probs[rows], stopped[rows] = generation.collect()
                if generation.routes is not None:
                    if routed is None:
                        routed = generation.routes.new_empty(count, *generation.routes.shape[1:])
                    routed[rows] = generation.routes
                if keep:
                    generation.pause()
                    self._kept += generation.kept
                    while sum(len(part.keys) for part in self._kept) > keep:
                        del self._kept[0]
        reasons: list[FinishReason] = ["stop" if row else "length" for row in stopped.tolist()]
        ended = with_pauses(reasons, mask, sampling, begun)
        versions = torch.full((count,), self._version, dtype=torch.int64)
        routed = routed if routed is None else routed.clone().cpu()  # no tensor of this mode
        return RolloutOutput(ids, mask, log_probs, ended, versions, routed)

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_ready("score")
        self.check_sequences(ids, attention_mask)
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

    def _micro_batches(self, attention_mask: Tensor, keys: Sequence[Key]) -> Iterator[Tensor]:
        """Yield the row indices of each micro-batch. With `keys`, rows whose caches are kept come
        first, and then rows of similar lengths are together.

        A model that cannot compute prompts of different lengths together gets equal lengths.
        """
        # Prompt lengths 3 5 3 3 and two rows a micro-batch:
        #
        #   mixed lengths   0 1   2 3
        #   equal lengths   0 2   3   1     the rows of length 3, then those of length 5
        rows = torch.arange(len(attention_mask))
        if not len(rows):
            return
        lengths = attention_mask.sum(1).cpu()
        if self.prompts == "mixed lengths":
            if keys:
                for found in self._found(keys):
                    lengths[found.row] = found.added
                rows = lengths.argsort(stable=True)
            yield from torch.split(rows, self.micro_batch_size)
            return
        for length in torch.unique(lengths):
            yield from torch.split(rows[lengths == length], self.micro_batch_size)

    def _found(self, keys: Sequence[Key]) -> list[FoundRow]:
        """Find the rows of which the beginning is kept, the most of it where there are several. A
        row that has ended is continued only by a model that can add several tokens."""
        kept: dict[int, list[tuple[bytes, int, int]]] = {}
        for number, part in enumerate(self._kept):
            for place, (seed, tokens) in enumerate(part.keys):
                kept.setdefault(seed, []).append((tokens, number, place))
        found, sizes = list[FoundRow](), dict[tuple[int, int], int]()
        for row, (seed, tokens) in enumerate(keys):
            own = [one for one in kept.get(seed, ()) if tokens.startswith(one[0])]
            if own:
                longest, number, place = max(own, key=lambda one: len(one[0]))
                added = 1 + (len(tokens) - len(longest)) // _BYTES_OF_ID
                size = added.bit_length()
                # What is kept once is continued in one group of rows.
                if sizes.setdefault((number, place), size) == size and (
                    added == 1 or self._cached.adds_several
                ):
                    found.append(FoundRow(size, number, place, row, added))
        return sorted(found)

    def _remove(self, found: Sequence[FoundRow]) -> None:
        """Keep the other rows alone."""
        taken = {(one.number, one.place) for one in found}
        left = [
            [place for place in range(len(part.keys)) if (number, place) not in taken]
            for number, part in enumerate(self._kept)
        ]
        parts = zip(self._kept, left, strict=True)
        self._kept = [part.part(places) for part, places in parts if places]

    # Weights

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        self._check("update_weights", "ready", "released")
        if self._resets_caches:
            self._kept.clear()
        parameters = dict(self.module.named_parameters())
        with self._writing(stream, version, lambda: parameters) as weights:
            self._weights.write(weights, share=form == "shared")

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.module.state_dict().items()

    # State

    def _free(self) -> None:
        self._kept.clear()
        # Shared weights are in the memory of the training engine, which this engine cannot free.
        if not self._weights.shared:
            self._move(torch.device("cpu"))

    def _get_back(self) -> None:
        if not self._weights.shared:
            self._move(self.device)

    def close(self) -> None:
        if self._state != "closed":
            self._kept.clear()
            self._weights.shared.clear()
            self._move(torch.device("meta"))  # the storages of the weights are freed
        super().close()

    def _check_ready(self, method: str) -> None:
        self._check_generates(method)
        changed = self._weights.changed()
        if changed is not None:
            raise self._error(
                method,
                f"the training engine has changed the weight {changed!r}, which both share, so "
                f"version {self.version} is no longer right; sync weights first, or set "
                "rollout.share_weights=false to generate with the weights of the last sync",
            )

    def _move(self, device: torch.device) -> None:
        self.module.to(device)  # type: ignore[arg-type]  # its decorator hides `self`


# A weight in three states. The training engine's tensor is at address 900:
#
#                          module's parameter   memory    after an optimizer step
#   loaded                 own                  100       as it was
#   copied                 own                  100       as it was
#   shared                 of the tensor        900       the new values, and `changed` says so
#
# `changed` compares digests of some elements of each weight. Torch's counter of in-place changes
# would not do, because an optimizer may write through another tensor on the same memory.

_SAMPLE = 1024
"""Elements of a weight that are compared. An optimizer step changes nearly all elements."""


class ModelWeights:
    """The weights of `module`, by the names of its `state_dict`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.shared: dict[str, tuple[Tensor, Tensor]] = {}
        """Parameters in foreign memory, by name, and the digests of their samples when shared."""

    def write(self, stream: Iterable[tuple[str, Tensor]], *, share: bool) -> None:
        """Copy the values of tensors to weights, in memory of their own.

        Args:
            share: use a tensor itself as the weight if dtype, device and layout fit.

        Raises:
            ModelError: the model has no weight of that name and shape.
        """
        weights = dict(self._module.state_dict(keep_vars=True))
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        for name, tensor in stream:
            check_weight(name, tensor, shapes)
            shared = share and _fits(weights[name], tensor)
            # Otherwise a tied name, or a training engine that sends what is shared already.
            if not _aliases(weights[name], tensor):
                if shared:
                    self._replace(weights, name, tensor.detach())
                elif name in self.shared:
                    values = torch.empty_like(weights[name]).copy_(tensor.detach())
                    self._replace(weights, name, values)
                else:
                    with torch.no_grad():
                        weights[name].copy_(tensor)
            elif name in self.shared:
                shared = True
            if shared:  # its values are those of the current version
                weight = weights[name]
                self.shared[name] = weight, _sample_digest(weight)

    def changed(self) -> str | None:
        """Return the name of a shared weight that was changed in place since, or None."""
        if not self.shared:
            return None
        before = torch.stack([digest for _, digest in self.shared.values()])
        now = torch.stack([_sample_digest(parameter) for parameter, _ in self.shared.values()])
        # One comparison for all weights, because each one waits for the device.
        different = (before != now).tolist()
        return next((n for n, found in zip(self.shared, different, strict=True) if found), None)

    def _replace(self, weights: dict[str, Tensor], name: str, new: Tensor) -> None:
        """Put `new` in every place of a parameter; tied weights have several."""
        old, parameter = weights[name], nn.Parameter(new, requires_grad=False)
        for module in self._module.modules():
            for attribute, value in list(module._parameters.items()):
                if value is old:
                    setattr(module, attribute, parameter)
        tied = [other for other, weight in weights.items() if weight is old]
        weights.update(dict.fromkeys(tied, parameter))
        for other in tied:
            self.shared.pop(other, None)


def _sample_digest(weight: Tensor) -> Tensor:
    """Return the digest [] int64 of at most `_SAMPLE` elements, evenly spread over a weight."""
    flat = weight.detach().view(-1)
    step = -(-flat.numel() // _SAMPLE)
    bits = integer_bits(flat[:: max(step, 1)].clone())
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def _fits(weight: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor can take the place of a weight."""
    return (
        isinstance(weight, nn.Parameter)
        and (weight.dtype, weight.device) == (tensor.dtype, tensor.device)
        and tensor.is_contiguous()
        and not tensor.is_inference()
    )


def _aliases(weight: Tensor, tensor: Tensor) -> bool:
    """Return whether both are the same memory in the same form."""
    return (
        weight.data_ptr() == tensor.data_ptr()
        and (weight.dtype, weight.device) == (tensor.dtype, tensor.device)
        and weight.stride() == tensor.stride()
        and weight.numel() > 0
    )
