"""From prompts to a batch with responses: the part of `generate_sequences` that fits any engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from quadriga.config.schema import ModelConfig, SamplingConfig
from quadriga.protocol import DataProto, fields
from quadriga.workers.method_fields import GENERATE_SEQUENCES

if TYPE_CHECKING:
    from torch import Tensor

    from quadriga.models.images import MultiModalRows
    from quadriga.rollout.base import RolloutEngine, SamplingParams

SamplingMode = Literal["train", "val", "greedy"]
"""Which settings sample: `rollout.sampling`, `rollout.val_sampling`, or temperature 0."""


class GeneratingGroup(Protocol):
    """What a stage that generates needs of the rollout: a worker group has it."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def generate_sequences(self) -> Callable[[DataProto], DataProto]:
        """Sample one response per row."""


def generation_inputs(rows: DataProto, mode: SamplingMode = "train") -> DataProto:
    """Return a batch of the fields that generation reads, with the sampling mode."""
    tensors, arrays = list(GENERATE_SEQUENCES.reads), list[str]()
    if fields.MULTI_MODAL_INPUTS in rows.non_tensor_batch:
        tensors, arrays = [*tensors, fields.POSITION_IDS], [fields.MULTI_MODAL_INPUTS]
    inputs = rows.select(batch_keys=tensors, non_tensor_batch_keys=arrays, meta_info_keys=[])
    inputs.meta_info["sampling"] = mode
    return inputs


def generate_batch(
    engine: RolloutEngine, prompts: DataProto, sampling: SamplingParams
) -> DataProto:
    """Generate one response per row, check them, and lay the sequences out as fields.

    Two rows, P = 3, R = 4; "." is padding, "e" the end token. The second response is cut at the
    length limit:

                          prompt   response
        input_ids         . p p    r r e .
                          p p p    r r r r
        attention_mask    0 1 1    1 1 1 0
                          1 1 1    1 1 1 1
        position_ids      0 0 1    2 3 4 4
                          0 1 2    3 4 5 6
        sequence_length   5        finished   1
                          7                   0

    Args:
        prompts: the fields `GENERATE_SEQUENCES.reads`: `input_ids`, `attention_mask` [B, P] int64,
            padded on the left, and `sample_seed` [B] int64.

    Returns:
        The fields `GENERATE_SEQUENCES.writes`; R is `sampling.max_new_tokens`.

    Raises:
        RolloutError: the prompts, the settings or the engine's output cannot be used; see
            `rollout.guard`.
    """
    import torch

    from quadriga.models.images import MultiModalRows
    from quadriga.rollout.guard import guarded

    engine = guarded(engine)  # that of a worker class of the user may have no guard
    prompt_ids = prompts.batch[fields.INPUT_IDS]
    prompt_mask = prompts.batch[fields.ATTENTION_MASK]
    request = prompt_ids, prompt_mask, sampling, prompts.batch[fields.SAMPLE_SEED]
    images = MultiModalRows.of(prompts)
    out = engine.generate(*request, images)
    attention_mask = torch.cat([prompt_mask, out.response_mask], dim=1)
    finished = [reason == "stop" for reason in out.finish_reason]
    return DataProto.from_dict(
        tensors={
            fields.PROMPTS: prompt_ids,
            fields.RESPONSES: out.response_ids,
            fields.RESPONSE_MASK: out.response_mask,
            fields.ROLLOUT_LOG_PROBS: out.rollout_log_probs,
            fields.INPUT_IDS: torch.cat([prompt_ids, out.response_ids], dim=1),
            fields.ATTENTION_MASK: attention_mask,
            fields.POSITION_IDS: _positions(attention_mask, out.response_mask, images),
            fields.SEQUENCE_LENGTH: attention_mask.sum(-1),
            fields.FINISHED: torch.tensor(finished, dtype=torch.int64),
            fields.WEIGHT_VERSION: out.weight_versions,
        }
    )


def _positions(
    attention_mask: Tensor, response_mask: Tensor, images: MultiModalRows | None
) -> Tensor:
    """Return the positions of prompts and responses: [B, P + R], or [B, 3, P + R] with images."""
    if images is not None:
        return images.followed_by(response_mask)
    # The sum is -1 at padding on the left. No position embedding has that index, and the
    # attention mask hides whatever is at position 0 there.
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def sampling_params(
    settings: SamplingConfig, model: ModelConfig, *, max_new_tokens: int
) -> SamplingParams:
    """Return the settings in the form that rollout engines take, with the padding and end tokens
    of the model."""
    from quadriga.rollout.base import SamplingParams

    pad, ends, excluded = special_tokens(model)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        eos_token_ids=ends,
        pad_token_id=pad,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        min_new_tokens=settings.min_new_tokens,
        stop_token_ids=settings.stop_token_ids,
        stop_strings=settings.stop,
        ignore_eos=settings.ignore_eos,
        excluded_token_ids=excluded,
    )


@lru_cache(maxsize=8)
def special_tokens(model: ModelConfig) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return (padding token, end tokens, tokens of images), as token ids.

    A response ends with the end tokens of the folder, and with the token that ends a turn in the
    chat template. A sampled image token would stand for an image that does not exist.
    """
    from quadriga.data.conversations import turn_end_ids
    from quadriga.models.folder import end_token_ids
    from quadriga.models.images import image_tokens
    from quadriga.models.loading import load_tokenizer

    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    pad: int = tokenizer.pad_token_id
    images = image_tokens(model.path, trust_remote_code=model.trust_remote_code)
    excluded = () if images is None else images.never_sampled
    ends = {*end_token_ids(model.path, tokenizer), *turn_end_ids(tokenizer)}
    return pad, tuple(sorted(ends)), excluded
