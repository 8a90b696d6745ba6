"""What a report shows of runs, from their folders.

A file that is missing or damaged costs its own part of the report, whose `problems` name it.
"""

import functools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from heapq import nlargest
from pathlib import Path
from typing import Any

import yaml

from quadriga import __version__
from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import read_settings_file, setting_leaves, to_yaml
from quadriga.config.schema import TrainConfig
from quadriga.errors import DataError, InputError
from quadriga.observability.jsonl import JsonObject, read_jsonl, step_of
from quadriga.observability.metrics import describe_metric
from quadriga.observability.run_folder import RunFolder
from quadriga.streams.timeline import Span, recorded_spans

MAX_ROWS = 2000
"""Steps of a run whose metrics are shown; of more, every second, third, … step."""
MAX_SPANS = 20_000
"""Spans of a timeline; of more, the longest ones."""
SAMPLE_BYTES = 2_000_000
"""About how much of `samples.jsonl` is shown; of more, some of the steps."""
MAX_TEXT = 20_000
"""Characters of a prompt and of a response."""

_ROLE = {
    "rollout": "rollout",
    "validate": "rollout",
    "step": "actor",
    "update_actor": "actor",
    "update_critic": "critic",
}
_KINDS = {"train": TrainConfig, "sft": SFTConfig, "rm": RMConfig}


def collect_runs(folders: Sequence[Path]) -> JsonObject:
    """Return what a report shows of runs, as JSON.

    Raises `DataError` if a folder holds no run.
    """
    for folder in folders:
        if not RunFolder(folder).holds_run:
            raise DataError(
                f"{folder} holds no run: expected a folder (trainer.default_local_dir) with "
                "config.yaml or metrics.jsonl",
                path=str(folder),
            )
    names = _names(folders)
    runs = [_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    infos = {name: describe_metric(name) for run in runs for name in run["metrics"]}
    return {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "runs": runs,
        "about": {name: [i.unit, i.meaning] for name, i in infos.items() if i is not None},
    }


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths that tell them apart: a/run, b/run."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    (twice, _), *_ = Counter(map(str, folders)).most_common(1)
    raise DataError(f"{twice} is given twice; give each run once", path=twice)


def _run(folder: Path, name: str) -> JsonObject:
    files, problems = RunFolder(folder), list[str]()
    settings, spans = dict[str, str](), []
    try:
        settings = _texts(read_settings_file(files.config))
    except InputError as error:
        problems.append(str(error))
    kind = "train" if "algorithm.adv_estimator" in settings else "sft"
    kind = "rm" if "data.chosen_key" in settings else kind
    defaults = _defaults(kind)
    rows = list(_rows(files.metrics, problems))
    samples, steps_of_samples = _samples(files.samples, problems)
    try:
        spans = recorded_spans(folder)
    except (InputError, ValueError, TypeError, LookupError) as error:
        problems.append(f"the timeline cannot be read: {error!r:.200}")
    events = list(_rows(files.events, problems))
    phases = {span.name for span in spans}
    return {
        "name": name,
        "path": str(folder.absolute()),
        "kind": kind,
        **_curves(rows),
        "spans": [
            [role, span.name, round(span.start, 3), round(span.end, 3)]
            for span in nlargest(MAX_SPANS, spans, key=lambda span: span.end - span.start)
            for role in _roles(span, settings, phases)
        ],
        "samples": samples,
        "steps_of_samples": steps_of_samples,
        "settings": settings,
        "changed": [key for key, value in settings.items() if defaults.get(key) != value],
        "environments": [row["environment"] for row in events if "environment" in row],
        "warnings": [[row.get("at"), str(row["warning"])] for row in events if "warning" in row],
        "problems": problems,
    }


@functools.cache
def _defaults(kind: str) -> dict[str, str]:
    return _texts(yaml.safe_load(to_yaml(_KINDS[kind]())))


def _roles(span: Span, settings: Mapping[str, str], phases: Set[str]) -> list[str]:
    """Return the rows of the timeline that show a span of a run with these phases."""
    if span.track != "controller":
        return [span.track]
    if span.name != "evaluate":
        return [_ROLE.get(span.name, "controller")]
    ref = [
        f"{at}.use_kl_{of}"
        for at, of in (("actor_rollout_ref.actor", "loss"), ("algorithm", "in_reward"))
    ]
    used = {
        "actor": True,
        "ref": any(settings.get(key) == "true" for key in ref),
        # An estimator of the user may need one, too; `evaluate` comes before its first update.
        "critic": "update_critic" in phases or settings.get("algorithm.adv_estimator") == "gae",
    }
    return [role for role, is_used in used.items() if is_used]


def _texts(values: Any) -> dict[str, str]:
    """Return settings by their dotted keys."""
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in setting_leaves(values)
    }


def _rows(path: Path, problems: list[str]) -> Iterator[JsonObject]:
    """Yield the rows of a file up to the first one that is damaged."""
    try:
        yield from read_jsonl(path)
    except DataError as error:
        problems.append(str(error))


def _curves(rows: Sequence[JsonObject]) -> JsonObject:
    """Return the steps, and for each metric its value at each of them or None."""
    every = math.ceil(len(rows) / MAX_ROWS) or 1
    kept = [row for i, row in enumerate(rows) if i % every == 0 or "val/score" in row]
    names = {name: None for row in kept for name in row if name != "step"}
    metrics = {name: [_number(row.get(name)) for row in kept] for name in names}
    return {
        "steps": [_number(row.get("step")) for row in kept],
        "metrics": {name: ys for name, ys in metrics.items() if any(y is not None for y in ys)},
    }


def _number(value: object) -> float | None:
    """Return a number with six digits; None for what is no finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _samples(path: Path, problems: list[str]) -> tuple[list[JsonObject], int]:
    """Return the samples of steps that are evenly chosen, and the number of all steps."""
    steps = sorted({step_of(row) for row in _rows(path, problems)})
    if not steps:
        return [], 0
    most = max(2, int(len(steps) * SAMPLE_BYTES / path.stat().st_size))
    last = min(most, len(steps)) - 1
    # 3 of 9 steps: numbers 0, 4 and 8
    chosen = {steps[round(i * (len(steps) - 1) / max(1, last))] for i in range(last + 1)}
    rows = [row | {"step": step_of(row)} for row in _rows(path, []) if step_of(row) in chosen]
    for row in rows:
        row |= {key: str(row.get(key))[:MAX_TEXT] for key in ("prompt", "response")}
    return rows, len(steps)
