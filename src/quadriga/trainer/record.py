"""What a run writes down: metrics, samples, spans, the terminal's lines, the plot at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from quadriga.algorithms.partial import merge_partials
from quadriga.config.schema import SFTConfig, TrainConfig
from quadriga.observability.metrics import MetricSet
from quadriga.observability.plots import plot_learning_curve
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.samples import Sample, SampleLog
from quadriga.observability.timing import Timer
from quadriga.observability.trackers import RunInfo, Trackers
from quadriga.protocol import DataProto

_TITLES = {"TrainConfig": "train", "SFTConfig": "sft"}


class RunRecord:
    """One run's record. `with RunRecord.open(...)`: closed, and its plot drawn, however it ends."""

    def __init__(
        self,
        config: TrainConfig | SFTConfig,
        folder: RunFolder,
        total_steps: int,
        tokenizer: Any,
        first_step: int = 0,
    ) -> None:
        self.folder = folder
        self.total_steps = total_steps
        self.tokenizer = tokenizer
        self.samples_kept = config.trainer.samples_per_step
        self.span = Timer()
        self.spent: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._metrics = MetricSet()
        self._samples = SampleLog(folder.samples)
        self._began = time.perf_counter()
        self._trackers = Trackers.open(
            config.trainer.loggers,
            RunInfo(folder, total_steps, _TITLES[type(config).__name__], first_step),
        )

    @classmethod
    def open(
        cls,
        config: TrainConfig | SFTConfig,
        total_steps: int,
        tokenizer: Any,
        *,
        resume_after: int | None = None,
    ) -> RunRecord:
        """Make the run folder and everything in it that is written as the run goes.

        `resume_after`: go on in the folder after this step; what was written of later ones goes.

        Raises:
            ConfigError: the folder holds another run.
            InputError: the folder cannot be written.
        """
        trainer = config.trainer
        resume = resume_after is not None
        folder = RunFolder.open(
            trainer.default_local_dir, config, resume=resume, overwrite=trainer.overwrite
        )
        if resume_after is not None:
            folder.forget_after(resume_after)
        return cls(config, folder, total_steps, tokenizer, resume_after or 0)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._trackers.close()
        self._samples.close()
        if error is None:
            plot_learning_curve(self.folder.metrics, self.folder.plot)
            self._closing_table()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the step under way."""
        self._metrics.add(metrics)

    def add_worker(self, report: DataProto) -> None:
        """What the ranks report of an update: `meta_info["metrics"]`, and partial sums to join.

        Numbers in `metrics` are the same on every rank, or one a rank, joined as their kind says.
        """
        self._metrics.add(report.meta_info.get("metrics", {}))
        if "partials" in report.non_tensor_batch:
            parts = [part for rank in report.non_tensor_batch["partials"] for part in rank]
            self._metrics.add(merge_partials(parts))

    def end_step(self, step: int) -> None:
        """Hand the step's metrics to every tracker."""
        metrics = self._metrics.take()
        times = self.span.take()
        for name, seconds in times.items():
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        seconds = times.get("time/step", 0.0)
        if seconds > 0 and "batch/tokens" in metrics:
            metrics["perf/tokens_per_second"] = metrics["batch/tokens"] / seconds
        metrics["progress/elapsed"] = time.perf_counter() - self._began
        self._trackers.log(step, {**metrics, **times})
        self.last = metrics

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation's metrics; the one before the first step is logged by itself, as step 0."""
        self.add(metrics)
        if step == 0:
            self.end_step(0)

    def samples(self, step: int, batch: DataProto, *, split: str = "train") -> None:
        """Keep the first `samples_per_step` answers of a batch, as text."""
        kept = batch.slice(0, min(self.samples_kept, len(batch)))
        if len(kept):
            self._samples.write(read_samples(kept, step, split, self.tokenizer))

    def note(self, text: str) -> None:
        """A line for whoever watches."""
        if self._trackers.console is not None:
            self._trackers.console.note(text)

    def _closing_table(self) -> None:
        console = self._trackers.console
        if console is None:
            return
        elapsed = time.perf_counter() - self._began
        parts = {k: v for k, v in self.spent.items() if k != "time/step"}
        shares = ", ".join(
            f"{name.removeprefix('time/')} {seconds:.0f}s"
            for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
            if seconds >= 0.5
        )
        rows = [
            ("steps", str(self.total_steps)),
            ("time", f"{elapsed:.0f}s ({shares})"),
            *_accuracy_row(self.last),
            ("run folder", str(self.folder.path)),
            ("model", str(self.folder.model)),
        ]
        console.table("done", rows)


def _accuracy_row(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    accuracy = metrics.get("val/accuracy")
    return [] if accuracy is None else [("held-out accuracy", f"{accuracy:.1%}")]


def read_samples(batch: DataProto, step: int, split: str, tokenizer: Any) -> Iterator[Sample]:
    """The rows of a (small) batch as text. Fetches responses, mask and scores of these rows."""
    fields = batch.batch
    rewards = fields["token_level_scores"].sum(-1).tolist()
    others = batch.non_tensor_batch
    for i, (ids, mask) in enumerate(zip(fields["responses"], fields["response_mask"], strict=True)):
        kept = ids[mask.bool()]
        truth = others["reward_model"][i] if "reward_model" in others else None
        yield Sample(
            step=step,
            split=split,
            prompt=_prompt_text(others["raw_prompt"][i]),
            response=tokenizer.decode(kept, skip_special_tokens=True),
            reward=rewards[i],
            ground_truth=(truth or {}).get("ground_truth"),
            data_source=others["data_source"][i] if "data_source" in others else None,
            response_tokens=len(kept),
        )


def _prompt_text(messages: Any) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)
