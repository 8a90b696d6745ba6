"""Checks of what a rollout engine returns, before training reads it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quadriga.errors import RolloutOutputError
from quadriga.rollout.base import RolloutOutput, SamplingParams

OutputFault = Literal[
    "row count",
    "shape",
    "dtype",
    "mask",
    "token id",
    "padding",
    "log-probability",
    "end",
    "finish reason",
    "weight version",
]
"""What an engine's output violates.

- `row count`, `shape`, `dtype`: of the tensors, or the number of finish reasons.
- `mask`: a row of the response mask is not ones followed by zeros, or is empty.
- `token id`: a token is outside the vocabulary, or one of `excluded_token_ids`.
- `padding`: something other than the padding token behind the end of a response.
- `log-probability`: NaN, infinite or above 0; or not 0 at padding.
- `end`: an end token inside a response.
- `finish reason`: it disagrees with the last token or with the length.
- `weight version`: other weights than the engine held during the call.
"""

_ROUNDING = 1e-3
"""Nats by which rounding may bring the log-probability of a certain token above 0."""


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
            RolloutOutputError: the output breaks the protocol. Attribute `fault`: an `OutputFault`.
        """
        self._check_form(out, rows, sampling.max_new_tokens)
        mask = out.response_mask.bool()
        lengths = mask.sum(1)
        prefix = torch.arange(mask.shape[1]) < lengths[:, None]
        self._require((mask == prefix).all(1), "mask", "is not ones followed by zeros")
        self._require(out.response_mask.amax(1) <= 1, "mask", "has numbers above 1")
        self._require(lengths > 0, "mask", "is empty, but a response has at least one token")
        ids = out.response_ids
        inside = (ids >= 0) & (ids < vocabulary)
        self._require(
            (inside | ~mask).all(1), "token id", f"has a token outside the {vocabulary} tokens"
        )
        excluded = torch.isin(ids, torch.tensor(sampling.excluded_token_ids).long())
        self._require(~(excluded & mask).any(1), "token id", "has a token of `excluded_token_ids`")
        self._require(
            ((ids == sampling.pad_token_id) | mask).all(1),
            "padding",
            f"has other tokens than the padding token {sampling.pad_token_id} behind its end",
        )
        self._check_log_probs(out.rollout_log_probs, mask, "log-probabilities")
        self._check_ends(out, lengths, sampling)
        found = out.weight_versions
        self._require(
            (found >= versions.start) & (found < versions.stop),
            "weight version",
            f"has version {{value}}, but the engine held version {_span(versions)}",
            found,
        )

    def check_scores(self, scores: Tensor, attention_mask: Tensor) -> None:
        """Check the result of `score`.

        Raises:
            RolloutOutputError: as `check`.
        """
        self._form("scores", scores, tuple(attention_mask.shape), torch.float32)
        self._check_log_probs(scores, attention_mask.bool(), "scores")

    def _check_form(self, out: RolloutOutput, rows: int, width: int) -> None:
        self._form("response_ids", out.response_ids, (rows, width), torch.int64)
        self._form("response_mask", out.response_mask, (rows, width), torch.int64)
        self._form("rollout_log_probs", out.rollout_log_probs, (rows, width), torch.float32)
        self._form("weight_versions", out.weight_versions, (rows,), torch.int64)
        if len(out.finish_reason) != rows:
            raise self._error(
                "row count", None, f"has {len(out.finish_reason)} finish reasons for {rows} rows"
            )

    def _form(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(tensor) != shape[0]:
            raise self._error(
                "row count", None, f"has {len(tensor)} rows of {name} for {shape[0]} prompts"
            )
        if tuple(tensor.shape) != shape:
            raise self._error(
                "shape", None, f"has {name} {list(tensor.shape)} instead of {list(shape)}"
            )
        if tensor.dtype != dtype:
            raise self._error("dtype", None, f"has {name} of {tensor.dtype} instead of {dtype}")

    def _check_log_probs(self, log_probs: Tensor, mask: Tensor, what: str) -> None:
        fault: OutputFault = "log-probability"
        self._require(log_probs.isfinite().all(1), fault, f"has {what} that are not finite")
        self._require((log_probs <= _ROUNDING).all(1), fault, f"has {what} above 0")
        self._require(((log_probs == 0) | mask).all(1), fault, f"has {what} at padding")

    def _check_ends(self, out: RolloutOutput, lengths: Tensor, sampling: SamplingParams) -> None:
        width = sampling.max_new_tokens
        ends = torch.isin(out.response_ids, torch.tensor(sampling.end_token_ids).long())
        last = torch.arange(width) == (lengths - 1)[:, None]
        inside = ends & out.response_mask.bool() & ~last
        self._require(~inside.any(1), "end", "has an end token before its last token")
        ended = (ends & last).any(1)
        stopped = torch.tensor([reason == "stop" for reason in out.finish_reason]).bool()
        by_length = torch.tensor([reason == "length" for reason in out.finish_reason]).bool()
        full = lengths == width
        may_stop = ended | bool(sampling.stop_strings)
        right = (stopped & may_stop) | (by_length & full & ~ended)
        self._require(
            right,
            "finish reason",
            f"has finish reasons that disagree with its last token or its length of {width}",
        )

    def _require(
        self, holds_B: Tensor, fault: OutputFault, problem: str, values: Tensor | None = None
    ) -> None:
        if not bool(holds_B.all()):
            row = int((~holds_B).nonzero()[0])
            value = "" if values is None else int(values[row])
            raise self._error(fault, row, problem.format(value=value))

    def _error(self, fault: OutputFault, row: int | None, problem: str) -> RolloutOutputError:
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


def _span(versions: range) -> str:
    last = versions.stop - 1
    return str(last) if last == versions.start else f"{versions.start} to {last}"
