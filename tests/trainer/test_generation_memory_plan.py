"""The memory plan of `quadriga generate` and `quadriga eval`, and the refusal of a run."""

from __future__ import annotations

import pytest
from run_cases import two_steps

from quadriga.cli.main import main
from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.evaluation import generate as generation
from quadriga.trainer.evaluation.generate import load_prompts
from quadriga.trainer.memory.generation import (
    PromptBatch,
    check_generation_memory,
    generation_memory_plan,
)
from quadriga.trainer.memory.machine import gib_apart
from quadriga.trainer.memory.plan import memory_plan

RANKS = ("trainer.device=cpu", "trainer.threads_per_worker=1", "max_response_length=6")


@pytest.fixture
def arguments(tiny_task, tmp_path):
    """arguments("a=b", …) returns those of a generation for 16 prompts."""

    def make(*more):
        files = f"data_files={tiny_task.data('test')}"
        return [f"model.path={tiny_task.model}", files, *RANKS, *more]

    return make


def needed(arguments, *more) -> float:
    """Return the GiB of a generation by its plan, for the prompts of its data."""
    config = load_config(GenerateConfig, arguments(*more))
    dataset = load_prompts(config).dataset
    batch = PromptBatch.of_data(config, dataset)
    (pool,) = generation_memory_plan(config, "cpu", batch).pools
    return pool.largest[1] / 2**30


@pytest.fixture
def no_ranks(monkeypatch):
    monkeypatch.setattr(generation, "rollout_group", lambda _: pytest.fail("ranks were started"))


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_generation_that_does_not_fit_is_refused_before_a_rank_starts(
    arguments, tmp_path, capsys, no_ranks, command
):
    size = needed(arguments)
    output = f"output={tmp_path / ('out.jsonl' if command == 'generate' else 'out')}"
    less = f"trainer.device_memory_gb={size - 1e-6}"
    assert main([command, *arguments(output, less)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    shown, _ = gib_apart(int(size * 2**30), int((size - 1e-6) * 2**30))
    assert f"needs {shown} GiB on a node: ranks × GiB = 1 × {size:.3g} (rollout, " in line
    for remedy in ("rollout.micro_batch_size=256", "batch_size=64", "max_response_length=6",
                   "trainer.check_memory=false"):  # fmt: skip
        assert remedy in line
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out").is_file()
    assert main([command, *arguments(output, "trainer.device_memory_gb=0.4")]) == 2
    assert "the processes alone need" in capsys.readouterr().err


def test_a_generation_that_fits_starts(arguments, tmp_path):
    size = needed(arguments)
    output = f"output={tmp_path / 'out.jsonl'}"
    for fits in (f"device_memory_gb={size + 1e-6}", "check_memory=false"):
        more = ("overwrite=true", "trainer.device_memory_gb=0.1", f"trainer.{fits}")
        assert main(["generate", *arguments(output, *more)]) == 0
    one = ("prompt=3 + 4", "data_files=[]", f"trainer.device_memory_gb={size}")
    assert main(["generate", *arguments(*one)]) == 0


def test_the_rows_are_those_of_the_data(arguments, tiny_task):
    config = load_config(GenerateConfig, arguments("batch_size=4000000", "n=3"))
    dataset = load_prompts(config).dataset
    assert len(dataset) == 16 and dataset.longest < config.max_prompt_length
    config = load_config(GenerateConfig, arguments("batch_size=4000000"))
    check_generation_memory(config, dataset)  # 16 rows, although the settings allow more
    most, data = (
        generation_memory_plan(config, "cpu", batch).pools[0].generation.peak
        for batch in (PromptBatch(64, 512), PromptBatch(16, dataset.longest))
    )
    assert data < most / 4


def test_one_prompt_without_output_is_checked_too(arguments, capsys, no_ranks):
    one = ("prompt=3 + 4", "data_files=[]", "trainer.device_memory_gb=0.4")
    assert main(["generate", *arguments(*one)]) == 2
    assert "trainer.check_memory=false" in capsys.readouterr().err


def test_a_refusal_leaves_the_output_and_a_complete_one_needs_no_memory(
    arguments, tmp_path, capsys, monkeypatch
):
    output, small = f"output={tmp_path / 'out.jsonl'}", "trainer.device_memory_gb=0.4"
    assert main(["generate", *arguments(output)]) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr(generation, "rollout_group", lambda _: pytest.fail("ranks were started"))
    assert main(["generate", *arguments(output, small)]) == 0
    assert main(["generate", *arguments(output, small, "seed=1", "overwrite=true")]) == 2
    assert "trainer.check_memory=false" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_one_row_at_a_time_is_not_made_fewer(arguments, tmp_path, capsys, no_ranks):
    one = arguments("rollout.micro_batch_size=1", f"output={tmp_path / 'out.jsonl'}")
    size = needed(arguments, "rollout.micro_batch_size=1")
    assert main(["generate", *one, f"trainer.device_memory_gb={size - 1e-7}"]) == 2
    refused = capsys.readouterr().err
    assert "batch_size" not in refused and "lower max_prompt_length" in refused


def test_the_memory_of_a_device_can_be_given_to_the_plan(tiny_task, capsys):
    path, device = f"model.path={tiny_task.model}", "trainer.device=cuda"
    assert main(["plan", "generate", path, device]) == 0
    text = capsys.readouterr().out
    assert "set trainer.device_memory_gb" in text or "GiB: " in text
    assert main(["plan", "generate", path, device, "trainer.device_memory_gb=0.9"]) == 0
    text = capsys.readouterr().out
    assert "0.9 GiB: trainer.device_memory_gb" in text and "a rank of rollout needs" in text
    assert main(["plan", "generate", path, "trainer.device_memory_gb=0"]) == 2


def test_a_device_that_this_machine_does_not_have_is_not_compared(arguments, monkeypatch):
    config = load_config(GenerateConfig, arguments("trainer.device=cuda"))
    dataset = load_prompts(config).dataset
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_generation_memory(config, dataset)


@pytest.mark.parametrize("filtered", ["top_p=0.9", "min_p=0.1"])
def test_filters_of_sampling_are_planned(arguments, filtered):
    def peak(*more):
        config = load_config(GenerateConfig, arguments("sampling.temperature=1", *more))
        return generation_memory_plan(config, "cpu", PromptBatch(512, 2)).pools[0].generation.peak

    assert peak(f"sampling.{filtered}") > peak()


def test_the_rows_of_a_request_are_planned(arguments):
    def peak(*more):
        config = load_config(GenerateConfig, arguments("trainer.n_gpus_per_node=4", *more))
        return generation_memory_plan(config, "cpu", PromptBatch(256, 2)).pools[0].generation.peak

    replicas = "rollout.replicas.enable=true"
    assert peak() == peak(replicas)
    assert peak() < peak(replicas, "rollout.replicas.request_rows=128")
    more = peak(replicas, "rollout.replicas.request_rows=100000")
    assert more == peak("trainer.n_gpus_per_node=1")  # one rank has all 256 rows
    assert peak() > peak(replicas, "rollout.replicas.request_rows=8")
    assert peak() == peak("rollout.replicas.request_rows=8")  # without replicas it says nothing


VALIDATION = {
    "more responses per prompt": ("rollout.val_n=8", "data.val_batch_size=24"),
    "filters": (
        "rollout.val_sampling.temperature=1", "rollout.val_sampling.top_p=0.9",
        "data.val_batch_size=16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VALIDATION)
def test_a_training_run_plans_its_validation(tiny_task, tmp_path, case):
    def peak(*more):
        given = (f"actor_rollout_ref.{s}" if s.startswith("rollout") else s for s in more)
        base = [*two_steps(tiny_task, tmp_path), "data.max_prompt_length=2"]
        config = load_config(TrainConfig, [*base, *given])
        return memory_plan(config, "cpu").pools[0].generation.peak

    *of_sampling, batch = VALIDATION[case]
    assert peak(*of_sampling, batch) > peak(batch)
    assert peak(*of_sampling, batch, "data.val_files=[]") == peak("data.val_files=[]")
