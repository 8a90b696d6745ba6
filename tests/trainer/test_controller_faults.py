"""An error of the controller leaves a checkpoint of the last step; a full disk is one line."""

import pkgutil
import resource
from itertools import count

import pytest
from run_cases import noted

from quadriga.checkpoint.folders import complete_checkpoints
from quadriga.cli.main import main

TRAINER = "quadriga.trainer"
PLACES = [  # what raises, at which call, and the step that is saved
    (f"{TRAINER}.stages.score_responses", 3, [1]),  # the first call is of a validation, as below
    (f"{TRAINER}.record.RunRecord.log_samples", 2, [1]),
    (f"{TRAINER}.stages.StageRunner.update", 2, []),  # weights in an update belong to no step
]


@pytest.mark.parametrize(("place", "call", "saved"), PLACES)
def test_an_error_leaves_the_last_complete_step(run, tmp_path, monkeypatch, place, call, saved):
    owner, _, name = place.rpartition(".")
    calls = count(1)

    def raises(*_, **__):
        if next(calls) == call:
            raise RuntimeError("injected")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="injected"):
        noted(patch, pkgutil.resolve_name(owner), name, raises)
        run()
    assert [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == saved
    assert [row["step"] for row in run("trainer.resume_mode=auto")] == [0, 1, 2]


@pytest.mark.parametrize(("kib", "file"), [(4, "/run"), (64, "shard_00000.safetensors")])
def test_a_full_disk_is_one_line(train_overrides, capsys, kib, file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib << 10, before[1]))
    try:
        assert main(["train", *train_overrides]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cannot write ") and f"{file}: File too large; free" in line
