"""The report of runs: one HTML file that needs no network, see docs/concepts/report.md.

    config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, stream.jsonl ──► collect ──► JSON
    JSON, page/ (HTML, CSS, JavaScript) ──► write_report ──► report.html

    events.py     what a run writes for it: its environment and its warnings
    collect.py    reads run folders
    card.py       the card of the trained model, README.md in its folder
    page/         the page, and uPlot (MIT licence), which draws the curves

All texts of data are in the JSON, and the page shows them as text: none of them can be markup or a
script. A policy in the page refuses every other script and every address.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from quadriga.files import replacing
from quadriga.observability.jsonl import JsonObject, json_value
from quadriga.report.collect import collect_runs

_PAGE = files("quadriga.report") / "page"


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the report of the runs in some folders to a file.

    Raises:
        DataError: a folder holds no run.
        InputError: the file cannot be written.
    """
    data = collect_runs(runs)
    text = page_of(data)
    with replacing(output) as fresh:
        fresh.write_text(text, encoding="utf-8")


def page_of(data: JsonObject) -> str:
    """Return the HTML of what `collect_runs` returns."""
    script = "\n".join(_asset(name) for name in ("uPlot.iife.min.js", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # ASCII, so that every file encoding holds it; without "<", no text can end the element.
    found = json.dumps(json_value(data), separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    names = ", ".join(str(run["name"]) for run in data["runs"])
    parts = {
        "title": html.escape(names),
        "digest": digest,
        "style": _asset("uPlot.min.css") + _asset("report.css"),
        "data": found,
        "script": script,
    }
    # In one pass: a part that holds "{{…}}" stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8").rstrip("\n")
