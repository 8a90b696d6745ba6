"""`RolloutEngine`, a started engine; checks of its inputs, and the digest of a weight.

Shapes: B rows, P prompt columns, R = `max_new_tokens` response columns, T columns of a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from quadriga.errors import (
    ModelError,
    RolloutAbilityError,
    RolloutError,
    RolloutInputError,
    ShapeError,
)
from quadriga.parallel.distributed import rank
from quadriga.rollout.abilities import (
    LogProbKind as LogProbKind,
    RolloutAbilities,
    SamplingParams as SamplingParams,
)

if TYPE_CHECKING:
    from quadriga.models.images import MultiModalRows
    from quadriga.parallel.layouts import Box

FinishReason = Literal["stop", "length", "paused"]
"""Why a response ended: with an end token or a stop string, or at `max_new_tokens`. A paused one
has not ended: it has the most new tokens of its call, and a later call can continue it."""

State = Literal["ready", "released", "failed", "closed"]
"""Whether an engine can generate, waits for `resume`, stopped in the middle, or has ended."""

UpdateForm = Literal["whole", "parts", "shared"]
"""What an update of weights yields: whole tensors to copy; tensors with the values of the
`weight_boxes` of this rank; or tensors that the engine uses themselves where they fit."""

_WHAT_TO_DO: Mapping[State, str] = {
    "released": "call resume first",
    "failed": "restart the worker",
    "closed": "build another engine",
}

# The integer type with as many bytes as an element of the tensor.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGEST_CHUNK = 1 << 22


@dataclass(frozen=True)
class Continued:
    """A call that continues responses of earlier calls, and pauses each response that does not end.

    `max_new_tokens`, `min_new_tokens` and stop strings are about the whole response. What the
    engine keeps between calls changes no result: prompt and earlier tokens are computed with the
    weights that it has, unless `rollout.reset_caches` is false.

    Attributes:
        sampled: [B] int64, how many tokens the response of each row has so far; 0 for a new one.
            They are the last ones of its prompt, which may lack the first of them.
        at_most: new tokens of each row in this call, at most.
        keep: rows whose caches an engine without a prefix cache may hold after the call; 0: it
            frees all of them.
        keep_ended: these may be rows that have ended, too. A later call continues them behind more
            tokens.
        began: [B] int64, the version of the weights that sampled the first token of each response;
            of a new one, a version that may sample it. None: all are new.
    """

    sampled: Tensor
    at_most: int
    keep: int = 0
    keep_ended: bool = False
    began: Tensor | None = None


@dataclass(frozen=True)
class RolloutOutput:
    """Responses in the order of the request, right-padded to R columns.

    Of a `Continued` call these are the new tokens alone, and R is its `at_most`.

    Attributes:
        response_ids: [B, R] int64. Padding is `pad_token_id`.
        response_mask: [B, R] int64, 1 up to and including the token that ends the response.
        rollout_log_probs: [B, R] float32, nats, 0 outside the mask, of the distribution that
            `SamplingParams.log_probs` names.
        finish_reason: B reasons.
        weight_versions: [B] int64, the version of the weights that sampled each row. One version
            sampled all tokens of a row, or the new ones of a `Continued` call.
        routed_experts: [B, P + R, layers, K] int8 or int16, the experts of each token that this
            call has computed, else -1; with `rollout.replay_routes`.
    """

    response_ids: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    finish_reason: tuple[FinishReason, ...]
    weight_versions: Tensor
    routed_experts: Tensor | None = None


class RolloutEngine(ABC):
    """A copy of the policy that generates. It is not sharded like the training engine's copy.

    A subclass sets `name` and `abilities`, generates, scores and updates. The other methods are
    right for an engine that holds a whole copy and has nothing to free. A method that can be called
    in certain states only begins with `_check`. `quadriga.testing.check_rollout` checks an engine.

    Attributes:
        name: of the engine for error messages, as in `rollout.name`.
        abilities: what this engine can do with the model that it holds.
        shares_weights: it can use the tensors of an actor in the same process as its weights.
        holds_adapters: it computes with A and B of the adapters of the model, which it holds beside
            the weights and names as in an adapter's file.
    """

    name: str
    abilities: RolloutAbilities
    shares_weights: bool = False
    holds_adapters: bool = False
    _resets_caches = True  # a weight update frees the caches of rows that go on
    _version = -1
    _state: State = "ready"
    _releasable = True
    _unknown: frozenset[str] = frozenset()  # weights that must be sent before it can generate

    @property
    def version(self) -> int:
        """The version of the weights, as given to `update_weights`; -1 for the folder's weights."""
        return self._version

    @abstractmethod
    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows | None = None,
        continued: Continued | None = None,
    ) -> RolloutOutput:
        """Sample one response for each row, in the order of the rows.

        The n responses of one prompt are n rows with seeds of their own. The response of a row
        depends on its prompt, its seed and the weights, not on the batch, as far as `abilities`
        say so. The token ids of the prompt are used as they are. An empty batch has an empty
        result.

        Args:
            prompt_ids, attention_mask: [B, P] int64, left-padded.
            sample_seeds: [B] int64.
            images: of the rows, with `position_ids` [B, 3, P]; given to engines that compute them.
            continued: given to engines that declare `abilities.continues`, if rows may be paused.

        Raises:
            ShapeError: the three shapes disagree.
            FieldError: a row has another number of image tokens than its images.
            RolloutInputError: a prompt is empty or too long, or has an id outside the vocabulary.
            RolloutAbilityError: the engine cannot do what `sampling` asks.
            RolloutError: the engine is released, closed or has failed.
        """

    @abstractmethod
    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the log-probability at temperature 1 of each token, given the tokens before it.

        Args:
            ids, attention_mask: [B, T] int64. The ones of a row of the mask are contiguous, so
                sequences may be padded on the left, on the right or on both sides.

        Returns:
            [B, T] float32, nats; 0 at the first token of each row and at padding.

        Raises:
            ShapeError, RolloutInputError, RolloutError: as `generate`.
        """

    # Checks of requests

    def check_request(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        seeds: Tensor,
        continued: Continued | None = None,
    ) -> Continued:
        """Check the arguments of `generate`; return `continued`, without which all responses begin.

        Raises:
            ShapeError: the three shapes disagree.
            RolloutInputError: a prompt is empty, is not left-padded, does not leave space for
                `max_new_tokens` in the window, or has an id outside the vocabulary; or a stop token
                is outside the vocabulary; or `continued` disagrees with a row. Attributes:
                `engine`, `row`.
            RolloutAbilityError: the engine cannot do what `sampling` asks, or continue responses.
        """
        if seeds.shape != prompt_ids.shape[:1]:
            raise ShapeError(
                f"rollout engine {self.name!r}: sample_seeds must be [B], one seed for each of the "
                f"{len(prompt_ids)} prompts; got {list(seeds.shape)}"
            )
        left: int | Tensor = sampling.max_new_tokens
        new = torch.zeros(len(prompt_ids), dtype=torch.int64)
        begun = Continued(new, sampling.max_new_tokens)
        if continued is not None:
            begun, left = continued, self._left(prompt_ids, attention_mask, sampling, continued)
        self.check_sequences(prompt_ids, attention_mask, left)
        self.abilities.check(sampling, self.name)
        vocabulary = self.abilities.vocabulary
        outside = [i for i in sampling.stop_token_ids if i >= vocabulary]
        if outside:
            problem = f"stop_token_ids {outside} are outside the vocabulary of {vocabulary} tokens"
            raise self._wrong_input(f"{problem}, so they never end a response; remove them")
        right = (attention_mask.diff(dim=1) < 0).any(1)
        self._refuse(right, "is padded on the right or inside; pad prompts on the left only")
        return begun

    def _caches(self, begun: Continued) -> list[str]:
        """Return the name of the caches that each row may find, if an update keeps them; else none.

        It is the version of the weights with which the response began, so that a new response finds
        no keys and values of earlier weights.
        """
        if self._resets_caches:
            return []
        new = torch.full_like(begun.sampled, self.version)
        return [str(version) for version in (new if begun.began is None else begun.began).tolist()]

    def _left(
        self, ids: Tensor, mask: Tensor, sampling: SamplingParams, continued: Continued
    ) -> Tensor:
        """Check how far the responses have come; return [B] how many tokens each may still get."""
        sampled, at_most, limit = continued.sampled, continued.at_most, sampling.max_new_tokens
        if not self.abilities.continues:
            what = "continue responses; use rollout.name=hf, vllm or sglang"
            raise self._unable(what, "continues")
        self.check_sequences(ids, mask)
        if sampled.shape != ids.shape[:1] or sampled.dtype != torch.int64:
            raise ShapeError(
                f"rollout engine {self.name!r}: continued.sampled must be [B] int64 for the "
                f"{len(ids)} prompts; got {list(sampled.shape)} of {sampled.dtype}"
            )
        if not 1 <= at_most <= limit:
            bounds = f"at least 1 and at most max_new_tokens, {limit}"
            raise self._wrong_input(f"continued.at_most must be {bounds}; got {at_most}")
        wrong = (sampled < 0) | (sampled >= limit)
        count = next(iter(sampled[wrong].tolist()), None)
        problem = f"has {count} response tokens sampled before, of at most {limit}; it cannot go on"
        self._refuse(wrong, problem)
        return limit - sampled

    def check_sequences(
        self, ids: Tensor, attention_mask: Tensor, new_tokens: int | Tensor = 0
    ) -> None:
        """Check token ids and their mask, [B, T], with space in the window for `new_tokens` more,
        one number or [B].

        Raises:
            ShapeError, RolloutInputError: as `check_request`.
        """
        if ids.ndim != 2 or attention_mask.shape != ids.shape:
            raise ShapeError(
                f"rollout engine {self.name!r}: token ids and attention mask must have one shape "
                f"[B, T]; got {list(ids.shape)} and {list(attention_mask.shape)}"
            )
        if ids.is_floating_point() or attention_mask.is_floating_point():
            got = f"{ids.dtype} and {attention_mask.dtype}"
            raise self._wrong_input(f"token ids and attention mask must be integers; got {got}")
        valid, vocabulary = attention_mask.bool(), self.abilities.vocabulary
        lengths = valid.sum(1)
        before = torch.nn.functional.pad(valid, (1, 0))[:, :-1]
        apart = (valid & ~before).sum(1) > 1
        self._refuse(lengths == 0, "is empty; it needs at least one token")
        self._refuse(apart, "has padding between its tokens; its tokens must be adjacent")
        outside = valid & ((ids < 0) | (ids >= vocabulary))
        self._refuse(
            outside.any(1),
            f"has the token id {next(iter(ids[outside].tolist()), None)}, which is outside the "
            f"vocabulary of {vocabulary} tokens; use the tokenizer of the model",
        )
        wholes = lengths + new_tokens
        window, longest = self.abilities.window, max(wholes.tolist(), default=0)
        if window is not None and longest > window:
            length = int(lengths[wholes == longest][0])
            more = f" and can get {longest - length} more, together {longest}"
            self._refuse(
                wholes == longest,
                f"has {length} tokens{more if longest > length else ''}, but the window has "
                f"{window}; shorten the sequence{' or the response' if longest > length else ''} "
                f"by {longest - window}",
            )

    def _refuse(self, wrong_B: Tensor, problem: str) -> None:
        """Raise `RolloutInputError` for the first row that is wrong."""
        if wrong_B.any():
            row = int(wrong_B.nonzero()[0])
            raise self._wrong_input(f"the sequence in row {row} {problem}", row)

    def _wrong_input(self, problem: str, row: int | None = None) -> RolloutInputError:
        return RolloutInputError(
            f"rollout engine {self.name!r}: {problem}", engine=self.name, row=row
        )

    # Weights

    @abstractmethod
    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        """Copy new weights from (checkpoint name, tensor) pairs, one tensor at a time.

        The stream may hold a part of the weights; the others stay as they are. Nothing that was
        computed with the old weights (a prefix cache) is used afterwards. The method may also be
        called between `release` and `resume`. It sets `_version`.

        An engine is called with the form "parts" if it has `weight_boxes`, and with "shared" if
        `shares_weights`: a tensor then fits if shape, dtype and device are those of the engine's
        weight, and the others are copied. Its owner may change it in place later, as an optimizer
        step does. `generate` and `score` then raise `RolloutError` until the next update, because
        the engine's version would be wrong.

        Raises:
            ModelError: the model has no weight of that name and shape.
        """

    def weight_boxes(self) -> Mapping[str, Box]:
        """Return the box of each weight that this rank holds, by checkpoint name, if several ranks
        hold one copy together. A weight that is missing is whole on every rank."""
        return {}

    def lacks_weights(self) -> bool:
        """Return whether weights must be sent before the engine can generate, because `release` has
        freed them without a copy."""
        return False

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights that the engine holds, by checkpoint name, for digests and dtypes."""
        raise self._unable("show its weights; compare scores of probe prompts", "exposes_weights")

    def weights_digest(self) -> dict[str, int]:
        """Return the `tensor_digest` of every weight, by checkpoint name.

        Raises:
            RolloutAbilityError: `abilities.exposes_weights` is False. Compare `score` of probe
                prompts with the training engine instead.
        """
        self._check("weights_digest", "ready", "released")
        return {name: tensor_digest(tensor) for name, tensor in self.weights()}

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype in which the engine holds each weight, by checkpoint name.

        A name that is missing is a weight that the engine takes in the dtype in which it is sent.
        """
        self._check("weight_dtypes", "ready", "released")
        if not self.abilities.exposes_weights:
            return {}
        return {name: tensor.dtype for name, tensor in self.weights()}

    def received_digests(self) -> Mapping[str, int] | None:
        """Return the `tensor_digest` of each weight that was accepted, as it was sent last, for an
        engine in other processes that cannot tell what it holds; None: it does not record them."""
        return None

    # State

    def release(self) -> None:
        """Free the engine's device memory. `resume` gives the same weights and version back, unless
        `lacks_weights`.

        Between `release` and `resume`, `generate` and `score` raise `RolloutError`.
        """
        self._check("release", "ready", "released")
        if not self._releasable:
            raise self._error(
                "release",
                "it was started without the means to; set "
                "actor_rollout_ref.rollout.take_turns=true, or build it with releasable=True",
            )
        if self._state == "ready":
            self._free()
            if self._state == "ready":  # not if another thread has closed the engine
                self._state = "released"

    def resume(self) -> None:
        """Make a released engine ready to generate again. Does nothing if it is not released."""
        self._check("resume", "ready", "released")
        if self._state == "released":
            self._get_back()
            if self._state == "released":
                self._state = "ready"

    def _free(self) -> None:
        """Free the device memory of a ready engine."""
        return

    def _get_back(self) -> None:
        """Take back what `_free` has freed."""
        return

    def close(self) -> None:
        """End the engine with its processes and files. A second call does nothing.

        Every other method then raises `RolloutError`.
        """
        self._state = "closed"

    def _check(self, method: str, *states: State) -> None:
        """Raise `RolloutError` unless the engine is in one of these states."""
        if self._state not in states:
            raise self._error(method, f"it is {self._state}; {_WHAT_TO_DO[self._state]}")

    def _check_generates(self, method: str, images: MultiModalRows | None = None) -> None:
        """Raise `RolloutError` unless the engine is ready, with weights of one version.

        An engine that computes images does not pass them here.
        """
        if images is not None:
            what = "generate from prompts with images; set rollout.name to hf"
            raise self._unable(what, "images")
        self._check(method, "ready")
        if self._unknown:
            raise self._error(
                method,
                "an update of its weights broke off, or a release dropped them, and "
                f"{min(self._unknown)!r} was not sent since; sync all weights first",
            )

    @contextmanager
    def _writing(
        self, stream: Iterable[tuple[str, Tensor]], version: int, names: Callable[[], Iterable[str]]
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield the stream of an update, of which each weight is written before the next is read.

        If it breaks off, some weights are new and some old: all of `names` must be sent again.
        """
        written: set[str] = set()

        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                yield name, tensor
                written.add(name)

        try:
            yield recorded()
        except BaseException:
            if written:
                self._unknown = frozenset(names())
            raise
        self._unknown -= written
        self._version = version

    def _error(self, method: str, problem: str) -> RolloutError:
        return RolloutError(
            f"rollout engine {self.name!r} on rank {rank()} cannot {method}: {problem}",
            engine=self.name,
            rank=rank(),
            method=method,
            version=self.version,
        )

    def _unable(self, what: str, setting: str) -> RolloutAbilityError:
        return RolloutAbilityError(
            f"rollout engine {self.name!r} cannot {what}", engine=self.name, setting=setting
        )


def check_weight(
    name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], *, part: str = ""
) -> None:
    """Raise `ModelError` unless a weight that was received has a place of its shape."""
    if name not in shapes:
        raise ModelError(
            f"received a weight {name!r}, which the rollout model does not have; trainer and "
            "rollout must load the same model folder"
        )
    if tuple(shapes[name]) != tuple(tensor.shape):
        raise ModelError(
            f"received weight {name!r} with shape {tuple(tensor.shape)}, but in the rollout "
            f"model{part} it has shape {tuple(shapes[name])}"
        )


def tensor_digest(tensor: Tensor) -> int:
    """Return a cheap digest of a tensor's bits, computed on the tensor's device.

    Equal dtypes and bits give equal digests. One changed element gives another digest, and so do
    two exchanged elements of up to 4 bytes. The digest detects mistakes, not deliberate forgery.
    """
    # Σ bits[i] · (2i + 1) modulo 2^64, plus the number of elements. For the int8 tensor 3 5 7:
    #
    #   element      3   5   7         5   3   7 (exchanged)     3   5   7   0 (longer)
    #   factor       1   3   5         1   3   5                 1   3   5   7
    #   sum + n      3 + 15 + 35 + 3   5 + 9 + 35 + 3            3 + 15 + 35 + 0 + 4
    #              = 56              = 52                      = 57
    #
    # An odd factor is invertible modulo 2^64, so changing one element always changes the sum.
    flat = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _DIGEST_CHUNK):
        chunk = flat[start : start + _DIGEST_CHUNK]
        bits = integer_bits(chunk)
        index = torch.arange(start, start + len(chunk), device=flat.device)
        total += (bits * (2 * index + 1)).sum()
    return int(total) + flat.numel()


def integer_bits(flat: Tensor) -> Tensor:
    """Return the bits of each element as an int64."""
    return flat.view(_BITS[flat.element_size()]).to(torch.int64)
