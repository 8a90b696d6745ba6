"""Checks of what a rollout engine is asked for, and of what it returns before training reads it.

The attribute `fault` of a `RolloutOutputError`:

- `row count`, `shape`, `dtype`: of the tensors, or the number of finish reasons.
- `mask`: a row of the response mask is not ones followed by zeros, or is empty.
- `token id`: a token is outside the vocabulary, or one of `excluded_token_ids`.
- `padding`: something other than the padding token behind the end of a response.
- `log-probability`: NaN, infinite or above 0; or not 0 at padding.
- `end`: an end token inside a response.
- `finish reason`: it disagrees with the last token or with the length.
- `weight version`: other weights than the engine held during the call.

Shapes: B rows, P prompt columns, T columns of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.errors import RolloutInputError, RolloutOutputError, ShapeError
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutOutput, SamplingParams

_ROUNDING = 1e-3
"""Nats by which rounding may bring the log-probability of a certain token above 0."""


# Requests


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
        problem = (
            f"stop_token_ids {outside} are outside the vocabulary of {abilities.vocabulary} "
            "tokens, so they could never end a response; remove them"
        )
        raise _wrong_input(engine, None, problem)
    right = (attention_mask.diff(dim=1) < 0).any(1)
    _refuse(engine, right, "is padded on the right or inside; pad prompts on the left only")


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
        got = f"{ids.dtype} and {attention_mask.dtype}"
        problem = f"token ids and attention mask must be integers; got {got}"
        raise _wrong_input(engine, None, problem)
    valid, vocabulary = attention_mask.bool(), abilities.vocabulary
    lengths = valid.sum(1)
    before = torch.nn.functional.pad(valid, (1, 0))[:, :-1]
    apart = (valid & ~before).sum(1) > 1
    _refuse(engine, lengths == 0, "is empty; it needs at least one token")
    _refuse(engine, apart, "has padding between its tokens; its tokens must be adjacent")
    outside = valid & ((ids < 0) | (ids >= vocabulary))
    if outside.any():
        row, column = (int(i) for i in outside.nonzero()[0])
        problem = (
            f"has the token id {int(ids[row, column])} in column {column}, which is outside the "
            f"vocabulary of {vocabulary} tokens; use the tokenizer of the model"
        )
        _refuse(engine, outside.any(1), problem)
    window = abilities.window
    if window is not None and (lengths + new_tokens > window).any():
        length = int(lengths.max())
        more = f" and max_new_tokens is {new_tokens}, together {length + new_tokens}"
        problem = (
            f"has {length} tokens{more if new_tokens else ''}, but the window has {window}; "
            f"shorten the sequence{' or the response' if new_tokens else ''} by "
            f"{length + new_tokens - window}"
        )
        _refuse(engine, lengths == length, problem)


def _refuse(engine: str, wrong_B: Tensor, problem: str) -> None:
    """Raise `RolloutInputError` for the first row that is wrong."""
    if wrong_B.any():
        row = int(wrong_B.nonzero()[0])
        raise _wrong_input(engine, row, f"the sequence in row {row} {problem}")


def _wrong_input(engine: str, row: int | None, problem: str) -> RolloutInputError:
    return RolloutInputError(f"rollout engine {engine!r}: {problem}", engine=engine, row=row)


# Outputs


class OutputCheck:
    """Checks the output of an engine. `engine` and `rank` are for messages."""

    def __init__(self, engine: str, rank: int | None = None) -> None:
        self._engine = engine
        self._rank = rank

    def check(
        self,
        out: RolloutOutput,
        rows: int,
        sampling: SamplingParams,
        vocabulary: int,
        versions: range,
    ) -> None:
        """Check the output of `generate` for `rows` rows.

        Args:
            versions: the versions of the weights that may have sampled a row.

        Raises:
            RolloutOutputError: the output breaks the protocol. Attribute `fault`; see the module.
        """
        width = sampling.max_new_tokens
        self._form("response_ids", out.response_ids, (rows, width), torch.int64)
        self._form("response_mask", out.response_mask, (rows, width), torch.int64)
        self._form("rollout_log_probs", out.rollout_log_probs, (rows, width), torch.float32)
        self._form("weight_versions", out.weight_versions, (rows,), torch.int64)
        reasons, found = out.finish_reason, out.weight_versions
        if len(reasons) != rows:
            problem = f"has {len(reasons)} finish reasons for {rows} rows"
            raise self._error("row count", None, problem)
        ids, mask = out.response_ids, out.response_mask.bool()
        lengths, columns = mask.sum(1), torch.arange(width)
        excluded = torch.isin(ids, torch.tensor(sampling.excluded_token_ids).long())
        ends = torch.isin(ids, torch.tensor(sampling.end_token_ids).long())
        last = columns == (lengths - 1)[:, None]
        ended = (ends & last).any(1)
        stopped = torch.tensor([reason == "stop" for reason in reasons]).bool()
        by_length = torch.tensor([reason == "length" for reason in reasons]).bool()
        may_stop = ended | bool(sampling.stop_strings)
        right_reason = (stopped & may_stop) | (by_length & (lengths == width) & ~ended)
        held = (found >= versions.start) & (found < versions.stop)
        wrong = [*found[~held].tolist(), None][0]
        self._require("mask", mask == (columns < lengths[:, None]), "is not ones, then zeros")
        self._require("mask", out.response_mask <= 1, "has numbers above 1")
        self._require("mask", lengths > 0, "is empty, but a response has at least one token")
        known = (ids >= 0) & (ids < vocabulary)
        self._require("token id", known | ~mask, f"has a token outside the {vocabulary} tokens")
        self._require("token id", ~(excluded & mask), "has a token of `excluded_token_ids`")
        padding = f"has other tokens than {sampling.pad_token_id}, the padding, behind its end"
        self._require("padding", (ids == sampling.pad_token_id) | mask, padding)
        self._require_log_probs(out.rollout_log_probs, mask)
        self._require("end", ~(ends & mask & ~last), "has an end token before its last token")
        reason = f"has a finish reason that disagrees with its last token or its length of {width}"
        self._require("finish reason", right_reason, reason)
        names = " or ".join(map(str, versions))
        version = f"has version {wrong}, but the engine held version {names}"
        self._require("weight version", held, version)

    def check_scores(self, scores: Tensor, attention_mask: Tensor) -> None:
        """Check the result of `score`. It raises as `check`."""
        self._form("scores", scores, tuple(attention_mask.shape), torch.float32)
        self._require_log_probs(scores, attention_mask.bool())

    def _form(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(tensor) != shape[0]:
            fault = "row count"
        elif tuple(tensor.shape) != shape:
            fault = "shape"
        elif tensor.dtype != dtype:
            fault = "dtype"
        else:
            return
        found = f"{list(tensor.shape)} of {tensor.dtype}"
        raise self._error(fault, None, f"has {name} {found} instead of {list(shape)} of {dtype}")

    def _require_log_probs(self, log_probs: Tensor, mask: Tensor) -> None:
        for right, problem in (
            (log_probs.isfinite(), "that are not finite"),
            (log_probs <= _ROUNDING, "above 0"),
            ((log_probs == 0) | mask, "at padding"),
        ):
            self._require("log-probability", right, f"has log-probabilities {problem}")

    def _require(self, fault: str, right: Tensor, problem: str) -> None:
        """Raise for the first row of `right`, [B] or [B, R], that is not True."""
        wrong = ~right.view(len(right), -1).all(1) if len(right) else right
        if wrong.any():
            raise self._error(fault, int(wrong.nonzero()[0]), problem)

    def _error(self, fault: str, row: int | None, problem: str) -> RolloutOutputError:
        where = "" if self._rank is None else f" on rank {self._rank}"
        what = "its output" if row is None else f"row {row} of its output"
        return RolloutOutputError(
            f"rollout engine {self._engine!r}{where}: {what} {problem} ({fault}). No training is "
            "done on it; the engine is faulty, or of a version that is not supported",
            engine=self._engine,
            rank=self._rank,
            fault=fault,
            row=row,
        )
