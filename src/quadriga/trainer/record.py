"""What a run writes: metrics, samples, times, the lines of the terminal, and the final plot."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.importance import mismatch_of_statistics
from quadriga.checkpoint.folders import Resumed, restore_folder, set_aside_after
from quadriga.checkpoint.remote import Uploads
from quadriga.config.commands import RMConfig, RMTrainerConfig, SFTConfig
from quadriga.config.hub import push
from quadriga.config.loading import shown_settings
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import mask_secrets
from quadriga.containment import describe
from quadriga.errors import InputError, StoreError
from quadriga.files import remove
from quadriga.observability.callbacks import Callbacks
from quadriga.observability.jsonl import JsonlFile, JsonObject, Sample, Turn, read_jsonl
from quadriga.observability.metrics import MetricSet, Timer
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.trackers import RunInfo, Trackers, plot_learning_curve, points_of
from quadriga.protocol import DataProto, fields
from quadriga.report import write_report
from quadriga.report.card import write_card
from quadriga.report.events import EventLog
from quadriga.streams.episodes import turn_spans
from quadriga.workers.method_fields import CONTEXT, OBSERVED
from quadriga.workers.updates import MISMATCH

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("quadriga")
Metrics = dict[str, float]
_TITLES = {"TrainConfig": "train", "SFTConfig": "sft", "RMConfig": "rm"}


class StageResult(NamedTuple):
    """What every stage returns: the batch to go on with, and metrics by name."""

    batch: DataProto
    metrics: Metrics


class RunRecord:
    """The record of one run: it makes the run folder and opens the files in it.

    As a context manager it closes its files however the run ends, and draws the learning curve if
    the run ends without an error.

    Args:
        uploads: what copies the run folder to a remote one.
        resumed: the checkpoint from which the run is resumed. If it is of the run in the folder,
            that run is continued: its metrics and samples of later steps are removed and its later
            checkpoints renamed, because the resumed run writes them again.
            None: with `trainer.resume_mode=auto` the run begins again.
        given: the settings as the user gave them, for `config.yaml`; None: `config`.
        callbacks: are told of the beginning and the end of the run.

    Raises:
        ConfigError: the folder holds another run, or another run writes there now.
        InputError: the folder cannot be written.
    """

    def __init__(
        self,
        config: TrainConfig | SFTConfig | RMConfig,
        total_steps: int,
        tokenizer: PreTrainedTokenizerBase,
        uploads: Uploads,
        resumed: Resumed | None = None,
        given: TrainConfig | SFTConfig | RMConfig | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.total_steps = total_steps
        self._callbacks = callbacks or Callbacks()
        self._step = 0  # the last one that was logged
        self._step_samples: list[JsonObject] = []
        self.tokenizer = tokenizer
        self._uploads = uploads
        trainer = config.trainer
        self._repository = trainer.push_to_hub
        # A reward model generates no responses.
        self.samples_kept = self.tokens_kept = 0
        if not isinstance(trainer, RMTrainerConfig):
            self.samples_kept, self.tokens_kept = (
                trainer.samples_per_step,
                trainer.tokens_per_sample,
            )
        self.span = Timer(self._tell_phase)
        self.spent: dict[str, float] = {}  # seconds by span, over the whole run
        self.last: dict[str, float] = {}  # metrics of the last step
        self.restarts: dict[str, float] = {}  # metrics of restarts, for the next row
        self.last_validation: dict[str, float] = {}
        self.validation: tuple[tuple[str, str], ...] = ()  # a line for each of its data sources
        self._metrics = MetricSet()
        self._began = time.perf_counter()
        self._title = mask_secrets(f"{trainer.project_name} / {trainer.experiment_name}")
        path = Path(trainer.default_local_dir)
        existing = RunFolder(path).existing(trainer, None if resumed is None else resumed.folder)
        with ExitStack() as opened:  # which calls the last callback first
            self.folder = RunFolder.open(path, given or config, existing)
            opened.callback(self.folder.close)
            title = _TITLES[type(config).__name__]
            self._shown_split = "train" if title == "train" else "val"
            names = trainer.project_name, trainer.experiment_name
            settings = shown_settings(given or config)
            self._info = RunInfo(self.folder, total_steps, title, 0, *names, settings)
            self._events = EventLog(self.folder.events, lambda: self.elapsed)
            opened.callback(self._events.close)
            self._loggers = trainer.loggers, trainer.logger_timeout_s
            uploads.open(self.folder, existing, 0 if resumed is None else resumed.state.step)
            self._open_files(resumed, forget=existing == "resume")
            if existing == "resume" and self.folder.metrics.is_file():
                _, before = points_of(read_jsonl(self.folder.metrics), "progress/elapsed")
                self._began -= max(before, default=0.0)
            self._opened = opened.pop_all()

    def _open_files(self, resumed: Resumed | None, *, forget: bool) -> None:
        """Open the files and the trackers, to write what follows after `resumed`.

        `forget`: what the run has written of later steps is removed first.
        """
        step = None if resumed is None else resumed.state.step
        # metrics of the last validation, which may be before the checkpoint
        self.last_validation = {} if resumed is None else dict(resumed.state.validation)
        if forget:
            # In this order: killed between the two, the run has the steps of the checkpoints
            # that are left.
            set_aside_after(self.folder.checkpoints, step or 0)
            self.folder.forget_after(step)
            restore_folder(self.folder.model)
        with ExitStack() as opened:
            self._samples = JsonlFile(self.folder.samples)
            opened.callback(self._samples.close)
            info = replace(self._info, first_step=step or 0)
            names, timeout_s = self._loggers
            self._trackers = Trackers.open(names, info, timeout_s)
            opened.callback(self._trackers.close)
            if self._trackers.console is not None:
                self._trackers.console.note(f"run folder {self.folder.path}")
            row = {} if resumed is None or not forget else resumed.state.row
            if row and self.folder.lacks(step or 0):  # killed between checkpoint and row
                self._trackers.log(step or 0, row)
            self._files = opened.pop_all()

    def go_back(self, resumed: Resumed | None) -> None:
        """Go on after the step of `resumed`, a point of this run; None: from its beginning."""
        self._uploads.go_back(0 if resumed is None else resumed.state.step)
        self._trackers.close()
        self._files.close()
        self._metrics.take()
        self.span.take()
        self._step_samples = []
        self._open_files(resumed, forget=True)

    def begin(self, step: int) -> None:
        """Tell callbacks that the run begins, or goes on, after `step`."""
        self._callbacks.begin(self.folder.path, self.total_steps, step, self)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._opened, self._files:
            try:
                self._trackers.close()
                # The plot reads the file of the tracker jsonl, which is complete only now.
                if error is None and self.folder.metrics.is_file():
                    self._plot()
                folder = self.folder
                self._written("report", lambda: write_report([folder.path], folder.report))
                if error is None and folder.model.is_dir():
                    self._written("model card", lambda: write_card(folder.path))
                if error is None:
                    self._closing_table()
                self._uploads.close(finished=error is None)
                if error is None:
                    self._push()
            except BaseException as failed:
                self._callbacks.end(failed)
                raise
            self._callbacks.end(error)

    def _written(self, what: str, write: Callable[[], None]) -> None:
        """Write the report or the card. The run is complete without them."""
        try:
            write()
        except Exception as error:  # they may hold any text, and no run ends by them
            _log.warning("the %s is not written: %s", what, describe(error))

    def _push(self) -> None:
        """Push the model to the hub. The run is complete without that."""
        if self._repository is None or not self.folder.model.is_dir():
            return
        print(f"pushing the model to {self._repository}", file=sys.stderr)
        try:
            print(f"pushed: {push(self._repository, self.folder.model)}", file=sys.stderr)
        except StoreError as error:
            place = self.folder.model
            _log.warning("%s; it is in %s: hf upload %s %s", error, place, self._repository, place)

    def _plot(self) -> None:
        """Draw the learning curve. The run is complete without it."""
        try:
            plot_learning_curve(self.folder.metrics, self.folder.plot, title=self._title)
        except InputError as error:
            remove(self.folder.plot)
            _log.warning("the learning curve is not drawn: %s", error)

    def _tell_phase(self, name: str) -> None:
        if self._trackers.console is not None and name != "step":
            self._trackers.console.phase(name)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step."""
        self._metrics.add(metrics)

    def log_stage(self, result: StageResult) -> DataProto:
        """Add the metrics of a stage to the current step and return the batch of the stage."""
        self._metrics.add(result.metrics)
        return result.batch

    def log_update(self, report: DataProto) -> None:
        """Add the metrics that the ranks return from an update to the current step.

        Args:
            report: `meta_info["metrics"]` has numbers, or lists with one number per rank, which
                are reduced by the kind of the metric; `partials` has one row per rank of totals
                and weights, which are merged here.
        """
        self._metrics.add(_metrics_of(report))

    def log_role(self, prefix: str, report: DataProto) -> None:
        """Add the metrics that an added role returns to the current step, named `prefix…`.

        Args:
            prefix: "judge/" makes `judge/loss` of `loss` and of `judge/loss`.
            report: as in `log_update`.
        """
        role = f"{prefix.rstrip('/').rpartition('/')[2]}/"
        found = _metrics_of(report)
        self._metrics.add({prefix + name.removeprefix(role): found[name] for name in found})

    @property
    def elapsed(self) -> float:
        """Seconds of the run, without those between its end and its resumption."""
        return time.perf_counter() - self._began

    @property
    def measured(self) -> dict[str, float]:
        """The metrics of the current step so far."""
        return self._metrics.reduce()

    @property
    def row(self) -> dict[str, float]:
        """The metrics and times of the current step so far, as trackers receive them."""
        row = {**self._metrics.reduce(), **self.span.times()}
        seconds = row.get("time/step", 0.0)
        if seconds > 0 and "batch/tokens" in row:
            row["perf/tokens_per_second"] = row["batch/tokens"] / seconds
        row["progress/elapsed"] = self.elapsed
        return row

    def end_step(self, step: int) -> None:
        """Pass the metrics of the step to every tracker and begin the next step."""
        self.add(self.restarts)
        self.restarts = {}
        self.last = self.row
        # Taken together, so that a time belongs to the same step as the metrics beside it.
        self._metrics.take()
        for name, seconds in self.span.take().items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        self._trackers.log(step, self.last)
        self.folder.renew_lock()
        self._uploads.logged(step)
        self._step, self._step_samples = step, []

    def log_validation(
        self, step: int, metrics: Mapping[str, float], sources: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Add the metrics of a validation. The one before the first step is logged as step 0.

        Args:
            sources: (data source, its metrics as text), for the final table.
        """
        self.last_validation = dict(metrics)
        self.validation = tuple(sources)
        self.add(metrics)
        self._trackers.log_samples(step, self.samples("val"))
        if step == 0:
            self._callbacks.validation(0, self.samples("val"))
            self.end_step(0)

    def log_samples(
        self,
        step: int,
        batch: DataProto,
        *,
        split: Literal["train", "val"] = "train",
        written: int = 0,
    ) -> int:
        """Write responses of a batch, group after group, and return their number.

        Args:
            written: of `samples_per_step` responses, the number that earlier batches of the step
                have given.
        """
        kept = rows_by_group(batch)[: self.samples_kept - written]
        if kept:
            rows = batch.select_idxs(kept)
            found = list(read_samples(rows, step, split, self.tokenizer, self.tokens_kept))
            for sample in found:
                self._step_samples.append(asdict(sample))
                self._samples.write(self._step_samples[-1])
            console, first = self._trackers.console, found[0]
            if console is not None and not written and split == self._shown_split:
                console.sample(step, first.prompt, first.response, first.reward, first.turns or ())
        return len(kept)

    def samples(self, split: Literal["train", "val"]) -> list[JsonObject]:
        """Return the samples of the current step so far."""
        return [sample for sample in self._step_samples if sample["split"] == split]

    def _closing_table(self) -> None:
        console = self._trackers.console
        if console is None:
            return
        elapsed = self.elapsed
        parts = {k: v for k, v in self.spent.items() if k != "time/step"}
        shares = ", ".join(
            f"{name.removeprefix('time/')} {seconds:.0f}s"
            for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
            if seconds >= 0.5
        )
        rows = [
            ("steps", str(self._step or self.total_steps)),
            ("time", f"{elapsed:.0f}s" + (f" ({shares})" if shares else "")),
            *_validation_row(self.last),
            *((f"  {source}", text) for source, text in self.validation),
            ("run folder", str(self.folder.path)),
            ("report", str(self.folder.report)),
            ("model", str(self.folder.model)),
        ]
        console.table("done", rows)


def _metrics_of(report: DataProto) -> dict[str, float | Sequence[float]]:
    """Return the metrics in the result of a worker method; `RunRecord.log_update` has its form."""
    metrics = dict(report.meta_info.get("metrics", {}))
    if fields.PARTIALS in report.non_tensor_batch:
        # A mean of means would be wrong: rank 0 with 2 tokens of loss 1.0 and rank 1 with 6
        # tokens of loss 2.0 report totals 2 and 12 with weights 2 and 6, and 14 / 8 = 1.75.
        per_rank = report.non_tensor_batch[fields.PARTIALS]
        merged = merge_partials([part for rank in per_rank for part in rank])
        names = [name for name in merged if name.startswith(MISMATCH)]
        if names:  # an update has measured the mismatch, as statistics
            statistics = {name.removeprefix(MISMATCH): merged.pop(name) for name in names}
            merged |= named_mismatch(mismatch_of_statistics(statistics))
        metrics |= merged
    return metrics


def _validation_row(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    if "val/accuracy" in metrics:
        return [("validation accuracy", f"{metrics['val/accuracy']:.1%}")]
    score = metrics.get("val/score")
    return [] if score is None else [("validation score", f"{score:.3f}")]


def named_mismatch(metrics: Mapping[str, float]) -> Metrics:
    """Return metrics of `algorithms.importance` under the names in the log."""
    return {f"{MISMATCH}{name.removeprefix('mismatch_')}": v for name, v in metrics.items()}


def rows_by_group(batch: DataProto) -> list[int]:
    """Return the numbers of all rows so that those of a prompt group are neighbours: groups a b a b
    are rows 0 2 1 3."""
    uids = batch.non_tensor_batch[fields.UID].tolist()
    first = {uid: row for row, uid in reversed(list(enumerate(uids)))}
    return sorted(range(len(uids)), key=lambda row: first[uids[row]])


def read_samples(
    batch: DataProto,
    step: int,
    split: Literal["train", "val"],
    tokenizer: PreTrainedTokenizerBase,
    most_tokens: int = 0,
) -> Iterator[Sample]:
    """Yield the rows of a batch as text. Fetches the fields of all rows, so the batch should be
    small.

    Args:
        most_tokens: of a response, that are given one by one.
    """
    tensors, arrays = batch.batch, batch.non_tensor_batch
    none = [None] * len(batch)

    def numbers(name: str) -> Any:
        return tensors[name] if name in tensors.keys() else none  # noqa: SIM118

    rewards = tensors[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist()
    responses, masks = tensors[fields.RESPONSES], tensors[fields.RESPONSE_MASK]
    # Responses that take no part in the update have an empty mask of the response.
    sampled = tensors[fields.ATTENTION_MASK][:, -responses.shape[1] :].bool()
    streamed = fields.TOKEN_VERSIONS in tensors.keys()  # noqa: SIM118
    versions = spans_of_versions(batch) if streamed else none
    advantages, models = numbers(fields.ADVANTAGES), numbers(fields.RM_SCORES)
    rollout, actor = numbers(fields.ROLLOUT_LOG_PROBS), numbers(fields.OLD_LOG_PROBS)
    truths, sources, extras = (
        arrays.get(name, none)
        for name in (fields.REWARD_MODEL, fields.DATA_SOURCE, fields.REWARD_EXTRA)
    )
    for i, (ids, mask) in enumerate(zip(responses, masks.bool(), strict=True)):
        kept = ids[sampled[i]]
        components = dict(extras[i] or {})
        if models[i] is not None:
            components["reward model"] = float(models[i].sum())
        advantage = advantages[i]
        if advantage is not None:
            advantage = float(advantage[mask].mean()) if mask.any() else 0.0
        of_tokens = [
            None if row[i] is None else row[i][sampled[i]][:most_tokens].tolist()
            for row in (rollout, actor)
        ]
        yield Sample(
            step=step, split=split, prompt=_prompt_text(arrays[fields.RAW_PROMPT][i]),
            response=str(tokenizer.decode(kept, skip_special_tokens=True)), reward=rewards[i],
            ground_truth=(truths[i] or {}).get("ground_truth"), data_source=sources[i],
            response_tokens=len(kept), weight_versions=versions[i],
            group=str(arrays[fields.UID][i]), components=components or None, advantage=advantage,
            turns=turns_of(batch, i, tokenizer) if fields.EPISODE in arrays else None,
            tokens=_tokens(tokenizer, kept[:most_tokens].tolist(), *of_tokens),
        )  # fmt: skip


def _tokens(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    rollout: list[float] | None,
    actor: list[float] | None,
) -> list[tuple[str, float | None, float | None]] | None:
    """Return text, log-probability and difference of each token; see `Sample`."""

    def text(number: int) -> str:
        # Behind the token before it: some tokenizers leave out a space at the beginning of a text.
        before = ids[max(0, number - 1) : number]
        return str(tokenizer.decode([*before, ids[number]]))[len(str(tokenizer.decode(before))) :]

    if not ids or rollout is None:
        return None
    differences = (
        [None] * len(ids) if actor is None else [a - r for a, r in zip(actor, rollout, strict=True)]
    )
    return [
        (text(i), round(rollout[i], 4), None if d is None else round(d, 4))
        for i, d in enumerate(differences)
    ]


def spans_of_versions(batch: DataProto) -> list[list[tuple[int, int]]]:
    """Return (weight version, tokens that it sampled) of each response: 2 2 2 3 → (2, 3) (3, 1)."""
    length_B = batch.batch[fields.SEQUENCE_LENGTH] - batch.batch[fields.PROMPT_LENGTH]
    rows = zip(batch.batch[fields.TOKEN_VERSIONS], length_B.tolist(), strict=True)
    return [
        [(value, len(list(same))) for value, same in groupby(_sampled(versions[:length]))]
        for versions, length in rows
    ]


def _sampled(versions: Tensor) -> list[int]:
    return [version for version in versions.tolist() if version > OBSERVED]


def turns_of(batch: DataProto, row: int, tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    """Return the turns of an episode."""
    about, tensors = batch.non_tensor_batch[fields.EPISODE][row], batch.batch
    ids, versions = tensors[fields.RESPONSES][row], tensors[fields.TOKEN_VERSIONS][row]
    known = tensors[fields.ATTENTION_MASK][row, -len(ids) :].bool()
    spans, found = turn_spans(known & (versions > OBSERVED)), list[Turn]()
    times = {turn: (seconds, who) for turn, *seconds, who in about["times"]}
    for turn, (first, last) in enumerate(spans, 1):
        behind = spans[turn][0] if turn < len(spans) else int(known.sum())
        seconds, who = times.get(turn, (None, ""))
        if (versions[last:behind] <= CONTEXT).any():  # the policy does not see what was before
            who = f"{who}; a context begins".removeprefix("; ")
        found.append({
            "sampled": str(tokenizer.decode(ids[first:last])),
            "observed": str(tokenizer.decode(ids[last:behind])),
            "tokens": (last - first, behind - last),
            "reward": round(float(tensors[fields.TURN_REWARDS][row, last - 1]), 6),
            "seconds": seconds,
            "source": who,
        })  # fmt: skip
    return found


def _prompt_text(messages: Sequence[Mapping[str, object]]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
