"""Score the responses of a batch with rule functions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.config.convert import build
from quadriga.config.paths import PROGRAM
from quadriga.config.schema import FailurePolicy, RewardConfig
from quadriga.config.secrets import mask_secrets
from quadriga.containment import contained
from quadriga.errors import ConfigError, DataError, FieldError, InputError, RewardError
from quadriga.protocol import DataProto, fields
from quadriga.rewards.functions import (
    ABSTAINED,
    BUILT_IN,
    FAILURES,
    FAST,
    GIVEN,
    LARGEST,
    MARKED_ANSWER,
    RAISED,
    SCORED,
    FunctionRef,
    Outcome,
    RewardFunction,
    Sample,
    Status,
    call,
    call_batch,
    checked_score,
    form_of,
    load_reward_function,
    marked_answer,
    reward_function_for,
)
from quadriga.rewards.pool import RewardPool, Start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

LOST_BATCHES = 3
"""So many calls in a row without any score end the run, if `batch_rows` is not known."""

_READ = (fields.DATA_SOURCE, fields.REWARD_MODEL, fields.EXTRA_INFO, fields.COLUMNS)


@dataclass(frozen=True)
class _PartSettings:
    """The settings of an entry of `reward.parts`."""

    weight: float = 1.0
    path: str | None = None  # None: the function of the row's data source
    name: str = "compute_score"


@dataclass(frozen=True)
class RewardPart:
    """One part of the score.

    Attributes:
        name: under which its score is logged; "" for the only part, which is not logged by itself.
        function: None: the function of the row's data source.
    """

    name: str
    weight: float
    function: FunctionRef | RewardFunction | None


def parts_of(settings: RewardConfig) -> tuple[RewardPart, ...]:
    """Return the parts that the settings describe: one, unless `reward.parts` names several.

    Raises:
        ConfigError: a part is not a mapping of `weight`, `path` and `name`, or `reward.path` is set
            beside `reward.parts`.
        InputError: a function cannot be loaded.
    """
    if not settings.parts:
        return (RewardPart("", 1.0, _function(settings, settings.path, settings.name)),)
    if settings.path is not None:
        raise ConfigError(
            "reward.path and reward.parts both say what scores a response; move the path into a "
            "part: reward.parts={own: {path: …}}",
            key="reward.parts",
        )
    parts = []
    for name, value in settings.parts.items():
        key = f"reward.parts.{name}"
        part = build(_PartSettings, value, prefix=f"{key}.")
        if part.path is None and "name" in value:
            raise ConfigError(
                f"{key}.name selects a function in the file {key}.path, which is not set", key=key
            )
        parts.append(RewardPart(name, part.weight, _function(settings, part.path, part.name)))
    return tuple(parts)


def _function(
    settings: RewardConfig, path: str | None, name: str
) -> FunctionRef | RewardFunction | None:
    if path == PROGRAM and name in GIVEN and not settings.num_processes:
        return GIVEN[name]  # the object itself, with what it refers to
    return load_reward_function(path, name) if path else None


def combined(parts: Sequence[RewardPart], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a response from the outcomes of its parts.

    The scores of the parts are its `extra` under their names, and what a part has returned besides
    is there as `part/key`. If a part fails, or all abstain, the response has no score.
    """
    pairs = [pair for pair in zip(parts, outcomes, strict=True) if pair[1].status != ABSTAINED]
    if not pairs:
        return Outcome(RAISED, detail=outcomes[0].detail)
    if len(parts) == 1 and not parts[0].name:
        return outcomes[0]
    for part, outcome in pairs:
        if outcome.status != SCORED:
            return Outcome(outcome.status, detail=f"{part.name}: {outcome.detail}")
    extra: dict[str, float | str] = {part.name: outcome.score for part, outcome in pairs}
    for part, outcome in pairs:
        extra |= {f"{part.name}/{key}": value for key, value in outcome.extra.items()}
    try:
        score = checked_score(sum(part.weight * outcome.score for part, outcome in pairs))
    except ValueError as error:
        return Outcome(RAISED, detail=f"the weighted sum of the parts: {error}")
    return Outcome(SCORED, score, extra)


@dataclass(frozen=True)
class Failure:
    """A sample without a score: its row in the batch, its data source, and what happened."""

    row: int
    data_source: str
    status: Status
    detail: str

    def __str__(self) -> str:
        source = f" ({self.data_source})" if self.data_source else ""
        return f"row {self.row}{source}, {self.status.replace('_', ' ')}"


class RewardManager:
    """Scores batches with rule functions.

    A function that raises, hangs or crashes affects only its own sample, which is counted in
    `metrics` and described in `failures`. What its score is depends on `on_failure`.

    Args:
        tokenizer: decodes the responses; None: only `score_texts` is called.
        function: scores every row; None: each row is scored by the function of its `data_source`.
            A tuple of `RewardPart`s: several functions with weights.
        num_processes: 0: functions are called in this process, one after the other and without a
            deadline. Above 0: they are called in that many processes, with a deadline per sample.
            Fast built-in functions are called in this process in both cases.
        timeout_s: the deadline of a sample in seconds, with processes.
        memory_gb: GiB that one process may allocate; None: no limit.
        on_failure: "zero": the score of a failed sample is 0; "mask": it is 0, and the row is in
            `masked_rows`; "fail": the call raises.
        components: keys of the dicts that the functions return. Their numbers become the field
            `reward_components` [B, K].
        start: starts a process; None: on this machine.

    Attributes:
        metrics: of the last batch; `reward/failed` is the share of samples without a score.
        failures: of the last batch.
        masked_rows: rows of the last batch that must take no part in the update.
        answers: the answers that the responses of the last batch give, None where there is none.
        outcomes: of the last batch, one per row.
        batch_rows: samples of a training step; 0: not known. A step without any score ends the run.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        function: FunctionRef | RewardFunction | tuple[RewardPart, ...] | None = None,
        *,
        num_processes: int = 0,
        timeout_s: float = 10.0,
        memory_gb: float | None = None,
        on_failure: FailurePolicy = "zero",
        components: Sequence[str] = (),
        start: Start | None = None,
    ) -> None:
        parts = function if isinstance(function, tuple) else (RewardPart("", 1.0, function),)
        if num_processes and any(not isinstance(p.function, FunctionRef | None) for p in parts):
            raise ConfigError(
                "a reward pool loads its function by file and name: pass "
                "load_reward_function(path, name), or set num_processes=0"
            )
        self.tokenizer = tokenizer
        self.parts = parts
        self.on_failure = on_failure
        self.components = tuple(components)
        self.metrics: dict[str, float] = {}
        self.failures: list[Failure] = []
        self.masked_rows: list[int] = []
        self.answers: list[str | None] = []
        self.outcomes: list[Outcome] = []
        self._without_score = 0  # samples in a row without any score
        self.batch_rows = 0
        pool = RewardPool(num_processes, timeout_s, memory_gb, start) if num_processes else None
        self._pool = pool
        self._loaded: dict[FunctionRef, RewardFunction] = {}
        # The function of each part; None: the function of the row's data source. A function that
        # was passed as an object gets a reference that is never loaded, since it is in `_loaded`.
        self._parts_refs: list[FunctionRef | None] = []
        for number, part in enumerate(parts):
            function = part.function
            if not isinstance(function, FunctionRef | None):
                name = getattr(function, "__name__", "reward")
                ref = FunctionRef(str(number), name, form_of(function, repr(name)))
                self._loaded[ref], function = function, ref
            self._parts_refs.append(function)

    @classmethod
    def from_settings(
        cls,
        settings: RewardConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        components: Sequence[str] = (),
        start: Start | None = None,
    ) -> RewardManager:
        """Return the manager that the settings `reward.*` describe."""
        return cls(
            tokenizer, parts_of(settings), num_processes=settings.num_processes,
            timeout_s=settings.timeout_s, memory_gb=settings.memory_gb,
            on_failure=settings.on_failure, components=components, start=start,
        )  # fmt: skip

    @property
    def reads_columns(self) -> bool:
        """Whether a function takes columns of the data by their names."""
        return any(ref is not None and ref.form.kind != "row" for ref in self._parts_refs)

    def check(self, items: Iterable[Mapping[str, object]], files: Sequence[str] = ()) -> None:
        """Raise `DataError`, naming the files, for the first item of a dataset that cannot be
        scored.

        An item needs a `data_source` that has a function, unless a function of the user scores all
        rows; and a ground truth, if a built-in function scores it. Raises `InputError` if a
        built-in function needs a package that is not installed.
        """
        loaded: set[FunctionRef] = set()
        for item in items:
            try:
                refs = self._refs(item.get(fields.DATA_SOURCE))
                for ref in refs:
                    _sample(ref, "", _read(item))
            except (KeyError, TypeError) as error:
                row = item.get(fields.INDEX)
                named = f"{', '.join(files)}: " if files else ""
                problem = error if isinstance(error, InputError) else error.args[0]
                raise DataError(f"{named}row {row} cannot be scored: {problem}", row=row) from error
            for ref in (BUILT_IN & set(refs)) - loaded:
                ref.load()
                loaded.add(ref)

    def __call__(self, data: DataProto) -> DataProto:
        """Score a batch.

        Reads `responses` and `response_mask` [B, R], and the object arrays `reward_model`,
        `data_source`, `extra_info` and `columns`. A function of the user may need none of them.

        Returns:
            `token_level_scores` [B, R] float32: the score of a row at its last response token, 0
            elsewhere; `reward_components` [B, K] float32 if `components` are set; and the numbers
            that functions returned beside their scores, `reward_extra` [B] of dicts.

        Raises:
            FieldError: a row of a built-in function has no ground truth, or a function did not
                return a component.
            UnknownNameError: a data source has no function.
            RewardError: a sample failed and `on_failure` is "fail", or all samples of a step
                failed.
        """
        mask = data.batch[fields.RESPONSE_MASK]
        arrays = data.non_tensor_batch
        empty = np.full(len(data), None)
        rows = zip(*(arrays.get(key, empty) for key in _READ), strict=True)
        texts = self._texts(data.batch[fields.RESPONSES], mask)
        outcomes = self._outcomes(texts, rows)
        score_B = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float32)
        score_BR = add_to_last_token(torch.zeros(mask.shape), mask, score_B)
        scores = {fields.TOKEN_LEVEL_SCORES: score_BR}
        if self.components:
            scores[fields.REWARD_COMPONENTS] = reward_components(outcomes, self.components)
        return DataProto.from_dict(scores, non_tensors=numbers_beside(outcomes))

    def score_texts(
        self, texts: Sequence[str], rows: Sequence[Mapping[str, object]]
    ) -> list[Outcome]:
        """Score responses that are texts already.

        Args:
            rows: for each text the row of the data, with `data_source`, `reward_model`,
                `extra_info` and `columns` where the function reads them.

        Raises:
            As a call with a batch.
        """
        return self._outcomes(texts, map(_read, rows))

    def close(self) -> None:
        """End the processes of the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()

    def _outcomes(self, texts: Sequence[str], rows: Iterable[Sequence[object]]) -> list[Outcome]:
        """Score texts, and set the attributes of the last batch."""
        samples = []  # all parts of row 0, then of row 1, …
        for row, (text, read) in enumerate(zip(texts, rows, strict=True)):
            for ref in self._refs(read[0]):
                try:
                    samples.append(_sample(ref, text, read))
                except TypeError as error:
                    raise FieldError(f"row {row}: {error}", field=fields.REWARD_MODEL) from error
        scored, count = self._score(samples), len(self.parts)
        own = [slice(start, start + count) for start in range(0, len(samples), count)]
        self.outcomes = outcomes = [combined(self.parts, scored[part]) for part in own]
        self._report(outcomes, [sample.data_source for sample in samples[::count]])
        self.answers = [first_answer(samples[part], scored[part]) for part in own]
        return outcomes

    def _texts(self, responses: torch.Tensor, mask: torch.Tensor) -> list[str]:
        """Decode each response up to the last 1 of its mask."""
        assert self.tokenizer is not None, "a manager without a tokenizer scores texts only"
        ends = _ends(mask).tolist()
        ids = [row[:end] for row, end in zip(responses.tolist(), ends, strict=True)]
        return list(self.tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _refs(self, data_source: object) -> list[FunctionRef]:
        """Return the function of each part for a row."""
        return [ref or reward_function_for(data_source) for ref in self._parts_refs]

    def _score(self, samples: list[Sample]) -> list[Outcome]:
        """Score the samples of batch functions and of fast functions in this process, and all
        others in the pool."""
        found: dict[int, Outcome] = {}
        batches: dict[FunctionRef, list[int]] = {}
        for number, sample in enumerate(samples):
            if sample.function.form.kind == "batch":
                batches.setdefault(sample.function, []).append(number)
            elif self._pool is None or sample.function in FAST:
                found[number] = self._score_here(sample)
        for ref, numbers in batches.items():
            with contained():
                scored = call_batch(self._function(ref), [samples[number] for number in numbers])
            found |= zip(numbers, scored, strict=True)
        left = [number for number in range(len(samples)) if number not in found]
        if self._pool is not None and left:
            scored = self._pool.run([samples[number] for number in left])
            found |= zip(left, scored, strict=True)
        return [found[number] for number in range(len(samples))]

    def _function(self, ref: FunctionRef) -> RewardFunction:
        if ref not in self._loaded:
            self._loaded[ref] = ref.load()
        return self._loaded[ref]

    def _score_here(self, sample: Sample) -> Outcome:
        function = self._function(sample.function)
        with nullcontext() if sample.function in FAST else contained():
            return call(function, sample)

    def _report(self, outcomes: list[Outcome], sources: Sequence[str]) -> None:
        """Set `metrics`, `failures` and `masked_rows`; log the first failure, or raise for it."""
        self.failures = [
            Failure(row, sources[row], outcome.status, mask_secrets(outcome.detail))
            for row, outcome in enumerate(outcomes)
            if outcome.status != SCORED
        ]
        masks = self.on_failure == "mask"
        self.masked_rows = [failure.row for failure in self.failures] if masks else []
        counts = Counter(outcome.status for outcome in outcomes)
        self.metrics = {f"reward/{status}": float(counts[status]) for status in FAILURES}
        self.metrics["reward/failed"] = len(self.failures) / max(1, len(outcomes))
        self.metrics["reward/masked"] = float(len(self.masked_rows))
        self.metrics |= mean_extras(outcomes)
        if not self.failures:
            self._without_score = 0
            return
        lost = len(self.failures) == len(outcomes)
        self._without_score = self._without_score + len(outcomes) if lost else 0
        count = f"{len(self.failures)} of {len(outcomes)} samples have no score"
        if self.on_failure == "fail":
            raise self._error(count, ", or set reward.on_failure to zero or mask")
        # One sample alone says little about the function, also if it is all of a step.
        self.check_any(max(self.batch_rows, 2) if self.batch_rows else LOST_BATCHES * len(outcomes))
        first = self.failures[0]
        consequence = "are left out of the update" if masks else "count as 0"
        _log.warning("%s and %s; the first is %s: %s", count, consequence, first, first.detail)

    def check_any(self, samples: int) -> None:
        """Raise `RewardError` if none of the last `samples` samples has a score, with the first
        failure of the last call. A caller that knows that they are all calls it."""
        if samples and self._without_score >= samples:
            raise self._error(f"none of the last {self._without_score} samples has a score")

    def _error(self, problem: str, hint: str = "") -> RewardError:
        first = self.failures[0]
        return RewardError(
            f"{problem}; the first is {first}: {first.detail}. Correct the reward function{hint}",
            row=first.row,
            data_source=first.data_source,
            status=first.status,
        )


def _ends(mask_BR: torch.Tensor) -> torch.Tensor:
    """Return the position after the last 1 of each row, [B] int64; 0 for a row without a 1.

    Mask [1 0 1 0] times positions [1 2 3 4] is [1 0 3 0]; its maximum is 3.
    """
    positions_R = torch.arange(1, mask_BR.shape[1] + 1, device=mask_BR.device)
    return (mask_BR.bool() * positions_R).amax(dim=-1)


def _ground_truth(reward_model: object, function: FunctionRef) -> object:
    """Return the ground truth of a row; None if it has none and the function is the user's."""
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if truth is None and function in BUILT_IN:
        got = f"got {reward_model!r:.80}"
        raise TypeError(f"reward_model must be a dict with 'ground_truth', {got}")
    return truth


def _read(row: Mapping[str, object]) -> list[object]:
    """Return what functions are given of a row, or of an item of a dataset (`_READ`)."""
    return [row.get(key) for key in _READ]


def _sample(ref: FunctionRef, text: str, read: Sequence[object]) -> Sample:
    """Return the call of a function for a row.

    Raises:
        KeyError: the row lacks a column that the function needs.
        TypeError: it lacks the ground truth that a built-in function needs.
    """
    source, model, info, columns = read
    truth = _ground_truth(model, ref)
    form, own = ref.form, {}
    if form.kind != "row":
        given = {"ground_truth": truth, fields.DATA_SOURCE: source, fields.EXTRA_INFO: info}
        row = columns if isinstance(columns, Mapping) else {}
        own = {key: value for key, value in given.items() if value is not None} | dict(row)
        if form.kind == "batch":
            own["prompts"] = own.get("prompt")
        chosen = form.columns(own)
        own = own if form.kind == "batch" else chosen
    return Sample(ref, "" if source is None else str(source), text, truth, info, own)


def reward_components(outcomes: Sequence[Outcome], names: Sequence[str]) -> torch.Tensor:
    """Return the numbers that the functions returned under `names`, [B, K] float32.

    A sample without a score has 0 in every component.

    Raises:
        FieldError: a function did not return one of them, or returned no number that float32 holds.
    """
    rows = []
    for outcome in outcomes:
        values = [(name, outcome.extra.get(name)) for name in names]
        missing = [n for n, v in values if not (isinstance(v, float) and abs(v) <= LARGEST)]
        if missing and outcome.status == SCORED:
            raise FieldError(
                f"algorithm.reward_components names {missing}, but besides its score the "
                f"reward function returned {sorted(outcome.extra)}; return one finite number of "
                "float32 for each component, under its name",
                field=missing[0],
            )
        rows.append([0.0 if missing else float(outcome.extra[name]) for name in names])
    return torch.tensor(rows, dtype=torch.float32).reshape(len(outcomes), len(names))


def numbers_beside(outcomes: Sequence[Outcome]) -> dict[str, list[dict[str, float]]]:
    """Return the field `reward_extra`: for each row the numbers beside its score, by name."""
    extras = [{k: v for k, v in o.extra.items() if isinstance(v, float)} for o in outcomes]
    return {fields.REWARD_EXTRA: extras}


def mean_extras(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return `reward/extra/<key>` → mean of the numbers that functions returned under that key."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for name, value in outcome.extra.items():
            if isinstance(value, float):
                values.setdefault(name, []).append(value)
    return {f"reward/extra/{name}": float(np.mean(found)) for name, found in values.items()}


def first_answer(samples: Sequence[Sample], outcomes: Sequence[Outcome]) -> str | None:
    """Return the answer of the first part of a score that finds one; None if no part does."""
    found = (answer_of(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True))
    return next((answer for answer in found if answer is not None), None)


def answer_of(sample: Sample, outcome: Outcome) -> str | None:
    """Return the answer in a response; None if its function extracts none, or found none.

    A function returns it under "answer" or "pred". Numbers are written in one form, so that "5",
    "5.0" and "1,000" are votes for 5 and 1000.
    """
    found = outcome.extra.get("answer", outcome.extra.get("pred"))
    if found is None and sample.function == MARKED_ANSWER:
        found = marked_answer(sample.solution_str)
    text = "" if found is None else str(found).strip()
    try:
        return repr(float(text.replace(",", "")))
    except ValueError:
        return text or None
