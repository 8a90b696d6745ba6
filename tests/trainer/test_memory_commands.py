"""The memory plans of `quadriga sft`, `rm`, `generate` and `eval`, and the refusal of a run."""

import json

import pytest

from quadriga.cli.main import main
from quadriga.config.commands import GenerateConfig, RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.trainer import evaluation
from quadriga.trainer.checks import memory
from quadriga.trainer.checks.memory import GIB, generation_plan, rm_plan, sft_plan
from quadriga.trainer.evaluation import load_prompts
from quadriga.trainer.fine_tuning import load_pairs, load_sft_rows


def pair(chosen, rejected, question="3 + 4"):
    return {
        name: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", chosen), ("rejected", rejected))
    }


PAIRS = [pair("#### 7", f"#### {wrong}") for wrong in (8, 9)] * 8


@pytest.fixture
def arguments(tiny_task, tmp_path):
    """arguments("rm", "a=b", …) returns the arguments of a run of one step."""

    def make(command, *more, pairs=PAIRS):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
        if command in ("generate", "eval"):
            files = f"data_files={tiny_task.data('test')}"
            ranks = ("trainer.device=cpu", "trainer.threads_per_worker=1", "max_response_length=6")
            return [f"model.path={tiny_task.model}", files, *ranks, *more]
        return [
            f"model.path={tiny_task.model}",
            f"data.train_files={file if command == 'rm' else tiny_task.data('sft')}",
            "data.train_batch_size=8", "trainer.total_training_steps=1", "trainer.backend=local",
            "trainer.loggers=[jsonl]", "trainer.threads_per_worker=1",
            f"trainer.default_local_dir={tmp_path / 'run'}", *more,
        ]  # fmt: skip

    return make


@pytest.fixture
def plan(arguments):
    """plan("sft", "a=b", …) returns the plan of a run for the rows of its data."""

    def make(command, *more, device="cpu", pairs=PAIRS):
        given = arguments(command, *more, pairs=pairs)
        if command == "rm":
            config = load_config(RMConfig, given)
            return rm_plan(config, device, load_pairs(config).lengths)
        if command == "sft":
            config = load_config(SFTConfig, given)
            rows = load_sft_rows(config)
            own = None if rows.val_conversations is None else rows.val_conversations.lengths
            return sft_plan(config, device, rows.train.lengths, rows.val_prompts, own)
        config = load_config(GenerateConfig, given)
        return generation_plan(config, device, load_prompts(config))

    return make


def limit(needed: float) -> str:
    return f"trainer.device_memory_gb={needed / GIB}"


STARTS = {
    "rm": "fine_tuning.open_backend",
    "sft": "fine_tuning.open_backend",
    "generate": "evaluation.rollout_group",
}


@pytest.mark.parametrize("command", STARTS)
def test_a_run_that_does_not_fit_is_refused_before_a_rank_starts(
    command, arguments, plan, tmp_path, capsys, monkeypatch
):
    output = [f"output={tmp_path / 'out.jsonl'}"] if command == "generate" else []
    needed = plan(command).needed
    with monkeypatch.context() as context:
        context.setattr(f"quadriga.trainer.{STARTS[command]}", lambda *_: pytest.fail("started"))
        assert main([command, *arguments(command, *output, limit(needed - 1000))]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the run needs " in line and f"ranks × GiB = 1 × {needed / GIB:.3g} (" in line
    remedies = {"generate": ("lower rollout.micro_batch_size=256 (", "or use a smaller model")}.get(
        command, ("set model.gradient_checkpointing=true (", "max_tokens_per_micro_batch=16384")
    )
    for text in (*remedies, "trainer.check_memory=false"):
        assert text in line
    assert not (tmp_path / "run").exists() and not (tmp_path / "out.jsonl").exists()
    overwrite = "overwrite=true" if command == "generate" else "trainer.overwrite=true"
    assert main([command, *arguments(command, *output, limit(needed + 1000), overwrite)]) == 0


def test_the_rows_of_the_plan_are_those_of_the_longest_pair(arguments, plan):
    """A pair with two prompts shares nothing: the plan counts both of its rows."""
    config = load_config(RMConfig, arguments("rm"))
    lengths = load_pairs(config).lengths
    assert 0 < lengths.own < lengths.longest
    (pool,) = plan("rm", device="cuda").pools
    assert set(pool.phases) == {"scores", "update of the reward_model"}
    apart = {**pair("#### 7", "#### 7"), "rejected": pair("", "#### 7", "30 + 40 + 50")["rejected"]}
    (longer,) = plan("rm", device="cuda", pairs=[apart, *PAIRS]).pools
    assert longer.engines["reward_model"].peak("backward") > pool.engines["reward_model"].peak(
        "backward"
    )


def test_fine_tuning_plans_its_validation(plan, tiny_task):
    (pool,) = plan("sft").pools
    assert list(pool.phases) == ["update of the actor"] and pool.generation is None
    validated = f"data.val_files={tiny_task.data('test')}"
    for dtype, copies in (("float32", 0), ("bfloat16", 1)):
        (pool,) = plan("sft", validated, f"engine.dtype={dtype}").pools
        assert {"generation", "log-probabilities", "weight sync"} < set(pool.phases)
        own = pool.phases["generation"].get("rollout weights", 0)
        assert own == copies * pool.generation.held["weights"]


def test_rows_and_tokens_limit_the_micro_batch_of_an_update(plan):
    def peak(*more):
        return plan("sft", *more).pools[0].engines["actor"].peak("backward")

    three, fewer = "data.micro_batch_size_per_gpu=3", "engine.max_tokens_per_micro_batch=54"
    assert peak(three, fewer) < peak(three) < peak()
    assert peak(three, fewer, "engine.use_dynamic_bsz=false") == peak(three)


@pytest.mark.parametrize(("command", "unit"), [("sft", "rows"), ("rm", "pairs")])
def test_the_command_plans_the_rows_of_the_data(command, unit, arguments, plan, tmp_path, capsys):
    less = limit(plan(command).needed - 1000)
    assert main(["plan", command, *arguments(command, less)]) == 0
    text = capsys.readouterr().out
    shown = f"{unit + ' per step':<23}8, 8 on each of 1 data ranks", "longest conversation"
    for line in (*shown, "update of the", "lower engine.max_tokens_per_micro_batch"):
        assert line in text
    assert not (tmp_path / "run").exists()
    assert main(["plan", command]) == 0
    assert "set model.path and data.train_files" in capsys.readouterr().out


def test_the_command_plans_generation(tiny_task, capsys):
    path, small = f"model.path={tiny_task.model}", "rollout.micro_batch_size=16"
    more = ["n=2", "sampling.temperature=1", "trainer.n_gpus_per_node=4", small]
    assert main(["plan", "generate", path, *more]) == 0
    text = capsys.readouterr().out
    assert "responses of a batch   128 = 64 prompts × 2, 32 on each of 4 ranks" in text
    assert "at once on a rank    16 of up to 512 + 512 tokens" in text
    assert "rollout KV cache" in text and "the run fits" in text
    vllm = ["rollout.name=vllm", "rollout.options.tensor_parallel_size=2", "trainer.device=cuda"]
    assert main(["plan", "generate", path, *more, *vllm, "trainer.device_memory_gb=32"]) == 0
    text = capsys.readouterr().out
    assert "64 on each of 4 ranks" in text and "the run fits" in text  # two compute the same rows
    large = ["trainer.device_memory_gb=32", "+rollout.options.kv_cache_mb=40000"]
    assert main(["plan", "generate", path, *more, *vllm, *large]) == 0
    assert "lower rollout.options.kv_cache_mb=40000 (" in capsys.readouterr().out
    assert main(["plan", "generate"]) == 2
    assert "model.path is empty" in capsys.readouterr().err


def test_a_refusal_leaves_the_output_and_a_complete_one_needs_no_memory(
    arguments, tmp_path, capsys, monkeypatch
):
    output, small = f"output={tmp_path / 'out.jsonl'}", "trainer.device_memory_gb=0.4"
    assert main(["generate", *arguments("generate", output)]) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr(evaluation, "rollout_group", lambda *_: pytest.fail("ranks were started"))
    assert main(["generate", *arguments("generate", output, small)]) == 0
    again = arguments("generate", output, small, "seed=1", "overwrite=true")
    assert main(["generate", *again]) == 2
    assert "trainer.check_memory=false" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    for command, one in (("generate", ("prompt=3 + 4", "data_files=[]")), ("eval", ())):
        assert main([command, *arguments(command, *one, small)]) == 2
        assert "trainer.check_memory=false" in capsys.readouterr().err


def test_the_rows_of_a_request_are_planned(arguments):
    def rows(*more):
        given = arguments("generate", "batch_size=256", "trainer.n_gpus_per_node=4", *more)
        return memory.generated_rows(load_config(GenerateConfig, given), None)[1]

    replicas = "rollout.replicas.enable=true"
    assert rows() == rows(replicas) == rows("rollout.replicas.request_rows=8") == 64
    assert rows(replicas, "rollout.replicas.request_rows=128") == 128
    assert rows(replicas, "rollout.replicas.request_rows=100000") == 256
