"""A rollout engine that computes by the naive reference, with declared limits and injected faults.

It satisfies the rollout laws without a fault. With a fault it shows what the code around an engine
does when the engine fails.

Shapes: B rows, R response columns.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quadriga.errors import ModelError, RolloutAbilityError, RolloutError
from quadriga.models.loading import load_tokenizer
from quadriga.rollout.abilities import ALL_SETTINGS, RolloutAbilities
from quadriga.rollout.base import FinishReason, RolloutOutput, SamplingParams, tensor_digest
from quadriga.rollout.requests import check_request, check_sequences
from quadriga.testing.rollout_reference import NaiveModel, completes, distribution

Fault = Literal[
    "dies",
    "fails",
    "wedges",
    "slow",
    "wrong version",
    "missing row",
    "empty response",
    "id outside the vocabulary",
    "nan log-probability",
    "gap in the mask",
    "token behind the end",
    "wrong finish reason",
    "weight left out",
]
"""A fault of `FakeRollout`.

- `dies`: the connection is reset, in this call and in every later one.
- `fails`: the call raises an error of the engine's library.
- `wedges`: the call does not return before `close`.
- `slow`: the call takes `delay` seconds more; its answer is right.
- `weight left out`: an update leaves one weight as it was, and the version is the new one.
- The others change the output of a call.
"""

WINDOW = 128
"""Tokens of a sequence, as in the reference model."""


class FakeRollout:
    """A `RolloutEngine` in this process, one token of one row at a time.

    Args:
        folder: the folder of the model.
        abilities: what the engine declares and can do; None: everything.
        fault: what goes wrong; None: nothing.
        after: the number of calls of `generate` before the fault appears.
        delay: seconds, for the fault `slow`.
    """

    name = "fake"

    def __init__(
        self,
        folder: str,
        *,
        abilities: RolloutAbilities | None = None,
        fault: Fault | None = None,
        after: int = 0,
        delay: float = 0.0,
    ) -> None:
        self._model = NaiveModel(folder)
        self._tokenizer = load_tokenizer(folder)
        self.abilities = abilities or full_abilities(self._model.vocabulary)
        self.version = -1
        self._fault, self._after, self._delay = fault, after, delay
        self._calls = 0
        self._state: Literal["ready", "released", "closed"] = "ready"
        self._closed = threading.Event()
        self._unseeded = random.Random(0)
        self._distributions: dict[tuple[tuple[int, ...], SamplingParams, int], list[float]] = {}

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        self._check_ready("generate")
        check_request(self.name, self.abilities, prompt_ids, attention_mask, sampling, sample_seeds)
        self._calls += 1
        self._fail_before_the_answer()
        count, width = len(prompt_ids), sampling.max_new_tokens
        ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(count, width, dtype=torch.int64)
        log_probs = torch.zeros(count, width)
        reasons: list[FinishReason] = []
        for row in range(count):
            prompt = prompt_ids[row, attention_mask[row].bool()].tolist()
            response, of_row, reason = self._row(prompt, sampling, int(sample_seeds[row]))
            ids[row, : len(response)] = torch.tensor(response)
            mask[row, : len(response)] = 1
            log_probs[row, : len(response)] = torch.tensor(of_row)
            reasons.append(reason)
        versions = torch.full((count,), self.version, dtype=torch.int64)
        return self._faulty(RolloutOutput(ids, mask, log_probs, tuple(reasons), versions))

    def _row(
        self, prompt: list[int], sampling: SamplingParams, seed: int
    ) -> tuple[list[int], list[float], FinishReason]:
        """Return the tokens of one response, their log-probabilities, and why it ended."""
        numbers = random.Random(seed) if self.abilities.seeded else self._unseeded
        response: list[int] = []
        log_probs: list[float] = []
        while len(response) < sampling.max_new_tokens:
            logits = self._model.logits((*prompt, *response))[-1]
            probs = self._probs(logits, sampling, (*prompt, *response), len(response))
            token = _drawn(probs, numbers.random())
            log_probs.append(self._log_prob(logits, probs, token, sampling))
            response.append(token)
            if token in sampling.end_token_ids or self._completes(response, sampling):
                return response, log_probs, "stop"
        return response, log_probs, "length"

    def _probs(
        self, logits_V: Tensor, sampling: SamplingParams, tokens: tuple[int, ...], position: int
    ) -> list[float]:
        """Return the distribution behind `tokens`. It is kept, because many rows begin equally."""
        key = (tokens, sampling, position)
        if key not in self._distributions:
            order = self.abilities.filter_order
            self._distributions[key] = distribution(logits_V, sampling, position, order)
        return self._distributions[key]

    def _log_prob(
        self, logits_V: Tensor, probs: Sequence[float], token: int, sampling: SamplingParams
    ) -> float:
        if sampling.log_probs == "sampled":
            return math.log(probs[token])
        unscaled = sampling.greedy or sampling.log_probs == "temperature_1"
        return float((logits_V / (1.0 if unscaled else sampling.temperature)).log_softmax(0)[token])

    def _completes(self, response: list[int], sampling: SamplingParams) -> bool:
        if not sampling.stop_strings or len(response) < sampling.min_new_tokens:
            return False
        before, now = self._text(response[:-1]), self._text(response)
        return completes(before, now, sampling.stop_strings)

    def _text(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        self._check_ready("score")
        check_sequences(self.name, self.abilities, ids, attention_mask)
        scores = torch.zeros(ids.shape)
        for row, valid in enumerate(attention_mask.bool()):
            scores[row, valid] = self._model.scores(ids[row, valid].tolist())
        return scores

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._check_open("update_weights")
        weights = dict(stream)
        own = self._model.weights()
        for name, tensor in weights.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ModelError(
                    f"received weight {name!r} with shape {tuple(tensor.shape)}, but the model has "
                    f"{tuple(own[name].shape) if name in own else 'no weight of this name'}"
                )
        if self._fault == "weight left out":
            weights.pop(next(iter(weights)))
        self._model.load(weights)
        self._distributions.clear()
        self.version = version

    def weights_digest(self) -> dict[str, int]:
        self._check_open("weights_digest")
        if not self.abilities.exposes_weights:
            raise RolloutAbilityError(
                f"rollout engine {self.name!r} does not expose its weights; compare scores",
                engine=self.name,
                setting="weights_digest",
            )
        return {name: tensor_digest(t) for name, t in self._model.weights().items()}

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        self._check_open("weight_dtypes")
        return {name: t.dtype for name, t in self._model.weights().items()}

    def release(self) -> None:
        self._check_open("release")
        self._state = "released"

    def resume(self) -> None:
        self._check_open("resume")
        self._state = "ready"

    def close(self) -> None:
        self._state = "closed"
        self._closed.set()

    def _check_ready(self, method: str) -> None:
        self._check_open(method)
        if self._state == "released":
            raise RolloutError(f"rollout engine 'fake': {method} while released; call resume first")

    def _check_open(self, method: str) -> None:
        if self._state == "closed":
            raise RolloutError(f"rollout engine 'fake': {method} after close; build a new engine")

    @property
    def _is_faulty(self) -> bool:
        return self._calls > self._after

    def _fail_before_the_answer(self) -> None:
        if not self._is_faulty:
            return
        if self._fault == "dies":
            raise ConnectionResetError("the engine's process has ended")
        if self._fault == "fails":
            raise ArithmeticError("an error of the engine's library")
        if self._fault == "wedges":
            self._closed.wait()
            self._check_open("generate")
        if self._fault == "slow":
            self._closed.wait(self._delay)

    def _faulty(self, out: RolloutOutput) -> RolloutOutput:
        """Return the output with the fault in its last row."""
        if not self._is_faulty or not len(out.response_ids):
            return out
        last = int(out.response_mask[-1].sum()) - 1
        if self._fault == "wrong version":
            out.weight_versions[-1] += 1
        if self._fault == "missing row":
            return _without_last_row(out)
        if self._fault == "empty response":
            out.response_mask[-1] = 0
        if self._fault == "id outside the vocabulary":
            out.response_ids[-1, last] = self.abilities.vocabulary
        if self._fault == "nan log-probability":
            out.rollout_log_probs[-1, last] = math.nan
        if self._fault == "gap in the mask":
            out.response_mask[-1, 0] = 0
        if self._fault == "token behind the end":
            out.response_ids[-1, -1] += 1
        if self._fault == "wrong finish reason":
            return _with_other_reason(out)
        return out


def _without_last_row(out: RolloutOutput) -> RolloutOutput:
    return replace(
        out,
        response_ids=out.response_ids[:-1],
        response_mask=out.response_mask[:-1],
        rollout_log_probs=out.rollout_log_probs[:-1],
        finish_reason=out.finish_reason[:-1],
        weight_versions=out.weight_versions[:-1],
    )


def _with_other_reason(out: RolloutOutput) -> RolloutOutput:
    flipped: FinishReason = "length" if out.finish_reason[-1] == "stop" else "stop"
    return replace(out, finish_reason=(*out.finish_reason[:-1], flipped))


def full_abilities(vocabulary: int) -> RolloutAbilities:
    """Return the declaration of an engine that can do everything."""
    return RolloutAbilities(
        vocabulary=vocabulary,
        window=WINDOW,
        log_probs={"policy": "always", "sampled": "always", "temperature_1": "always"},
        settings=ALL_SETTINGS,
        filter_order="top_k, top_p, min_p",
        seeded=True,
        batch_invariant=True,
        exposes_weights=True,
    )


def _drawn(probs: Sequence[float], number: float) -> int:
    """Return the first token whose cumulative probability is above a number in [0, 1)."""
    total = 0.0
    for token, p in enumerate(probs):
        total += p
        if p and number < total:
            return token
    return max(range(len(probs)), key=probs.__getitem__)
