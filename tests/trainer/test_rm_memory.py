"""The memory plan of `quadriga rm`: the rows of its pairs, its table, and the refusal of a run."""

from __future__ import annotations

import json

import pytest

from quadriga.cli.main import main
from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.errors import ConfigError
from quadriga.trainer.fine_tuning.rm import load_pairs
from quadriga.trainer.fine_tuning.sft import load_sft_rows
from quadriga.trainer.memory.machine import gib_apart
from quadriga.trainer.memory.phases import PROCESS_BYTES
from quadriga.trainer.memory.rm import rm_memory_plan
from quadriga.trainer.memory.sft import sft_memory_plan


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def pair(chosen, rejected, question="3 + 4", other=None):
    return {
        "chosen": conversation(question, chosen),
        "rejected": conversation(other or question, rejected),
    }


@pytest.fixture
def arguments(tiny_task, tmp_path):
    """arguments(pairs, "a=b", …) returns those of a run of one step."""

    def make(pairs, *more):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
        return [
            f"model.path={tiny_task.model}", f"data.train_files={file}",
            "data.train_batch_size=8", "trainer.total_training_steps=1", "trainer.backend=local",
            "trainer.loggers=[jsonl]", "trainer.threads_per_worker=1",
            f"trainer.default_local_dir={tmp_path / 'run'}", *more,
        ]  # fmt: skip

    return make


EQUAL = [pair("#### 7", f"#### {wrong}") for wrong in (8, 9)] * 8


def planned(arguments, pairs, device, *more):
    config = load_config(RMConfig, arguments(pairs, *more))
    lengths = load_pairs(config).lengths
    (pool,) = rm_memory_plan(config, lengths, device).pools
    return lengths, pool


def test_the_rows_of_the_plan_are_those_of_the_longest_pair(arguments):
    # The prompt of a pair is computed once: of L tokens, o are the response and its end.
    lengths, pool = planned(arguments, EQUAL, "cuda", "data.micro_batch_size_per_gpu=4")
    update = pool.engines["reward_model"].update
    assert 0 < lengths.own < lengths.longest
    prompts = 2 * (lengths.longest - lengths.own)
    assert (update.rows, update.tokens) == (4, prompts + 4 * (lengths.own + 1))
    # A pair with two prompts shares nothing, and the plan counts both of its rows.
    other = [pair("#### 7", "#### 7", other="30 + 40 + 50"), *EQUAL]
    apart, pool = planned(arguments, other, "cuda", "data.micro_batch_size_per_gpu=4")
    assert apart.own == apart.longest > lengths.longest
    # The first token of a row is its prompt.
    assert pool.engines["reward_model"].update.tokens == 2 + 4 * apart.longest


def test_the_longest_pair_may_be_one_of_the_validation(arguments, tmp_path):
    file = tmp_path / "val.jsonl"
    file.write_text(json.dumps(pair("#### 7", "#### 8", "3 + 4 + 3 + 4")) + "\n")
    train, _ = planned(arguments, EQUAL, "cpu")
    both, _ = planned(arguments, EQUAL, "cpu", f"data.val_files={file}")
    assert (both.own, both.longest > train.longest) == (train.own, True)


def test_phases_are_scores_and_update(arguments):
    _, pool = planned(arguments, EQUAL, "cpu")
    engine = pool.engines["reward_model"]
    held = PROCESS_BYTES["cpu"] + engine.parameters + engine.optimizer
    assert pool.phases == {
        "scores of the reward model": held + engine.evaluate_peak,
        "update of the reward_model": held + engine.update_peak,
    }
    assert engine.update.logits == 0 < engine.optimizer


def test_a_run_that_does_not_fit_is_refused_before_a_worker_starts(
    arguments, tmp_path, capsys, monkeypatch
):
    def never(*_):
        raise AssertionError("a worker group was started")

    _, pool = planned(arguments, EQUAL, "cpu")
    needed = pool.largest[1] / 2**30
    enough, less = (f"trainer.device_memory_gb={needed + by}" for by in (1e-6, -1e-6))
    with monkeypatch.context() as context:
        context.setattr("quadriga.trainer.fine_tuning.rm.start_one_group", never)
        assert main(["rm", *arguments(EQUAL, less)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        shown, _ = gib_apart(pool.largest[1], int((needed - 1e-6) * 2**30))
        assert f"the run needs {shown} GiB on a node: ranks × GiB = 1 × {needed:.3g}" in line
        assert (
            "(reward_model, of which 0.5 the process)" in line
            and "model.gradient_checkpointing=true" in line
        )
        assert "max_tokens_per_micro_batch=16384" in line and "trainer.check_memory=false" in line
        assert not (tmp_path / "run").exists()
        states = f"trainer.device_memory_gb={pool.states / 2**30 - 1e-6}"
        assert main(["rm", *arguments(EQUAL, states)]) == 2
        assert "optimizer states alone need" in capsys.readouterr().err
    for fits in ((enough,), (less, "trainer.check_memory=false")):
        assert main(["rm", *arguments(EQUAL, *fits, "trainer.overwrite=true")]) == 0


LONG = [pair("#### 7", "#### 8", question="3 + 4 + " * 60)] * 16


@pytest.fixture(params=["rm", "sft"])
def advice(request, arguments, tiny_task, capsys):
    """advice("a=b", …) returns the table of a plan for one byte less than is needed."""
    files = () if request.param == "rm" else (f"data.train_files={tiny_task.data('sft')}",)

    def text(*more):
        given = arguments(LONG, *files, *more)
        if request.param == "rm":
            config = load_config(RMConfig, given)
            plan = rm_memory_plan(config, load_pairs(config).lengths, "cpu")
        else:
            sft = load_config(SFTConfig, given)
            plan = sft_memory_plan(sft, load_sft_rows(sft).train.lengths, None, None, "cpu")
        less = f"trainer.device_memory_gb={(plan.pools[0].largest[1] - 1) / 2**30}"
        assert main(["plan", request.param, *given, less]) == 0
        printed = capsys.readouterr().out
        assert "but 0.5" in printed
        return printed

    return text


def test_what_to_change_makes_less(advice):
    """The form with fewest bytes comes first, and micro-batches of one row are not lowered."""
    rows = "engine.use_dynamic_bsz=false"
    selective = "model.gradient_checkpointing=selective"
    found = advice(rows, selective, "data.micro_batch_size_per_gpu=4")
    assert "set model.gradient_checkpointing=true (activations of the" in found
    assert "checkpointing=false" not in found and "lower data.micro_batch_size_per_gpu=4" in found
    assert "lower" not in advice(rows, "data.micro_batch_size_per_gpu=1")
    assert "checkpointing" not in advice(rows, "model.gradient_checkpointing=true")


def test_scores_are_computed_in_micro_batches_of_their_own(arguments, capsys):
    """With a limit of tokens, only this limits their micro-batches."""
    more = ("data.micro_batch_size_per_gpu=1", "trainer.device_memory_gb=0.502")
    assert main(["plan", "rm", *arguments(LONG, *more)]) == 0
    found = capsys.readouterr().out
    scores = next(line for line in found.splitlines() if "scores of the" in line)
    assert scores.endswith("← most") and "lower engine.max_tokens_per_micro_batch" in found
    assert "lower data" not in found and "checkpointing" not in found


def test_the_command_plans_the_pairs_of_the_data(arguments, tmp_path, capsys):
    _, pool = planned(arguments, EQUAL, "cpu")
    less = f"trainer.device_memory_gb={pool.largest[1] / 2**30 - 1e-6}"
    assert main(["plan", "rm", *arguments(EQUAL, less)]) == 0
    text = capsys.readouterr().out
    assert "pairs per step         8, 8 on each of 1 data ranks" in text
    assert "run                    1 steps, 16 pairs" in text and "longest conversation" in text
    assert "update of the reward_model" in text and "activations" in text
    assert "lower engine.max_tokens_per_micro_batch" in text and not (tmp_path / "run").exists()
    assert main(["plan", "rm"]) == 0
    assert "set model.path and data.train_files" in capsys.readouterr().out


def test_a_warm_up_longer_than_the_epochs_is_refused(arguments):
    from quadriga.trainer.fine_tuning.rm import RMTrainer

    more = ("trainer.total_training_steps=null", "optim.lr_warmup_steps=3")
    with pytest.raises(ConfigError, match=r"optim\.lr_warmup_steps"):
        RMTrainer(load_config(RMConfig, arguments(EQUAL, *more)))


def test_activations_that_are_not_counted_are_named(arguments, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("the code of this model reads numbers")

    monkeypatch.setattr("quadriga.engines.memory.passes.pass_memory", fail)
    assert main(["plan", "rm", *arguments(EQUAL)]) == 0
    assert "not counted: activations of the reward_model (RuntimeError" in capsys.readouterr().out
