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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor

from quadriga.errors import (
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.models.images import MultiModalRows
from quadriga.rollout.base import (
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    UpdateForm,
    tensor_digest,
)
from quadriga.rollout.checks import OutputCheck, check_request, check_sequences

ResultT = TypeVar("ResultT")
ErrorT = TypeVar("ErrorT", bound=RolloutError)
P = ParamSpec("P")
_Stream = Iterable[tuple[str, Tensor]]


def _passed_on(
    method: Callable[Concatenate[RolloutEngine, P], ResultT],
) -> Callable[Concatenate[GuardedRollout, P], ResultT]:
    """Return a method that calls the engine's method of that name."""
    name = method.__name__

    def call(guard: GuardedRollout, /, *args: P.args, **settings: P.kwargs) -> ResultT:
        own: Callable[P, ResultT] = getattr(guard.engine, name)
        return guard._call(name, lambda: own(*args, **settings))

    return call


class GuardedRollout(RolloutEngine):
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
        self.name, self.abilities = engine.name, engine.abilities
        self.deadline = deadline
        self.rank = rank
        self._late_method: str | None = None
        self._syncing: int | None = None  # the version of a weight sync that has not ended
        self.synced = False
        """Whether the last weight sync has ended with equal weights."""
        self._received: dict[str, int] = {}
        self._stream_error: BaseException | None = None  # the last error of a stream of weights

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None = None,
    ) -> RolloutOutput:
        request = prompt_ids, attention_mask, sampling, sample_seeds
        check_request(self.name, self.abilities, *request)
        if self._syncing is not None:
            raise self._failure(
                RolloutError,
                "generate",
                f"the weight sync to version {self._syncing} has not ended with equal weights, so "
                "the engine may hold wrong ones; sync the weights again",
            )
        oldest, engine = self.version, self.engine
        more = () if images is None else (images,)
        out = self._call("generate", lambda: engine.generate(*request, *more))
        versions = range(oldest, self.version + 1)
        vocabulary = self.abilities.vocabulary
        check = OutputCheck(self.name, self.rank)
        check.check(out, len(prompt_ids), sampling, vocabulary, versions)
        return out

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        check_sequences(self.name, self.abilities, ids, attention_mask)
        scores = self._call("score", lambda: self.engine.score(ids, attention_mask))
        OutputCheck(self.name, self.rank).check_scores(scores, attention_mask)
        return scores

    def begin_sync(self, version: int) -> None:
        """Generate nothing until `end_sync`: the engine may hold weights of two versions, or of a
        sync that broke off."""
        self._syncing, self.synced = version, False

    def end_sync(self) -> None:
        """Generate again: the weights of the sync that began last are right."""
        self._syncing, self.synced = None, True

    def update_weights(self, stream: _Stream, version: int, form: UpdateForm = "whole") -> None:
        noted, engine = self._noted(stream), self.engine
        more: dict[str, UpdateForm] = {} if form == "whole" else {"form": form}
        self._call("update_weights", lambda: engine.update_weights(noted, version, **more))
        if self.version != version:
            raise self._failure(
                RolloutOutputError,
                "update_weights",
                f"the engine was given the weights of version {version}, but says that it holds "
                f"version {self.version}",
                fault="weight version",
                row=None,
            )

    def _noted(self, stream: _Stream) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream; note the digest of each weight that was read, if no one else can tell.

        An error of the stream is noted too, because it is none of the engine.
        """
        reports = self.abilities.exposes_weights or self.engine.received_digests() is not None
        dtypes = {} if reports else self.engine.weight_dtypes()
        try:
            for name, tensor in stream:
                yield name, tensor
                if not reports:
                    rounded = tensor.to(dtypes.get(name, tensor.dtype))
                    self._received[name] = tensor_digest(rounded)
        except Exception as error:
            self._stream_error = error
            raise

    def received_digests(self) -> Mapping[str, int]:
        """See `RolloutEngine`. For an engine that does not record them, those of what it read."""
        found = self._call("received_digests", self.engine.received_digests)
        return self._received if found is None else found

    weight_boxes = _passed_on(RolloutEngine.weight_boxes)
    lacks_weights = _passed_on(RolloutEngine.lacks_weights)
    weights = _passed_on(RolloutEngine.weights)
    weights_digest = _passed_on(RolloutEngine.weights_digest)
    weight_dtypes = _passed_on(RolloutEngine.weight_dtypes)
    release = _passed_on(RolloutEngine.release)
    resume = _passed_on(RolloutEngine.resume)

    def close(self) -> None:
        self.engine.close()

    def _call(self, method: str, run: Callable[[], ResultT]) -> ResultT:
        """Run a method of the engine and turn the errors of its libraries into typed ones."""
        if self._late_method is not None:
            raise self._failure(
                RolloutError,
                method,
                f"the engine exceeded its deadline in {self._late_method}, or was interrupted, and "
                "may still be busy; close it and build a new one",
            )
        try:
            return run() if self.deadline is None else self._within(self.deadline, method, run)
        except Exception as error:
            if isinstance(error, QuadrigaError) or error is self._stream_error:
                raise
            problem = f"the engine failed with {type(error).__name__}: {error}"
            if isinstance(error, ConnectionError | EOFError):
                problem += ". Its process has probably ended; look at its log, and build a new one"
                raise self._failure(RolloutDiedError, method, problem) from error
            raise self._failure(RolloutError, method, problem) from error

    def _within(self, deadline: float, method: str, run: Callable[[], ResultT]) -> ResultT:
        answer: Future[ResultT] = Future()

        def compute() -> None:
            try:
                answer.set_result(run())
            except BaseException as error:  # raised again in the thread that waits
                answer.set_exception(error)

        # A daemon thread, so that an engine that never answers does not keep the process alive.
        threading.Thread(target=compute, name=f"rollout {method}", daemon=True).start()
        self._late_method = method  # unless it answers: also after an interrupt the engine goes on
        if not wait([answer], deadline).done:
            raise self._failure(
                RolloutTimeoutError,
                method,
                f"no answer after {deadline:g} s; the engine is wedged or too slow. Allow more "
                "time (rollout.deadline_s), or generate fewer or shorter responses at once",
                deadline=deadline,
            )
        self._late_method = None
        return answer.result()

    def _failure(self, kind: type[ErrorT], method: str, problem: str, **details: object) -> ErrorT:
        place = "" if self.rank is None else f" on rank {self.rank}"
        return kind(
            f"rollout engine {self.name!r}{place}, {method}: {problem}",
            engine=self.name,
            rank=self.rank,
            method=method,
            **details,
        )
