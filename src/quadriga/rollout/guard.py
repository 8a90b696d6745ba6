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
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from quadriga.errors import (
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.models.images import MultiModalRows
from quadriga.parallel.layouts import Box
from quadriga.rollout.base import RolloutEngine, RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.checks import OutputCheck, check_request, check_sequences

ResultT = TypeVar("ResultT")
_Stream = Iterable[tuple[str, Tensor]]


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
    ) -> RolloutOutput:
        return self.generate_from_images(prompt_ids, attention_mask, sampling, sample_seeds, None)

    def generate_from_images(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None,
    ) -> RolloutOutput:
        request = prompt_ids, attention_mask, sampling, sample_seeds
        check_request(self.name, self.abilities, *request)
        if self._syncing is not None:
            raise RolloutError(
                f"{self._where('generate')}: the weight sync to version {self._syncing} has not "
                "ended with equal weights, so the engine may hold wrong ones; sync the weights "
                "again",
                **self._details("generate"),
            )
        oldest, engine = self.version, self.engine
        if images is None:
            out = self._call("generate", lambda: engine.generate(*request))
        else:
            out = self._call("generate", lambda: engine.generate_from_images(*request, images))
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
        self._syncing = version

    def end_sync(self) -> None:
        """Generate again: the weights of the sync that began last are right."""
        self._syncing = None

    def update_weights(self, stream: _Stream, version: int) -> None:
        self._update("update_weights", self.engine.update_weights, stream, version)

    def share_weights(self, stream: _Stream, version: int) -> int:
        return self._update("share_weights", self.engine.share_weights, stream, version)

    def update_shards(self, stream: _Stream, version: int) -> None:
        self._update("update_shards", self.engine.update_shards, stream, version)

    def _update(
        self, method: str, write: Callable[[_Stream, int], ResultT], stream: _Stream, version: int
    ) -> ResultT:
        noted = self._noted(stream)
        result = self._call(method, lambda: write(noted, version))
        if self.version != version:
            raise RolloutOutputError(
                f"{self._where(method)}: the engine was given the weights of version {version}, "
                f"but says that it holds version {self.version}",
                **self._details(method),
                fault="weight version",
                row=None,
            )
        return result

    def _noted(self, stream: _Stream) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream; note the digest of each weight that was read, if no one else can tell.

        An error of the stream is noted too, because it is none of the engine.
        """
        reports = self.abilities.exposes_weights or self.engine.received_digests() is not None
        dtypes = {} if reports else self.engine.weight_dtypes()
        weights = iter(stream)
        while True:
            try:
                name, tensor = next(weights)
            except StopIteration:
                return
            except BaseException as error:
                self._stream_error = error
                raise
            yield name, tensor
            if not reports:
                self._received[name] = tensor_digest(tensor.to(dtypes.get(name, tensor.dtype)))

    def received_digests(self) -> Mapping[str, int]:
        """See `RolloutEngine`. For an engine that does not record them, those of what it read."""
        found = self._call("received_digests", self.engine.received_digests)
        return self._received if found is None else found

    def weight_boxes(self) -> Mapping[str, Box]:
        return self._call("weight_boxes", self.engine.weight_boxes)

    def lacks_weights(self) -> bool:
        return self.engine.lacks_weights()

    def weights(self) -> _Stream:
        return self.engine.weights()

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
        if self._late_method is not None:
            raise RolloutError(
                f"{self._where(method)}: the engine exceeded its deadline in "
                f"{self._late_method}, or was interrupted, and may still be busy; close it and "
                "build a new one",
                **self._details(method),
            )
        try:
            return run() if self.deadline is None else self._within(self.deadline, method, run)
        except QuadrigaError:
            raise
        except (ConnectionError, EOFError) as error:
            if error is self._stream_error:
                raise
            raise RolloutDiedError(
                f"{self._where(method)}: the connection to the engine is lost "
                f"({type(error).__name__}: {error}), so its process has probably ended; look at "
                "its log for the cause, and build a new engine",
                **self._details(method),
            ) from error
        except Exception as error:
            if error is self._stream_error:
                raise
            raise RolloutError(
                f"{self._where(method)}: the engine failed with {type(error).__name__}: {error}",
                **self._details(method),
            ) from error

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
        try:
            result = answer.result(deadline)
        except BaseException as error:
            if answer.done():
                self._late_method = None
            elif isinstance(error, TimeoutError):
                raise RolloutTimeoutError(
                    f"{self._where(method)}: no answer after {deadline:g} s; the engine is wedged "
                    "or too slow. Allow more time (rollout.deadline_s), or generate fewer or "
                    "shorter responses at once",
                    **self._details(method),
                    deadline=deadline,
                ) from None
            raise
        self._late_method = None
        return result

    def _where(self, method: str) -> str:
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"rollout engine {self.name!r}{rank}, {method}"

    def _details(self, method: str) -> dict[str, object]:
        return {"engine": self.name, "rank": self.rank, "method": method}
