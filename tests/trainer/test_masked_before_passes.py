"""Zero-variance prompt groups that are masked take no part in any pass over the batch."""

from __future__ import annotations

import pytest

from quadriga.engines import fsdp
from quadriga.protocol import fields
from quadriga.trainer import dataflow

ACTOR = "actor_rollout_ref.actor"

# Scores of two values, so that some prompt groups have equal scores and some have not.
RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""


@pytest.fixture
def masked_run(run, tmp_path):
    """masked_run("a=b", …) trains with masked zero-variance groups and every pass."""
    (tmp_path / "rule.py").write_text(RULE)

    def _run(*more: str) -> list[dict[str, float]]:
        return run(
            f"reward.path={tmp_path / 'rule.py'}", "algorithm.filter_groups.enable=true",
            f"{ACTOR}.use_kl_loss=true", "algorithm.adv_estimator=gae", *more,
        )  # fmt: skip

    return _run


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The number of rows that each forward pass without gradient computes."""
    rows: list[int] = []
    original = fsdp.FSDPEngine.forward

    def forward(self, batch, **settings):
        rows.append(int(batch[fields.RESPONSE_MASK].any(1).sum()))
        return original(self, batch, **settings)

    monkeypatch.setattr(fsdp.FSDPEngine, "forward", forward)
    return rows


def test_the_passes_compute_the_rows_of_the_update_and_no_others(masked_run, passes) -> None:
    rows = masked_run()
    dead = [int(row["group/dead"]) for row in rows[1:]]
    assert all(0 < count < 8 for count in dead), "the test needs groups of both kinds"
    # Two responses per prompt; three passes per step: log-probabilities, reference, values.
    assert passes == [2 * (8 - count) for count in dead for _ in range(3)]


def test_masking_after_the_passes_gives_the_same_numbers(
    masked_run, passes, monkeypatch, tmp_path
) -> None:
    early = masked_run()
    saved = len(passes), sum(passes)
    monkeypatch.setattr(dataflow, "masks_before_passes", lambda _: False)
    late = masked_run(f"trainer.default_local_dir={tmp_path / 'late'}")
    assert (len(passes), sum(passes)) == (2 * saved[0], saved[1] + saved[0] * 16)
    for ours, theirs in zip(early, late, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if not name.startswith(("time/", "perf/", "progress/")):
                # The micro-batches of the passes differ, and with them the rounding in float32.
                bound = 1e-3 if name.startswith("mismatch/") else 1e-5
                assert ours[name] == pytest.approx(theirs[name], abs=bound), name
