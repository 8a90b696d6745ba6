"""The memory plan of `quadriga sft`: the rows of its data, its table, and the refusal of a run."""

from __future__ import annotations

from quadriga.cli.main import main
from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.trainer.fine_tuning.sft import SFTTrainer
from quadriga.trainer.memory.machine import gib_apart
from quadriga.trainer.memory.sft import sft_memory_plan


def sft(tiny_task, folder, *more) -> list[str]:
    return [
        f"model.path={tiny_task.model}", f"data.train_files={tiny_task.data('sft')}",
        "data.train_batch_size=8", "trainer.backend=local", "trainer.total_training_steps=1",
        "trainer.loggers=[jsonl]", f"trainer.default_local_dir={folder / 'sft'}", *more,
    ]  # fmt: skip


def planned_sft(tiny_task, folder, device, *more):
    config = load_config(SFTConfig, sft(tiny_task, folder, *more))
    trainer = SFTTrainer(config)
    trainer.close()
    lengths = trainer.loader.dataset.lengths
    (pool,) = sft_memory_plan(config, lengths, trainer.val_prompts, None, device).pools
    return lengths.longest, pool


def test_fine_tuning_that_does_not_fit_is_refused_before_it_starts(tiny_task, tmp_path, capsys):
    _, pool = planned_sft(tiny_task, tmp_path, "cpu")
    needed = pool.largest[1] / 2**30
    enough, less = (f"trainer.device_memory_gb={needed + by}" for by in (1e-6, -1e-6))
    assert main(["sft", *sft(tiny_task, tmp_path, less)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    shown, _ = gib_apart(pool.largest[1], int((needed - 1e-6) * 2**30))
    assert f"the run needs {shown} GiB on a node: ranks × GiB = 1 × {needed:.3g} (actor, " in line
    for remedy in ("model.gradient_checkpointing=true", "max_tokens_per_micro_batch=16384",
                   "trainer.check_memory=false"):  # fmt: skip
        assert remedy in line
    assert "adamw_8bit" not in line  # rows of 32 elements, and a matrix of 32 × 64
    assert "offload_policy" not in line and not (tmp_path / "sft").exists()
    assert (
        main(
            [
                "sft",
                *sft(tiny_task, tmp_path, f"trainer.device_memory_gb={pool.states / 2**30 - 1e-6}"),
            ]
        )
        == 2
    )
    assert "optimizer states alone need" in capsys.readouterr().err
    for fits in (enough, "trainer.check_memory=false"):
        assert main(["sft", *sft(tiny_task, tmp_path, fits, "trainer.overwrite=true")]) == 0


def test_the_plan_of_fine_tuning_has_the_rows_of_the_data(tiny_task, tmp_path):
    ranks, validated = "trainer.n_gpus_per_node=2", f"data.val_files={tiny_task.data('test')}"
    tokens, pool = planned_sft(tiny_task, tmp_path, "cuda", ranks)
    actor = pool.engines["actor"]
    assert (actor.update.rows, actor.update.tokens) == (4, 4 * tokens)
    assert actor.evaluate is None and pool.generation is None  # nothing generates
    _, other = planned_sft(
        tiny_task, tmp_path, "cuda", ranks, validated, "data.micro_batch_size_per_gpu=1"
    )
    assert other.engines["actor"].update.rows == 1 and other.generation.kv_cache > 0
    assert other.engines["actor"].backward_peak < actor.backward_peak
    assert list(pool.phases) == ["update of the actor"]
    assert list(other.phases) == ["generation", "update of the actor", "weight sync"]


def test_the_rollout_of_the_validation_has_a_copy_of_its_own_unless_dtypes_are_equal(
    tiny_task, tmp_path
):
    prompts = f"data.val_files={tiny_task.data('test')}"
    for dtype, copies in (("float32", 0), ("bfloat16", 1)):
        _, pool = planned_sft(tiny_task, tmp_path, "cpu", prompts, f"engine.dtype={dtype}")
        actor = pool.engines["actor"]
        held = pool.processes + actor.parameters + actor.optimizer + pool.generation.peak
        assert pool.phases["generation"] == held + copies * pool.generation.weights


def test_the_plan_of_an_update_keeps_both_limits(tiny_task, tmp_path):
    device, size = "cpu", "data.micro_batch_size_per_gpu=3"
    tokens, pool = planned_sft(tiny_task, tmp_path, device, size)
    assert pool.engines["actor"].update.rows == 3
    budget = f"engine.max_tokens_per_micro_batch={2 * tokens}"
    _, pool = planned_sft(tiny_task, tmp_path, device, size, budget)
    assert pool.engines["actor"].update.rows == 2
    _, pool = planned_sft(tiny_task, tmp_path, device, size, budget, "engine.use_dynamic_bsz=false")
    assert pool.engines["actor"].update.rows == 3


def test_the_command_plans_fine_tuning_for_the_rows_of_the_data(tiny_task, tmp_path, capsys):
    _, pool = planned_sft(tiny_task, tmp_path, "cpu")
    less = f"trainer.device_memory_gb={pool.largest[1] / 2**30 - 1e-6}"
    assert main(["plan", "sft", *sft(tiny_task, tmp_path, less)]) == 0
    text = capsys.readouterr().out
    assert "rows per step          8, 8 on each of 1 data ranks" in text
    assert "run                    1 steps, 64 rows" in text and "longest conversation" in text
    assert "update of the actor" in text and "lower engine.max_tokens_per_micro_batch" in text
    assert not (tmp_path / "sft").exists()
    assert main(["plan", "sft"]) == 0
    assert "set model.path and data.train_files" in capsys.readouterr().out
    assert main(["plan", "sft", "data.train_batch_size=3", "trainer.n_gpus_per_node=2"]) == 2
    assert "3 rows do not divide over 2 ranks" in capsys.readouterr().err
