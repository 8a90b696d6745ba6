"""Pairs for a reward model from the scored responses of `quadriga eval`.

    python examples/trainer/response_pairs.py runs/eval/samples.jsonl pairs.jsonl

A pair has two responses to one prompt, `chosen` with the higher score. Each response is in one pair
at most, so a prompt with 8 responses of which 3 are right gives 3 pairs. A reward model that has
seen responses of the policy itself knows its mistakes better than one that has seen others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Sample = dict[str, Any]


def pairs_of(samples: list[Sample]) -> Iterator[Sample]:
    """Yield the pairs of the responses to one prompt: the best with the worst, and so on."""
    # Scores 1 0 0 1 0 of a b c d e: the pairs are (a, e) and (d, c).
    different = {sample["response"]: sample for sample in samples}.values()
    ordered = sorted(different, key=lambda sample: sample["score"], reverse=True)
    for best, worst in zip(ordered, reversed(ordered), strict=True):
        if best["score"] <= worst["score"]:
            return
        yield {
            "prompt": best["prompt"],
            "chosen": best["response"],
            "rejected": worst["response"],
        }


def write_pairs(scored: Path, path: Path) -> int:
    """Write the pairs of a file of scored responses, and return their number."""
    samples = (json.loads(line) for line in scored.read_text().splitlines())
    pairs = [
        pair
        for _, own in groupby(samples, key=lambda sample: sample["index"])
        for pair in pairs_of(list(own))
    ]
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return len(pairs)


if __name__ == "__main__":
    print(write_pairs(Path(sys.argv[1]), Path(sys.argv[2])), "pairs")
