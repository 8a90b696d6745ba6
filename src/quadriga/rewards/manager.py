"""From answered prompts to scores a token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quadriga.errors import ConfigError, DataError, FieldError
from quadriga.protocol import DataProto
from quadriga.rewards.functions import FunctionRef, RewardFunction, reward_function_for
from quadriga.rewards.outcome import FAILURES, SCORED, Outcome, Sample, call
from quadriga.rewards.pool import RewardPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A sample that got no score: its row in the batch, its source, and what happened."""

    row: int
    data_source: str
    status: str
    detail: str


class RewardManager:
    """Scores batches with rule functions.

    `function` scores every row; None: each row is scored by the function of its `data_source`.
    With `num_processes` 0 the functions run here, one after the other, without a deadline: right
    for rules that take microseconds. Else they run in that many processes, where a sample has
    `timeout_s` seconds. A function that raises, hangs or crashes costs its own sample only, which
    scores 0 and is counted in `metrics` and described in `failures`, both of the last batch.
    `components` names numbers in the functions' dicts that go along as `reward_components` [B, K].
    """

    def __init__(
        self,
        tokenizer: Any,
        function: FunctionRef | RewardFunction | None = None,
        *,
        num_processes: int = 0,
        timeout_s: float = 10.0,
        components: Sequence[str] = (),
    ) -> None:
        if num_processes and function is not None and not isinstance(function, FunctionRef):
            raise ConfigError(
                "a reward pool finds its function by file and name: give load_reward_function"
                "(path, name), or set num_processes=0"
            )
        self.tokenizer = tokenizer
        self.function = function
        self.components = tuple(components)
        self.metrics: dict[str, float] = {}
        self.failures: list[Failure] = []
        self._pool = RewardPool(num_processes, timeout_s) if num_processes else None
        self._loaded: dict[FunctionRef, RewardFunction] = {}

    def check(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Raise `DataError` for the first item that could not be scored, before a run starts."""
        for item in items:
            try:
                self._ref(item.get("data_source"))
                _ground_truth(item.get("reward_model"))
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"row {item.get('index')} cannot be scored: {error}", row=item.get("index")
                ) from error

    def __call__(self, data: DataProto) -> DataProto:
        """`token_level_scores` [B, R] float32: a row's score at its last response token, else 0.

        Reads `responses`, `response_mask` [B, R] and the columns `reward_model`, `data_source`,
        `extra_info`. Raises `FieldError` when a column is missing, `UnknownNameError` when a
        data source has no function.
        """
        mask = data.batch["response_mask"]
        outcomes = self._score(self._samples(data, mask))
        self._report(outcomes, data)
        score_B = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        scores = {"token_level_scores": at_last_token(score_B, mask)}
        if self.components:
            scores["reward_components"] = self._components(outcomes)
        return DataProto.from_dict(scores)

    def close(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            self._pool.close()

    def _samples(self, data: DataProto, mask: torch.Tensor) -> list[Sample]:
        columns = data.non_tensor_batch
        if "reward_model" not in columns:
            raise FieldError(
                "rule rewards read reward_model.ground_truth, but the batch has no column "
                f"'reward_model'; it has {sorted(columns)}",
                field="reward_model",
            )
        empty = np.full(len(data), None)
        sources = columns.get("data_source", empty)
        infos = columns.get("extra_info", empty)
        texts = self._texts(data.batch["responses"], mask)
        samples = []
        for row, (text, source, info) in enumerate(zip(texts, sources, infos, strict=True)):
            try:
                truth = _ground_truth(columns["reward_model"][row])
            except TypeError as error:
                raise FieldError(f"row {row}: {error}", field="reward_model") from error
            samples.append(Sample(self._ref(source), str(source), text, truth, info))
        return samples

    def _texts(self, responses: torch.Tensor, mask: torch.Tensor) -> list[str]:
        ends = _ends(mask).tolist()
        ids = [row[:end] for row, end in zip(responses.tolist(), ends, strict=True)]
        return list(self.tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _ref(self, data_source: Any) -> FunctionRef:
        if self.function is None:
            return reward_function_for(data_source)
        if isinstance(self.function, FunctionRef):
            return self.function
        ref = FunctionRef("", getattr(self.function, "__name__", "reward"))
        self._loaded[ref] = self.function
        return ref

    def _score(self, samples: list[Sample]) -> list[Outcome]:
        if self._pool is not None:
            return self._pool.run(samples)
        for sample in samples:
            if sample.function not in self._loaded:
                self._loaded[sample.function] = sample.function.load()
        return [call(self._loaded[sample.function], sample) for sample in samples]

    def _components(self, outcomes: list[Outcome]) -> torch.Tensor:
        """[B, K] float32: the named numbers that functions returned beside the score.

        A sample that got no score has 0 throughout. Raises `FieldError` for a name that a
        function did not return.
        """
        rows = []
        for outcome in outcomes:
            missing = [n for n in self.components if not isinstance(outcome.extra.get(n), float)]
            if missing and outcome.status == SCORED:
                raise FieldError(
                    f"algorithm.reward_components names {missing}, but the reward function "
                    f"returned {sorted(outcome.extra)} beside its score; return a dict with "
                    "'score' and one number for each component",
                    field=missing[0],
                )
            rows.append([0.0 if missing else float(outcome.extra[n]) for n in self.components])
        return torch.tensor(rows, dtype=torch.float32).reshape(len(outcomes), len(self.components))

    def _report(self, outcomes: list[Outcome], data: DataProto) -> None:
        sources = data.non_tensor_batch.get("data_source", [None] * len(outcomes))
        self.failures = [
            Failure(row, str(sources[row]), outcome.status, outcome.detail)
            for row, outcome in enumerate(outcomes)
            if outcome.status != SCORED
        ]
        counts = Counter(outcome.status for outcome in outcomes)
        self.metrics = {f"reward/{status}": float(counts[status]) for status in FAILURES}
        self.metrics |= _mean_extras(outcomes)
        if self.failures:
            first = self.failures[0]
            _log.warning(
                "%d of %d samples got no score and count as 0; the first is row %d (%s), %s: %s",
                len(self.failures),
                len(outcomes),
                first.row,
                first.data_source,
                first.status.replace("_", " "),
                first.detail,
            )


def at_last_token(score_B: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """[B, R] float32: `score_B` where `mask_BR` has its last 1, else 0; all 0 without a 1."""
    scores_BR = torch.zeros(mask_BR.shape, dtype=torch.float32)
    last_B = (_ends(mask_BR) - 1).clamp(min=0)
    scores_BR[torch.arange(len(mask_BR)), last_B] = score_B
    return scores_BR * mask_BR


def _ends(mask_BR: torch.Tensor) -> torch.Tensor:
    """One past the last 1 of each row, [B] int64."""
    places_R = torch.arange(1, mask_BR.shape[1] + 1, device=mask_BR.device)
    return (mask_BR.bool() * places_R).amax(dim=-1)


def _ground_truth(reward_model: Any) -> Any:
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise TypeError(f"no ground_truth in reward_model, which is {reward_model!r:.80}")
    return reward_model["ground_truth"]


def _mean_extras(outcomes: list[Outcome]) -> dict[str, float]:
    """The mean of each number that functions returned beside the score."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.extra.items():
            if isinstance(value, float):
                values.setdefault(name, []).append(value)
    return {f"reward/extra/{name}": float(np.mean(found)) for name, found in values.items()}
