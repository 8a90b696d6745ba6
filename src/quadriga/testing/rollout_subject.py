"""A rollout engine under test: its requests, and its responses against the reference.

Shapes: B rows, P prompt columns, R response columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor

from quadriga.models.loading import load_tokenizer
from quadriga.rollout.base import RolloutEngine, RolloutOutput, SamplingParams
from quadriga.testing.laws import LawBroken, expect
from quadriga.testing.rollout_reference import NaiveModel, completes, distribution

BuildRollout = Callable[[str], RolloutEngine]
"""Builds an engine in float32 on the model of a folder."""

Prompts = Sequence[tuple[int, ...]]

# Different lengths; rows 0, 2 and 5 have the same prompt. Some neighbours would be one token if
# their text were tokenized again, so an engine that does so is found.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (84, 83, 74),
    (200,),
    (84, 83, 74),
    (70, 71, 72, 73, 210, 150, 33),
    (90, 91, 92, 93, 94),
    (84, 83, 74),
)
SAMPLING = SamplingParams(
    max_new_tokens=12, eos_token_ids=tuple(range(20, 60)), pad_token_id=0, temperature=1.0
)
LEFT_COLUMNS = 2
"""Columns of padding in front of the longest prompt."""


class RolloutUnderTest:
    """An engine on the model of a folder, and the reference for that model.

    Args:
        build: builds the engine.
        folder: a model of `write_reference_model`.
        tolerance: the largest difference of a log-probability, nats.
    """

    def __init__(self, build: BuildRollout, folder: str, *, tolerance: float = 1e-4) -> None:
        self.folder = folder
        self.tolerance = tolerance
        self.reference = NaiveModel(folder)
        self.original = self.reference.weights()
        self.tokenizer = load_tokenizer(folder)
        self._build = build
        self._engine: RolloutEngine | None = None

    @property
    def engine(self) -> RolloutEngine:
        """The engine. It is built at the first use and after `close`."""
        if self._engine is None:
            self._engine = self._build(self.folder)
        return self._engine

    def close(self) -> None:
        """Close the engine. The next use builds another one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> RolloutUnderTest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        sampling: SamplingParams,
        prompts: Prompts = PROMPTS,
        seeds: Sequence[int] | None = None,
    ) -> RolloutOutput:
        """Generate a response for each prompt. Without `seeds`: 100, 101 and so on."""
        ids, mask = left_padded(prompts)
        seeds = range(100, 100 + len(prompts)) if seeds is None else seeds
        return self.engine.generate(ids, mask, sampling, torch.tensor(list(seeds)).long())

    def possible(self, sampling: SamplingParams) -> SamplingParams:
        """Return `sampling` with a kind of log-probabilities that the engine can give."""
        abilities = self.engine.abilities
        choices = [replace(sampling, log_probs=kind) for kind in abilities.log_probs]
        able = [choice for choice in choices if abilities.gives_log_probs(choice)]
        return able[0] if able else sampling

    def refuses(self, sampling: SamplingParams) -> bool:
        """Return whether the engine declares that it cannot do this."""
        abilities, default = self.engine.abilities, SAMPLING
        changed = {name for name in _SETTINGS if getattr(sampling, name) != getattr(default, name)}
        return not changed <= abilities.settings or not abilities.gives_log_probs(sampling)

    def token_probs(
        self, sampling: SamplingParams, prompt: Sequence[int], response: Sequence[int]
    ) -> list[list[float]]:
        """Return the probabilities from which the reference draws each token of a response."""
        logits = self.reference.logits((*prompt, *response))[len(prompt) - 1 : -1]
        order = self.engine.abilities.filter_order
        return [distribution(row, sampling, t, order) for t, row in enumerate(logits)]

    def log_probs(
        self, sampling: SamplingParams, prompt: Sequence[int], response: Sequence[int]
    ) -> list[float]:
        """Return the reference's log-probabilities of a response, of the requested kind."""
        if sampling.log_probs == "sampled":
            probs = self.token_probs(sampling, prompt, response)
            return [
                math.log(p[token]) if p[token] else -math.inf
                for p, token in zip(probs, response, strict=True)
            ]
        unscaled = sampling.greedy or sampling.log_probs == "temperature_1"
        logits = self.reference.logits((*prompt, *response))[len(prompt) - 1 : -1].double()
        log_p = (logits / (1.0 if unscaled else sampling.temperature)).log_softmax(-1)
        found: list[float] = log_p.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
        return found

    def end_of(self, sampling: SamplingParams, response: Sequence[int]) -> int | None:
        """Return after how many tokens a response ends with a stop; None if it does not."""
        for count in range(1, len(response) + 1):
            if response[count - 1] in sampling.end_token_ids:
                return count
            if count >= sampling.min_new_tokens and self._completes(sampling, response[:count]):
                return count
        return None

    def _completes(self, sampling: SamplingParams, response: Sequence[int]) -> bool:
        before, now = self.text(response[:-1]), self.text(response)
        return completes(before, now, sampling.stop_strings)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def greedy_response(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """Return the most likely tokens by the reference, up to the end of the response."""
        tokens: list[int] = []
        while len(tokens) < sampling.max_new_tokens and self.end_of(sampling, tokens) is None:
            logits = self.reference.logits((*prompt, *tokens))[-1]
            probs = distribution(logits, sampling, len(tokens), self.engine.abilities.filter_order)
            tokens.append(max(range(len(probs)), key=probs.__getitem__))
        return tokens

    def check(
        self, sampling: SamplingParams, out: RolloutOutput, prompts: Prompts = PROMPTS
    ) -> list[list[int]]:
        """Compare every row with the reference and return the responses without padding."""
        count, width = len(prompts), sampling.max_new_tokens
        check_tensor(out.response_ids, (count, width), torch.int64, "response_ids")
        check_tensor(out.response_mask, (count, width), torch.int64, "response_mask")
        check_tensor(out.rollout_log_probs, (count, width), torch.float32, "rollout_log_probs")
        check_tensor(out.weight_versions, (count,), torch.int64, "weight_versions")
        expect(len(out.finish_reason), count, "number of finish reasons")
        expect(out.weight_versions.tolist(), [self.engine.version] * count, "weight versions")
        return [self._check_row(sampling, out, row, prompts[row]) for row in range(count)]

    def _check_row(
        self, sampling: SamplingParams, out: RolloutOutput, row: int, prompt: Sequence[int]
    ) -> list[int]:
        width, where = sampling.max_new_tokens, f"row {row}, {_changed(sampling)}"
        length = int(out.response_mask[row].sum())
        ids: list[int] = out.response_ids[row].tolist()
        response = ids[:length]
        ones = [1] * length + [0] * (width - length)
        expect(out.response_mask[row].tolist(), ones, f"{where}: response mask")
        expect(ids[length:], [sampling.pad_token_id] * (width - length), f"{where}: padding")
        expect(out.rollout_log_probs[row, length:].any().item(), False, f"{where}: padding is 0")
        end = self.end_of(sampling, response)
        expect((end or width), length, f"{where}: tokens up to the end of {response}")
        reason = "length" if end is None else "stop"
        expect(out.finish_reason[row], reason, f"{where}: finish reason of {response}")
        if sampling.greedy:
            expect(response, self.greedy_response(prompt, sampling), f"{where}: greedy tokens")
        probs = self.token_probs(sampling, prompt, response)
        excluded = [token for p, token in zip(probs, response, strict=True) if not p[token]]
        expect(excluded, [], f"{where}: tokens that the filters exclude")
        found: list[float] = out.rollout_log_probs[row, :length].tolist()
        self.close_to(found, self.log_probs(sampling, prompt, response), f"{where}: log-probs")
        return response

    def close_to(self, found: Sequence[float], expected: Sequence[float], what: str) -> None:
        """Raise `LawBroken` unless log-probabilities agree within the tolerance."""
        pairs = list(zip(found, expected, strict=True))
        worst = max((abs(a - b) if math.isfinite(a) else math.inf for a, b in pairs), default=0.0)
        if worst > self.tolerance:
            raise LawBroken(
                f"{what} differ by {worst:.3g} nats (at most {self.tolerance} are allowed): "
                f"expected {[round(x, 5) for x in expected]}, got {[round(x, 5) for x in found]}"
            )


_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_new_tokens",
    "stop_token_ids",
    "stop_strings",
    "ignore_eos",
    "excluded_token_ids",
)


def left_padded(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, P] int64, with `LEFT_COLUMNS` columns of padding in every row."""
    width = LEFT_COLUMNS + max((len(prompt) for prompt in prompts), default=0)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        if prompt:
            ids[row, -len(prompt) :] = torch.tensor(prompt)
            mask[row, -len(prompt) :] = 1
    return ids, mask


def check_tensor(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
    """Raise `LawBroken` unless a tensor has this shape and dtype and is on the CPU."""
    expect(tuple(tensor.shape), tuple(shape), f"shape of {what}")
    expect(tensor.dtype, dtype, f"dtype of {what}")
    expect(tensor.device.type, "cpu", f"device of {what}")


def _changed(sampling: SamplingParams) -> str:
    names = (*_SETTINGS, "log_probs")
    return (
        ", ".join(
            f"{name}={getattr(sampling, name)!r}"
            for name in names
            if getattr(sampling, name) != getattr(SAMPLING, name)
        )
        or "default settings"
    )
