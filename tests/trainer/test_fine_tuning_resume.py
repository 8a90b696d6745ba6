"""`quadriga sft` and `quadriga rm` save checkpoints and are resumed from them: six steps equal
three steps, a resume, and three more steps, bit for bit."""

import pytest
from fine_tuning_cases import Runs, six_steps
from run_cases import assert_equal_tensors, often

from quadriga.checkpoint.folders import complete_checkpoints


@pytest.fixture(params=often(["sft", "rm"], "sft"))
def runs(request, tiny_task, tmp_path) -> Runs:
    return six_steps(request.param, tiny_task, tmp_path)


VARIANTS = {
    "schedule, validation at each step": (
        "optim.lr_scheduler=cosine", "optim.lr_warmup_steps=4", "trainer.test_freq=1",
    ),
    "adapters with dropout, sequences one by one": (
        "model.lora.rank=2", "model.lora.dropout=0.3", "data.micro_batch_size_per_gpu=1",
        "engine.use_dynamic_bsz=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, variant) -> None:
    settings = (*VARIANTS[variant], "trainer.save_freq=3")
    whole = runs.run("whole", *settings)
    half = f"trainer.resume_mode={runs.checkpoint('whole', 3)}"
    resumed = runs.run("resumed", *settings, half)
    assert [row["step"] for row in runs.metrics("resumed")] == [4, 5, 6]
    assert runs.metrics("resumed") == runs.metrics("whole")[3:]
    assert "val/loss" in runs.metrics("whole")[-1]
    assert resumed.steps == whole.steps == 6
    for name in ("checkpoints/global_step_6", "model"):
        assert_equal_tensors(runs.folder / "whole" / name, runs.folder / "resumed" / name)


def test_the_newest_checkpoint_continues_the_run_in_its_folder(runs) -> None:
    runs.run("run", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
    whole = runs.metrics("run")
    folder = runs.folder / "run" / "checkpoints"
    assert [step for step, _ in complete_checkpoints(folder)] == [4, 6]
    shard = next(runs.checkpoint("run", 6).rglob("shard_*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    runs.run("run", "trainer.resume_mode=auto", "trainer.save_freq=2")
    assert runs.metrics("run") == whole
    assert [path.name for path in folder.glob("*.set_aside")] == ["global_step_6.set_aside"]
