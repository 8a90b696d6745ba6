"""`quadriga eval`: responses to files of prompts, scored and summarised.

    prompts ──► ranks ──► responses.jsonl ──┐
                                            ├──► reward ──► samples.jsonl, results.json, results.png
    response files ─────────────────────────┘

Generation is continued by a second run of the same command; scores are computed again, so that a
changed reward function scores the responses that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from quadriga.checkpoint.files import read_json, write_json
from quadriga.config.commands import EvalConfig
from quadriga.config.loading import to_yaml
from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError
from quadriga.files import cannot_write, replacing
from quadriga.observability.jsonl import JsonlFile, JsonObject
from quadriga.protocol import fields
from quadriga.rewards import RewardManager
from quadriga.rewards.functions import SCORED, Outcome
from quadriga.trainer.checkpoints import contents_digest
from quadriga.trainer.checks.settings import check_eval_settings
from quadriga.trainer.evaluation.generate import (
    Inputs,
    changes,
    inputs_of,
    load_prompts,
    rows_of,
    write_responses,
)
from quadriga.trainer.preflight import check_files, check_reward
from quadriga.trainer.validation import (
    NO_SOURCE,
    OVERALL,
    PromptScores,
    SourceSummary,
    SummarySettings,
    interval,
    summarise,
)

if TYPE_CHECKING:
    from quadriga.data import PromptDataset

RESPONSES, SAMPLES, RESULTS = "responses.jsonl", "samples.jsonl", "results.json"
PLOT, CONFIG = "results.png", "config.yaml"
_COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8e6c8a", "#b08d2f", "#4f9da6")
_TOGETHER = 256  # prompts that are scored together


@dataclass(frozen=True)
class Evaluation:
    """The summaries of all data sources, and what else the report tells.

    Attributes:
        failed: responses whose reward function failed.
        left_out: prompts that are longer than `max_prompt_length`.
    """

    folder: Path
    summaries: tuple[SourceSummary, ...]
    failed: int
    left_out: int


def run_evaluation(config: EvalConfig) -> Evaluation:
    """Generate the responses unless files hold them, score them, and write the report.

    Raises:
        InputError: settings, files or rows do not fit, or the folder holds the evaluation of
            another model or other data, or it cannot be written.
        WorkerError: a rank failed. The responses before it are kept.
        RewardError: a reward function failed and `reward.on_failure` is "fail".
    """
    check_eval_settings(config)
    check_reward(config.reward)
    folder, files = Path(config.output), config.response_files
    prompts: PromptDataset | None = None
    if files:
        check_files(files, "response_files", needed=True)
        inputs: Inputs = {"content of response_files": contents_digest(files)}
    else:
        prompts, inputs = load_prompts(config), inputs_of(config)
    with closing(RewardManager.from_settings(config.reward, None)) as reward:
        _check_folder(folder, inputs, overwrite=config.overwrite)
        rows: Iterable[JsonObject]
        if prompts is None:
            reward.check(read_responses(files, config.response_key), files)
            rows = read_responses(files, config.response_key)
        else:
            reward.check(prompts, config.data_files)
            write_responses(config, prompts, str(folder / RESPONSES))
            rows = rows_of(folder / RESPONSES)
        scored = list(_score(rows, reward, folder))
    settings = SummarySettings(
        ks=tuple(config.pass_at),
        correct_at=config.correct_at,
        resamples=config.resamples,
        confidence=config.confidence,
        seed=config.seed,
    )
    summaries = summarise([prompt for prompt, _ in scored], settings)
    failed = sum(count for _, count in scored)
    left_out = 0 if prompts is None else prompts.filtered
    results = {"sources": [asdict(s) for s in summaries], "failed": failed, "left_out": left_out}
    write_json(folder / RESULTS, {**results, "inputs": inputs})
    plot_results(summaries, folder / PLOT)
    with replacing(folder / CONFIG) as fresh:
        fresh.write_text(to_yaml(config), encoding="utf-8")
    return Evaluation(folder, summaries, failed, left_out)


def read_responses(files: Sequence[str], key: str) -> Iterator[JsonObject]:
    """Yield the rows of files that hold responses, with a list of texts under "responses".

    Raises:
        DataError: a file cannot be read, or a row has no text or list of texts under `key`.
    """
    from quadriga.data.rows import check_files, read_pieces

    pieces = (piece for path in check_files(files) for piece in read_pieces(path))
    for index, row in enumerate(row for piece in pieces for row in piece.rows):
        value = row.at(key)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise row.error(f"{key!r} must be a text or a list of texts, got {value!r:.120}")
        yield {fields.INDEX: index, **row.values, fields.RESPONSES: texts}


def _check_folder(folder: Path, inputs: Inputs, *, overwrite: bool) -> None:
    """Check that the folder is free, or holds an evaluation of the same responses."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output={folder} is a file, expected a folder", key="output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    path = folder / RESULTS
    if not path.is_file() or overwrite:
        return
    saved = read_json(path).get("inputs")
    differences = changes(saved if isinstance(saved, dict) else {}, inputs)
    if differences:
        raise ConfigError(
            f"{folder} holds an evaluation with other inputs: {differences}; choose "
            "another output, or set overwrite=true to replace it",
            key="output",
        )


def _score(
    rows: Iterable[JsonObject], reward: RewardManager, folder: Path
) -> Iterator[tuple[PromptScores, int]]:
    """Yield the scores of each prompt with its failed responses, and write the samples."""
    with replacing(folder / SAMPLES) as fresh, closing(JsonlFile(fresh)) as file:
        read = iter(rows)
        while some := list(islice(read, _TOGETHER)):
            texts: list[list[str]] = [row[fields.RESPONSES] for row in some]
            every = [(row, text) for row, own in zip(some, texts, strict=True) for text in own]
            outcomes = reward.score_texts([text for _, text in every], [row for row, _ in every])
            scored = iter(zip(every, outcomes, reward.answers, strict=True))
            for row, own in zip(some, texts, strict=True):
                source = row.get(fields.DATA_SOURCE)
                found = PromptScores(NO_SOURCE if source is None else str(source), [], [])
                failed = 0
                for (_, text), outcome, answer in islice(scored, len(own)):
                    file.write(_sample(row, found.data_source, text, outcome, answer))
                    found.scores.append(outcome.score)
                    found.answers.append(answer)
                    failed += outcome.status != SCORED
                yield found, failed


def _sample(
    row: Mapping[str, object], source: str, text: str, outcome: Outcome, answer: str | None
) -> dict[str, object]:
    truth = row.get(fields.REWARD_MODEL)
    return {
        "index": row[fields.INDEX],
        "data_source": source,
        "prompt": row.get("prompt"),
        "response": text,
        "score": outcome.score,
        "answer": answer,
        "ground_truth": truth.get("ground_truth") if isinstance(truth, Mapping) else None,
        "status": outcome.status,
        **({"detail": outcome.detail} if outcome.detail else {}),
        **({"extra": outcome.extra} if outcome.extra else {}),
    }


def summary_table(summaries: Sequence[SourceSummary], confidence: float) -> Table:
    """Return a table with one row for each metric of each data source."""
    table = Table(title="evaluation", title_justify="left")
    for heading in ("data source", "prompts", "metric", "value", f"{confidence:.0%} interval"):
        left = heading in ("data source", "metric")
        table.add_column(heading, justify="left" if left else "right")
    for summary in summaries:
        for number, (name, estimate) in enumerate(summary.metrics.items()):
            head = (mask_secrets(summary.data_source), str(summary.prompts))
            cells = (name, f"{estimate.value:.3f}", interval(estimate))
            table.add_row(*(head if number == 0 else ("", "")), *cells)
        table.add_section()
    return table


def plot_results(summaries: Sequence[SourceSummary], picture: Path) -> None:
    """Plot pass@k over k for each data source, with intervals.

    Raises:
        InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    # `Figure` and not `pyplot`: it needs no display and keeps no global list of open figures.
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, summary in enumerate(summaries):
        found = {n: e for n, e in summary.metrics.items() if n.startswith("pass@")}
        ks = [int(name.partition("@")[2]) for name in found]
        # (value, low, high) of each k; without an interval the value three times
        bounds = [
            (e.value, *(e.value if b is None else b for b in (e.low, e.high)))
            for e in found.values()
        ]
        values, lows, highs = zip(*bounds, strict=True)
        colour = "black" if summary.data_source == OVERALL else _COLOURS[number % len(_COLOURS)]
        axes.plot(ks, values, marker="o", markersize=4, color=colour, label=summary.data_source)
        axes.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    with replacing(picture) as fresh:
        figure.savefig(str(fresh), format="png")
