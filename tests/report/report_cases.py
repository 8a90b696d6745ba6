"""Run folders that are written by hand, and what a report holds of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import TrainConfig

EVIL = '</script><script>document.title="run by data"</script><img src=x onerror=alert(1)>'
CONTROL = "red \x1b[31mtext\x1b[0m \x07 \u202egnp.exe"


def write_jsonl(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sample(step: int, row: int, **more: object) -> dict[str, object]:
    """A response; two of them belong to one prompt."""
    return {
        "step": step, "split": "train", "prompt": f"user: {EVIL} {CONTROL}", "response": EVIL,
        "reward": float(row % 2), "group": f"{step}-{row // 2}", "advantage": row - 0.5,
        "components": {"format": 0.25, "answer": float(row % 2)}, "response_tokens": 2,
        "tokens": [[EVIL[:9], -0.125, 0.5], [CONTROL, -2.0, -0.25]], "ground_truth": "4", **more,
    }  # fmt: skip


TURNS = [
    {"sampled": f'<tool_call>{{"name": "add"}}</tool_call>{EVIL}<|end|>', "tokens": [3, 4],
     "observed": "<|tool|>7<|end|><|assistant|>", "reward": -0.1, "seconds": [0.25, 1.5],
     "source": "tool add, tool mul"},
    {"sampled": "#### 7<|end|>", "observed": "", "tokens": [5, 0], "reward": 1.0, "seconds": None,
     "source": ""},
]  # fmt: skip
"""Of an episode."""


def run_folder(path: Path, *overrides: str, steps: int = 3, **episode: object) -> Path:
    """Write the folder of a run with warnings, and with samples of four rows in each step."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(load_config(TrainConfig, overrides)))
    row = {"reward/mean": 0.5, "time/rollout": 0.5, "time/evaluate": 0.25, "time/update_actor": 0.2}
    rows = [{"step": s, **row, "progress/elapsed": 1.0 + s} for s in range(1, steps + 1)]
    write_jsonl(path / "metrics.jsonl", rows)
    write_jsonl(
        path / "samples.jsonl", [sample(r["step"], i, **episode) for r in rows for i in range(4)]
    )
    events = [{"at": 0.0, "environment": {"torch": "2.13", "command": f"train {EVIL}"}},
              {"at": 1.5, "warning": f"restart 1 of 3 begins: {EVIL}"}]  # fmt: skip
    write_jsonl(path / "events.jsonl", events)
    return path


def data_of(page: Path) -> dict[str, object]:
    """Return the JSON that a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])
