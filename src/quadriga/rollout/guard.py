"""A guard around any rollout engine: it checks requests and outputs, and ends a wait at a deadline.

An engine may run in other processes and answer over a network, so its outputs are checked before
training reads them. A violation is a `RolloutOutputError`, whose attribute `fault` names it.

consumes      a request, and the engine's output
produces      the same output, checked; or a typed error
waits for     the engine, at most `deadline` seconds if one is given
unblocked by  the engine's answer, its error, or the deadline. After a deadline the engine refuses
              every call but `close`, because the state of an engine that is still busy is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from quadriga.errors import (
    QuadrigaError,
    RolloutAbilityError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.models.vision.rows import MultiModalRows
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import (
    GeneratesFromImages,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
)
from quadriga.rollout.requests import check_request, check_sequences

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

ResultT = TypeVar("ResultT")
_Request = tuple[Tensor, Tensor, SamplingParams, Tensor]
"""Prompt ids, attention mask, sampling and sample seeds; see `RolloutEngine.generate`."""


class GuardedRollout:
    """A `RolloutEngine` that checks every request and output of another one.

    Args:
        engine: the engine.
        deadline: seconds that one call of the engine may take; None waits without a limit, in the
            calling thread.
        rank: the rank of this process, for messages.
    """

    def __init__(
        self, engine: RolloutEngine, *, deadline: float | None = None, rank: int | None = None
    ) -> None:
        self.engine = engine
        self.deadline = deadline
        self.rank = rank
        self._late: str | None = None

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def abilities(self) -> RolloutAbilities:
        return self.engine.abilities

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        request = prompt_ids, attention_mask, sampling, sample_seeds
        return self._checked(request, lambda: self.engine.generate(*request))

    def _checked(self, request: _Request, generate: Callable[[], RolloutOutput]) -> RolloutOutput:
        """Return what the engine generates for a request; both are checked."""
        prompt_ids, attention_mask, sampling, sample_seeds = request
        check_request(self.name, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
        oldest = self.version
        out = self._call("generate", generate)
        versions = range(oldest, self.version + 1)
        OutputCheck(self.name, self.rank).check(
            out, len(prompt_ids), sampling, self.abilities.vocabulary, versions
        )
        return out

    def generate_from_images(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows,
    ) -> RolloutOutput:
        engine = self.engine
        if not isinstance(engine, GeneratesFromImages):
            raise RolloutAbilityError(
                f"rollout engine {self.name!r} cannot generate from prompts with images; set "
                "rollout.name to hf",
                engine=self.name,
                setting="images",
            )
        request = prompt_ids, attention_mask, sampling, sample_seeds
        return self._checked(request, lambda: engine.generate_from_images(*request, images))

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        check_sequences(self.name, self.abilities, ids, attention_mask)
        scores = self._call("score", lambda: self.engine.score(ids, attention_mask))
        OutputCheck(self.name, self.rank).check_scores(scores, attention_mask)
        return scores

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._call("update_weights", lambda: self.engine.update_weights(stream, version))
        if self.version != version:
            raise RolloutOutputError(
                f"{self._where('update_weights')}: the engine was given the weights of version "
                f"{version}, but says that it holds version {self.version}",
                **self._details("update_weights"),
                fault="weight version",
                row=None,
            )

    def weights_digest(self) -> dict[str, int]:
        return self._call("weights_digest", self.engine.weights_digest)

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        return self._call("weight_dtypes", self.engine.weight_dtypes)

    def release(self) -> None:
        self._call("release", self.engine.release)

    def resume(self) -> None:
        self._call("resume", self.engine.resume)

    def close(self) -> None:
        self.engine.close()

    def _call(self, method: str, run: Callable[[], ResultT]) -> ResultT:
        """Run a method of the engine and turn the errors of its libraries into typed ones."""
        if self._late is not None:
            raise RolloutError(
                f"{self._where(method)}: the engine exceeded its deadline in {self._late} and may "
                "still be busy; close it and build a new one",
                **self._details(method),
            )
        try:
            return run() if self.deadline is None else self._within(self.deadline, method, run)
        except QuadrigaError:
            raise
        except (OSError, EOFError) as error:
            raise RolloutDiedError(
                f"{self._where(method)}: the connection to the engine is lost "
                f"({type(error).__name__}: {error}), so its process has probably ended; look at "
                "its log for the cause, and build a new engine",
                **self._details(method),
            ) from error
        except Exception as error:
            raise RolloutError(
                f"{self._where(method)}: the engine failed with {type(error).__name__}: {error}",
                **self._details(method),
            ) from error

    def _within(self, deadline: float, method: str, run: Callable[[], ResultT]) -> ResultT:
        answer: _Answer[ResultT] = _Answer(run)
        # A daemon thread, so that an engine that never answers does not keep the process alive.
        threading.Thread(target=answer.compute, name=f"rollout {method}", daemon=True).start()
        if answer.done.wait(deadline):
            return answer.get()
        self._late = method
        raise RolloutTimeoutError(
            f"{self._where(method)}: no answer after {deadline:g} s; the engine is wedged or too "
            "slow. Allow more time, or generate fewer or shorter responses at once",
            **self._details(method),
            deadline=deadline,
        )

    def _where(self, method: str) -> str:
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"rollout engine {self.name!r}{rank}, {method}"

    def _details(self, method: str) -> dict[str, object]:
        return {"engine": self.name, "rank": self.rank, "method": method}


class _Answer(Generic[ResultT]):
    """The result or the error of a call in another thread."""

    def __init__(self, run: Callable[[], ResultT]) -> None:
        self.done = threading.Event()
        self._run = run
        self._results: list[ResultT] = []
        self._error: BaseException | None = None

    def compute(self) -> None:
        """Run the call."""
        try:
            self._results.append(self._run())
        except BaseException as error:  # raised again by `get`, in the thread that waits
            self._error = error
        self.done.set()

    def get(self) -> ResultT:
        """Return the result or raise the error."""
        if self._error is not None:
            raise self._error
        return self._results[0]


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
