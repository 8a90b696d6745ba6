"""What a model can compute: the tokens of a sequence, and the ids of tokens.

Reads config.json only, so settings can be checked before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError, ModelError
from quadriga.models.folder import ModelSource, local_folder, model_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

RopeParameters = Mapping[str, object]
"""The settings of one rotary embedding."""
Ropes = Sequence[RopeParameters]

# Names of the setting in configs that do not map it to `max_position_embeddings`.
_WINDOW_NAMES = ("max_position_embeddings", "max_seq_len", "model_max_length", "context_length")

_ORIGINAL = "original_max_position_embeddings"

# Rotary embeddings that are stretched to a multiple of the window that config.json names.
_STRETCHED = ("linear", "yarn", "llama3")

# Rotary embeddings whose frequencies change once one row of a batch is longer than this limit. The
# numbers of the other rows then change as well, so rows longer than the limit are refused.
_CHANGING = ("dynamic", "longrope")


@dataclass(frozen=True)
class ContextWindow:
    """The largest number of tokens of a sequence, and what says so."""

    tokens: int
    source: str


def context_window(config: PreTrainedConfig) -> ContextWindow | None:
    """Return the context window of a model; None if it has no limit (recurrence, ALiBi)."""
    text = config.get_text_config()
    parameters: RopeParameters = getattr(text, "rope_parameters", None) or {}
    # One set, or one for each kind of layer.
    ropes = [v for v in parameters.values() if isinstance(v, Mapping)] or [parameters]
    windows = [_changing_window(text, ropes)]
    if not getattr(text, "alibi", False):
        windows.append(_position_window(text, ropes))
    # Doge keeps that many tokens for each query. For longer sequences, its choice depends on the
    # padding of the batch.
    kept = getattr(text, "keep_window_size", None)
    if isinstance(kept, int):
        windows.append(ContextWindow(kept, "keep_window_size"))
    return min(filter(None, windows), key=lambda window: window.tokens, default=None)


def window_of(model: ModelSource) -> ContextWindow | None:
    """Return the context window of the model in a folder; None if it has no limit.

    Raises:
        ModelError: the folder is not a model folder.
    """
    from quadriga.models.loading import folder_config

    return context_window(folder_config(model))


def _position_window(text: PreTrainedConfig, ropes: Ropes) -> ContextWindow | None:
    # Some configs name the window after stretching, and some the window before. The larger of the
    # two is taken, so that no window is refused that the model has.
    stretched = [
        int(_number(rope, _ORIGINAL) * _number(rope, "factor"))
        for rope in ropes
        if rope.get("rope_type") in _STRETCHED
    ]
    for name in _WINDOW_NAMES:
        tokens = getattr(text, name, None)
        if isinstance(tokens, int) and tokens > 0:
            return ContextWindow(max(tokens, *stretched, 0), name)
    return None


def _changing_window(text: PreTrainedConfig, ropes: Ropes) -> ContextWindow | None:
    whole = getattr(text, _ORIGINAL, None) or getattr(text, "max_position_embeddings", None) or 0
    limits = [
        int(_number(rope, _ORIGINAL) or whole)
        for rope in ropes
        if rope.get("rope_type") in _CHANGING
    ]
    known = [limit for limit in limits if limit]
    return ContextWindow(min(known), _ORIGINAL) if known else None


def _number(rope: RopeParameters, name: str) -> float:
    value = rope.get(name)
    return value if isinstance(value, int | float) else 0.0


@dataclass(frozen=True)
class LongestSequence:
    """The most tokens that a sequence of a run can have.

    Attributes:
        arithmetic: how the number comes about, as a sentence without its full stop.
        remedy: what lowers the number; a message goes on with "by 12".
    """

    tokens: int
    arithmetic: str
    remedy: str


def check_context_window(model: ModelSource, longest: LongestSequence) -> None:
    """Check that the longest sequence fits the context window of the model.

    Raises:
        ModelError: it does not fit, or the folder is not a model folder.
    """
    window = window_of(model)
    if window is not None and longest.tokens > window.tokens:
        folder = _config_folder(model)
        raise ModelError(
            f"{longest.arithmetic}, but the model in {folder} computes at most {window.tokens} "
            f"({window.source} in its config.json); {longest.remedy} by "
            f"{longest.tokens - window.tokens}"
        )


# Token ids.


def check_vocabulary(
    model: ModelSource, tokenizer: PreTrainedTokenizerBase, *, largest_id: int
) -> None:
    """Check that every token id that can occur in a sequence has a row in the embedding.

    Without this check, such an id is an index error in a worker, or reads the memory of another
    tensor on an accelerator.

    Args:
        largest_id: the largest token id in the data.

    Raises:
        ModelError: names the token, its id and the rows of the embedding.
    """
    rows = _embedding_rows(model)
    largest = max(largest_id, *_ids_that_occur(tokenizer))
    if largest >= rows:
        folder = _config_folder(model)
        raise ModelError(
            f"token {tokenizer.convert_ids_to_tokens(largest)!r} of the tokenizer has the id "
            f"{largest}, but the embedding of the model in {folder} has {rows} rows for the ids 0 "
            f"to {rows - 1} (vocab_size in its config.json); use the tokenizer of the model, or "
            f"save the model after resize_token_embeddings({largest + 1})"
        )


def check_stop_tokens(key: str, stop_token_ids: Sequence[int], model: ModelSource) -> None:
    """Check that a model can sample the tokens that end a response.

    Raises:
        ConfigError: the setting `key` names a token outside the vocabulary, or of images.
    """
    if not stop_token_ids:
        return
    from quadriga.models.images import image_tokens

    rows, images = _embedding_rows(model), image_tokens(model)
    never = () if images is None else images.never_sampled
    if wrong := [token for token in stop_token_ids if token >= rows or token in never]:
        path = model_settings(model).path
        raise ConfigError(
            f"{key} names {wrong}, outside the vocabulary of the model in {path} (ids 0 to "
            f"{rows - 1}) or for images, so no response could end there; set ids of the model's "
            "tokenizer",
            key=key,
        )


def _embedding_rows(model: ModelSource) -> int:
    from quadriga.models.loading import folder_config

    return int(folder_config(model).get_text_config().vocab_size)


def _config_folder(model: ModelSource) -> Path:
    return local_folder(model_settings(model).path, weights=False)


def _ids_that_occur(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield the ids of all tokens that text or the tokenizer itself can bring into a sequence.

    Some models list special tokens beyond their embedding that are never used, for example for
    images in a model of text. Such a token counts only if it has one of the roles below, or if the
    data contains it.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    yield from (i for i in tokenizer.get_vocab().values() if i not in special)
    roles = (
        tokenizer.pad_token_id, tokenizer.eos_token_id,
        tokenizer.bos_token_id, tokenizer.unk_token_id,
    )  # fmt: skip
    yield from (role for role in roles if isinstance(role, int))
