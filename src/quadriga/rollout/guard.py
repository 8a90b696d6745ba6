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
from typing import Generic, TypeVar

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
from quadriga.parallel.layouts import Box
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import (
    DropsWeights,
    GeneratesFromImages,
    HoldsShards,
    ReportsReceipts,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    SharesWeights,
    tensor_digest,
)
from quadriga.rollout.output_checks import OutputCheck as OutputCheck
from quadriga.rollout.output_checks import OutputFault as OutputFault
from quadriga.rollout.requests import check_request, check_sequences

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
        self._late_method: str | None = None
        self._syncing: int | None = None  # the version of a weight sync that has not ended
        self._received: dict[str, int] = {}
        self._stream_error: BaseException | None = None  # the last error of a stream of weights

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
        if self._syncing is not None:
            raise RolloutError(
                f"{self._where('generate')}: the weight sync to version {self._syncing} has not "
                "ended with equal weights, so the engine may hold wrong ones; sync the weights "
                "again",
                **self._details("generate"),
            )
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
        noted = self._noted(stream)
        self._call("update_weights", lambda: self.engine.update_weights(noted, version))
        self._check_version("update_weights", version)

    def begin_sync(self, version: int) -> None:
        """See `weight_sync.verification.WaitsForSync`."""
        self._syncing = version

    def end_sync(self) -> None:
        """Generate again: the weights of the sync that began last are right."""
        self._syncing = None

    def share_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> int:
        """See `SharesWeights`. An engine that cannot share copies all weights."""
        if not isinstance(self.engine, SharesWeights):
            self.update_weights(stream, version)
            return 0
        engine = self.engine
        noted = self._noted(stream)
        shared = self._call("share_weights", lambda: engine.share_weights(noted, version))
        self._check_version("share_weights", version)
        return shared

    def weight_boxes(self) -> Mapping[str, Box]:
        """See `HoldsShards`. Other engines hold whole weights."""
        if not isinstance(self.engine, HoldsShards):
            return {}
        return self._call("weight_boxes", self.engine.weight_boxes)

    def update_shards(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `HoldsShards`. Of other engines the shards are whole weights."""
        if not isinstance(self.engine, HoldsShards):
            self.update_weights(stream, version)
            return
        engine, noted = self.engine, self._noted(stream)
        self._call("update_shards", lambda: engine.update_shards(noted, version))
        self._check_version("update_shards", version)

    def lacks_weights(self) -> bool:
        """See `DropsWeights`. An engine that keeps its weights lacks none."""
        return isinstance(self.engine, DropsWeights) and self.engine.lacks_weights()

    def received_digests(self) -> Mapping[str, int]:
        """See `ReportsReceipts`. For an engine that does not report, those of what it read."""
        if isinstance(self.engine, ReportsReceipts):
            return self._call("received_digests", self.engine.received_digests)
        return self._received

    def _noted(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream; note the digest of each weight that was read, if no one else can tell.

        An error of the stream is noted too, because it is none of the engine.
        """
        reports = self.abilities.exposes_weights or isinstance(self.engine, ReportsReceipts)
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

    def _check_version(self, method: str, version: int) -> None:
        if self.version != version:
            raise RolloutOutputError(
                f"{self._where(method)}: the engine was given the weights of version {version}, "
                f"but says that it holds version {self.version}",
                **self._details(method),
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
        except Exception as error:
            if error is self._stream_error:
                raise
            raise self._failed(method, error) from error

    def _failed(self, method: str, error: Exception) -> RolloutError:
        """Return the error of this package for one of the engine's libraries."""
        if isinstance(error, (ConnectionError, EOFError)):
            return RolloutDiedError(
                f"{self._where(method)}: the connection to the engine is lost "
                f"({type(error).__name__}: {error}), so its process has probably ended; look at "
                "its log for the cause, and build a new engine",
                **self._details(method),
            )
        return RolloutError(
            f"{self._where(method)}: the engine failed with {type(error).__name__}: {error}",
            **self._details(method),
        )

    def _within(self, deadline: float, method: str, run: Callable[[], ResultT]) -> ResultT:
        answer: _Answer[ResultT] = _Answer(run)
        # A daemon thread, so that an engine that never answers does not keep the process alive.
        threading.Thread(target=answer.compute, name=f"rollout {method}", daemon=True).start()
        try:
            done = answer.done.wait(deadline)
        except BaseException:  # an interrupt: the engine goes on
            self._late_method = method
            raise
        if done:
            return answer.get()
        self._late_method = method
        raise RolloutTimeoutError(
            f"{self._where(method)}: no answer after {deadline:g} s; the engine is wedged or too "
            "slow. Allow more time (rollout.deadline_s), or generate fewer or shorter responses at "
            "once",
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
