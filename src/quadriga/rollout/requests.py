"""Checks of what a rollout engine is asked for, before the engine is touched.

Shapes: B rows, P prompt columns, T columns of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.errors import RolloutInputError, ShapeError
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.params import SamplingParams


def check_request(
    engine: str,
    abilities: RolloutAbilities,
    prompt_ids: Tensor,
    attention_mask: Tensor,
    sampling: SamplingParams,
    sample_seeds: Tensor,
) -> None:
    """Check the arguments of `RolloutEngine.generate`. `engine` is its name, for messages.

    Raises:
        ShapeError: the three shapes disagree.
        RolloutInputError: a prompt is empty, is not left-padded, does not leave space for
            `max_new_tokens` in the window, or has an id outside the vocabulary; or a stop token is
            outside the vocabulary. Attributes: `engine`, `row`.
        RolloutAbilityError: the engine cannot do what `sampling` asks.
    """
    if sample_seeds.shape != prompt_ids.shape[:1]:
        raise ShapeError(
            f"rollout engine {engine!r}: sample_seeds must be [B], one seed for each of the "
            f"{len(prompt_ids)} prompts; got {list(sample_seeds.shape)}"
        )
    check_sequences(engine, abilities, prompt_ids, attention_mask, sampling.max_new_tokens)
    abilities.check(sampling, engine)
    outside = [i for i in sampling.stop_token_ids if i >= abilities.vocabulary]
    if outside:
        raise RolloutInputError(
            f"rollout engine {engine!r}: stop_token_ids {outside} are outside the vocabulary of "
            f"{abilities.vocabulary} tokens, so they could never end a response; remove them",
            engine=engine,
            row=None,
        )
    steps = attention_mask.diff(dim=1)
    padded_behind = (steps < 0).any(1)
    if padded_behind.any():
        row = _first(padded_behind)
        raise _row_error(
            engine, row, "is padded on the right or inside; pad prompts on the left only"
        )


def check_sequences(
    engine: str,
    abilities: RolloutAbilities,
    ids: Tensor,
    attention_mask: Tensor,
    new_tokens: int = 0,
) -> None:
    """Check token ids and their mask, [B, T], with space in the window for `new_tokens` more.

    Raises:
        ShapeError, RolloutInputError: as `check_request`.
    """
    if ids.ndim != 2 or attention_mask.shape != ids.shape:
        raise ShapeError(
            f"rollout engine {engine!r}: token ids and attention mask must have one shape "
            f"[B, T]; got {list(ids.shape)} and {list(attention_mask.shape)}"
        )
    if ids.is_floating_point() or attention_mask.is_floating_point():
        raise RolloutInputError(
            f"rollout engine {engine!r}: token ids and attention mask must be integers; got "
            f"{ids.dtype} and {attention_mask.dtype}",
            engine=engine,
            row=None,
        )
    valid = attention_mask.bool()
    lengths = valid.sum(1)
    if (lengths == 0).any():
        raise _row_error(engine, _first(lengths == 0), "is empty; it needs at least one token")
    if _runs_of_ones(valid).gt(1).any():
        row = _first(_runs_of_ones(valid) > 1)
        raise _row_error(engine, row, "has padding between its tokens; its tokens must be adjacent")
    _check_vocabulary(engine, abilities.vocabulary, ids, valid)
    if abilities.window is not None and (lengths + new_tokens > abilities.window).any():
        row = int(lengths.argmax())
        length = int(lengths[row])
        over = length + new_tokens - abilities.window
        more = f" and max_new_tokens is {new_tokens}, together {length + new_tokens}"
        raise _row_error(
            engine,
            row,
            f"has {length} tokens{more if new_tokens else ''}, but the window has "
            f"{abilities.window}; shorten the sequence{' or the response' if new_tokens else ''} "
            f"by {over}",
        )


def _check_vocabulary(engine: str, vocabulary: int, ids: Tensor, valid: Tensor) -> None:
    outside = valid & ((ids < 0) | (ids >= vocabulary))
    if outside.any():
        row, column = (int(i) for i in outside.nonzero()[0])
        raise _row_error(
            engine,
            row,
            f"has the token id {int(ids[row, column])} in column {column}, which is outside the "
            f"vocabulary of {vocabulary} tokens; use the tokenizer of the model",
        )


def _runs_of_ones(valid: Tensor) -> Tensor:
    """Return for each row the number of runs of True."""
    before = torch.nn.functional.pad(valid, (1, 0))[:, :-1]
    return (valid & ~before).sum(1)


def _first(rows: Tensor) -> int:
    return int(rows.nonzero()[0])


def _row_error(engine: str, row: int, problem: str) -> RolloutInputError:
    return RolloutInputError(
        f"rollout engine {engine!r}: the sequence in row {row} {problem}", engine=engine, row=row
    )
