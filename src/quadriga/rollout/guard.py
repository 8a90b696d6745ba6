"""A guard around any rollout engine: it checks requests, outputs and new weights, and ends a wait
at a deadline.

An engine may run in other processes and answer over a network, so its outputs are checked before
training reads them. A violation is a `RolloutOutputError`, whose attribute `fault` names it:

- `row count`, `shape`, `dtype`: of the tensors, or the number of finish reasons.
- `mask`: a row of the response mask is not ones followed by zeros, or is empty.
- `token id`: a token is outside the vocabulary, or one of `excluded_token_ids`.
- `padding`: something other than the padding token behind the end of a response.
- `log-probability`: NaN, infinite or above 0; or not 0 at padding.
- `end`: an end token inside a response.
- `finish reason`: it disagrees with the last token or with the length. A paused response has the
  most new tokens of its call, and fewer than `max_new_tokens` in all.
- `weight version`: other weights than the engine held during the call.

After a weight sync the digest of every weight of the training engine is compared with what the
engine holds. One whose weights cannot be read back (`abilities.exposes_weights` is False) has the
digests of what its processes were sent. Trainer and engine then also compute the log-probabilities
of the same random tokens. Engines with the same weights agree up to rounding: in float32 no score
may differ by more than `EXACT_BOUND`. With fewer bits the bound of the mean is `NOISE_FACTOR` times
the mean before the first sync, when both usually hold the weights of the model folder, and later
that of the first sync; it is at most `ROUNDED_BOUND`. A weight whose change is smaller than the
rounding of the scores is not found by them alone.

consumes      a request, and the engine's output
produces      the same output, checked; or a typed error
waits for     the engine, at most `deadline` seconds if one is given
unblocked by  the engine's answer, its error, or the deadline. After a deadline the engine refuses
              every call but `close`, because the state of an engine that is still busy is unknown.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from quadriga.errors import (
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
    WorkerError,
)
from quadriga.models.images import MultiModalRows
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import (
    Continued,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
    UpdateForm,
    tensor_digest,
)

ResultT = TypeVar("ResultT")
ErrorT = TypeVar("ErrorT", bound=RolloutError)
P = ParamSpec("P")
_ROUNDING = 1e-3
"""Nats by which rounding may bring the log-probability of a certain token above 0."""
_Stream = Iterable[tuple[str, Tensor]]

NAMED_WEIGHTS = 20
"""An error message lists at most so many weights."""
PROBE_ROWS, PROBE_TOKENS = 8, 32
EXACT_BOUND = 1e-3
"""Nats that no log-probability may differ by if the rollout engine computes in float32."""
ROUNDED_BOUND = 0.1
"""Nats that log-probabilities may differ by on average if it computes with fewer bits."""
NOISE_FACTOR = 2.0
"""How much more log-probabilities may differ on average than after the first sync."""
LEAST_NOISE = 1e-3
"""Nats: a mean difference in the first sync below this one counts as this one."""
_STOPS = "The run stops, because its samples would come from other weights than the trained ones"


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
        self.holds_adapters = engine.holds_adapters
        self.deadline = deadline
        self.rank, self._place = rank, "" if rank is None else f" on rank {rank}"
        self._late_method: str | None = None
        self._syncing: int | None = None  # the version of a weight sync that has not ended
        self.synced = False
        """Whether the last weight sync has ended with equal weights."""
        self._noise: float | None = None  # mean difference of scores in the first sync
        self._before: tuple[int, Tensor] | None = None  # version and scores before that sync
        self._received: dict[str, int] = {}
        # An engine with processes of its own counts what it passes on to them.
        self.moved: Counter[str] = vars(engine).get("moved", Counter())
        """Path -> bytes of the last weight sync: `in_place`, `local`, `group`, `store`, and to
        processes of the engine `handles`, `pipe`. See `docs/concepts/weight_sync.md`."""
        self.staged_digests: Mapping[int, int] = {}
        """Address of a tensor that the engine may have taken as its weight → its digest."""
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
        continued: Continued | None = None,
    ) -> RolloutOutput:
        request = prompt_ids, attention_mask, sampling, sample_seeds
        self.check_request(*request, continued)
        if self._syncing is not None:
            raise self._failure(
                RolloutError,
                "generate",
                f"the weight sync to version {self._syncing} has not ended with equal weights, so "
                "the engine may hold wrong ones; sync the weights again",
            )
        oldest, engine = self.version, self.engine
        more = () if images is None else (images,)  # an engine may lack both arguments

        def sample() -> RolloutOutput:
            if continued is None:
                return engine.generate(*request, *more)
            return engine.generate(*request, images=images, continued=continued)

        out = self._call("generate", sample)
        versions = range(oldest, self.version + 1)
        self.check_output(out, len(prompt_ids), sampling, versions, continued)
        return out

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.check_sequences(ids, attention_mask)
        scores = self._call("score", lambda: self.engine.score(ids, attention_mask))
        self._form("scores", scores, tuple(attention_mask.shape), torch.float32)
        self._require_log_probs(scores, attention_mask.bool())
        return scores

    # Weights

    def update_weights(self, stream: _Stream, version: int, form: UpdateForm = "whole") -> None:
        noted, engine = self._noted(stream), self.engine
        more: dict[str, UpdateForm] = {} if form == "whole" else {"form": form}
        self._call("update_weights", lambda: engine.update_weights(noted, version, **more))
        if self.version != version:
            problem = f"it was given version {version} of the weights, but holds {self.version}"
            details: dict[str, object] = {"fault": "weight version", "row": None}
            raise self._failure(RolloutOutputError, "update_weights", problem, **details)

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

    # The end of a weight sync

    def begin_sync(self, version: int) -> None:
        """Generate nothing until `end_sync`: the engine may hold weights of two versions, or of a
        sync that broke off or was refused."""
        self._syncing, self.synced = version, False
        first = self._noise is None and (self._before is None or self._before[0] != version)
        if first and not self.abilities.exposes_weights:
            self._before = version, self._score_probe(version)

    def end_sync(self, sent: Mapping[str, int], trained: Tensor | None) -> None:
        """Compare what the engine holds with what the training engine has. Then generate again.

        Args:
            sent: the digest of each weight of the training engine.
            trained: its log-probabilities of the probe tokens; None if the weights are exposed.

        Raises:
            WorkerError: weights differ. Attributes: `tensor` and `tensors` where they are known,
                `version`.
        """
        version = self._syncing
        assert version is not None, "`begin_sync` comes first"
        if self.abilities.exposes_weights:
            compare_digests(sent, self._held_of_part(sent), version)
        else:
            compare_digests(sent, self.received_digests(), version)
            assert trained is not None, "the needs of the engine ask for scores"
            self._compare_scores(trained, version)
        self._syncing, self.synced = None, True

    def _held_of_part(self, sent: Mapping[str, int]) -> dict[str, int]:
        """Return the digests of what the engine holds that must be compared with what was sent.

        It holds zeros for layers without an adapter, which are not sent. After a sync of adapters
        alone the base model is not compared, because nothing has been written to it.
        """
        if known := self.staged_digests:
            held = {n: known.get(t.data_ptr()) or tensor_digest(t) for n, t in self.weights()}
        else:
            held = self.weights_digest()
        if not self.holds_adapters:
            return held
        from quadriga.models.adapters import is_stored_part  # which imports transformers

        adapters_only = all(map(is_stored_part, sent))
        return {
            name: digest
            for name, digest in held.items()
            if name in sent or not (adapters_only or is_stored_part(name))
        }

    def _compare_scores(self, trained: Tensor, version: int) -> None:
        difference = (self._score_probe(version) - trained).abs()
        exact = all(dtype.itemsize >= 4 for dtype in self.weight_dtypes().values())
        found = float(difference.max() if exact else difference.mean())
        noise = self._noise
        if noise is None:
            assert self._before is not None, "`begin_sync` comes first"
            noise = max(float((self._before[1] - trained).abs().mean()), LEAST_NOISE)
        bound = EXACT_BOUND if exact else min(ROUNDED_BOUND, NOISE_FACTOR * noise)
        if not found <= bound:  # NaN is no agreement
            kind = "at most" if exact else "on average"
            raise WorkerError(
                f"weight sync to version {version}: the log-probabilities of "
                f"{difference.numel()} probe tokens differ by {found:.3g} nats between trainer and "
                f"rollout, expected {kind} {bound:.3g}. {_STOPS}",
                version=version,
                difference=found,
            )
        if self._noise is None:
            self._noise = max(found, LEAST_NOISE)

    def _score_probe(self, version: int) -> Tensor:
        ids = probe_ids(self.abilities, version)
        return self.score(ids, torch.ones_like(ids))[:, 1:]

    # Calls

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
        return kind(
            f"rollout engine {self.name!r}{self._place}, {method}: {problem}",
            engine=self.name,
            rank=self.rank,
            method=method,
            **details,
        )

    # Checks of outputs

    def check_output(
        self,
        out: RolloutOutput,
        rows: int,
        sampling: SamplingParams,
        versions: range,
        continued: Continued | None = None,
    ) -> None:
        """Check the output of `generate` for `rows` rows.

        Args:
            versions: the versions of the weights that may have sampled a row.

        Raises:
            RolloutOutputError: the output breaks the protocol. Attribute `fault`; see the module.
        """
        width, vocabulary = sampling.max_new_tokens, self.abilities.vocabulary
        limit = torch.full((rows,), width)  # tokens that a row may have
        if continued is not None:
            width, limit = continued.at_most, limit - continued.sampled
        self._form("response_ids", out.response_ids, (rows, width), torch.int64)
        self._form("response_mask", out.response_mask, (rows, width), torch.int64)
        self._form("rollout_log_probs", out.rollout_log_probs, (rows, width), torch.float32)
        self._form("weight_versions", out.weight_versions, (rows,), torch.int64)
        reasons, found = out.finish_reason, out.weight_versions
        if len(reasons) != rows:
            problem = f"has {len(reasons)} finish reasons for {rows} rows"
            raise self._output_error("row count", None, problem)
        ids, mask = out.response_ids, out.response_mask.bool()
        lengths, columns = mask.sum(1), torch.arange(width)
        excluded = torch.isin(ids, torch.tensor(sampling.excluded_token_ids).long())
        ends = torch.isin(ids, torch.tensor(sampling.end_token_ids).long())
        last = columns == (lengths - 1)[:, None]
        ended = (ends & last).any(1)
        stopped = torch.tensor([reason == "stop" for reason in reasons]).bool()
        by_length = torch.tensor([reason == "length" for reason in reasons]).bool()
        may_stop = ended | bool(sampling.stop_strings)
        paused = torch.tensor([reason == "paused" for reason in reasons]).bool()
        at_pause = paused & (lengths == width) & (lengths < limit)
        at_limit = by_length & (lengths == limit)
        right_reason = (stopped & may_stop) | ((at_limit | at_pause) & ~ended)
        held = (found >= versions.start) & (found < versions.stop)
        wrong = [*found[~held].tolist(), None][0]
        self._require("mask", mask == (columns < lengths[:, None]), "is not ones, then zeros")
        self._require("mask", out.response_mask <= 1, "has numbers above 1")
        self._require("mask", lengths > 0, "is empty, but a response has at least one token")
        too_long = f"has more tokens than are left of {sampling.max_new_tokens}"
        self._require("mask", lengths <= limit, too_long)
        known = (ids >= 0) & (ids < vocabulary)
        self._require("token id", known | ~mask, f"has a token outside the {vocabulary} tokens")
        self._require("token id", ~(excluded & mask), "has a token of `excluded_token_ids`")
        padding = f"has other tokens than {sampling.pad_token_id}, the padding, behind its end"
        self._require("padding", (ids == sampling.pad_token_id) | mask, padding)
        self._require_log_probs(out.rollout_log_probs, mask)
        self._require("end", ~(ends & mask & ~last), "has an end token before its last token")
        reason = f"has a finish reason that disagrees with its last token or the limit of {width}"
        self._require("finish reason", right_reason, reason)
        names = " or ".join(map(str, versions))
        version = f"has version {wrong}, but the engine held version {names}"
        self._require("weight version", held, version)

    def _form(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if (tensor.shape, tensor.dtype) == (shape, dtype):
            return
        fault = "dtype" if tensor.shape == shape else "shape"
        fault = fault if len(tensor) == shape[0] else "row count"
        found = f"{list(tensor.shape)} of {tensor.dtype} instead of {list(shape)} of {dtype}"
        raise self._output_error(fault, None, f"has {name} {found}")

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
            raise self._output_error(fault, int(wrong.nonzero()[0]), problem)

    def _output_error(self, fault: str, row: int | None, problem: str) -> RolloutOutputError:
        what = "its output" if row is None else f"row {row} of its output"
        return RolloutOutputError(
            f"rollout engine {self.name!r}{self._place}: {what} {problem} ({fault}). No training "
            "is done on it; the engine is faulty, or of a version that is not supported",
            engine=self.name,
            rank=self.rank,
            fault=fault,
            row=row,
        )


def guarded(engine: RolloutEngine) -> GuardedRollout:
    """Return an engine in its guard, a new one if it has none."""
    return engine if isinstance(engine, GuardedRollout) else GuardedRollout(engine)


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Check that the rollout engine holds what the training engine has.

    Raises:
        WorkerError: a weight was not sent, is not held, or differs. Names all such weights, at most
            `NAMED_WEIGHTS` of them. Attributes: `tensor` (the first one), `tensors`, `version`.
    """
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held
    problems: dict[str, str] = {}
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            problems[name] = "was never sent, so the rollout still holds an old value"
        elif name not in held:
            problems[name] = "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            problems[name] = "differs between trainer and rollout"
    if not problems:
        return
    listed = [f"{name!r} {problem}" for name, problem in problems.items()]
    more = len(listed) - NAMED_WEIGHTS
    text = "; ".join(listed[:NAMED_WEIGHTS]) + (f"; and {more} more" if more > 0 else "")
    names = tuple(problems)
    raise WorkerError(
        f"weight sync to version {version}: {len(names)} of {len(set(sent) | set(held))} weights "
        f"are wrong: {text}. {_STOPS}",
        tensor=names[0],
        tensors=names,
        version=version,
    )


def probe_ids(abilities: RolloutAbilities, version: int) -> Tensor:
    """Return [`PROBE_ROWS`, T] int64: random tokens, others for each version, T ≤ the window."""
    columns = min(PROBE_TOKENS, abilities.window or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(version)
    shape = (PROBE_ROWS, max(columns, 2))
    return torch.randint(abilities.vocabulary, shape, generator=generator)
