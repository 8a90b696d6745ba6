"""Engine and trainer agree before and after each of five training steps."""

from pathlib import Path

import pytest
from agreement import ENGINES, ENGINES_AND_MODELS, check_agreement, write_model, write_task

import megatron_on_cpu
from quadriga.config.commands import EvalConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig, TrainConfig
from quadriga.containment import import_file
from quadriga.engines import build_engine
from quadriga.observability.jsonl import read_jsonl
from quadriga.rollout import build_rollout
from quadriga.trainer.evaluation import run_evaluation
from quadriga.trainer.main import run_training
from quadriga.weight_sync.sync import WeightSync
from training_step import train_once

OPTIONS = {"vllm": {"kv_cache_mb": 64}, "sglang": {}}
STEPS = 5

pytestmark = [
    pytest.mark.skipif(not ENGINES, reason="no engine is installed; see make engines"),
    pytest.mark.timeout(1800),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("engine", "model"), ENGINES_AND_MODELS)
def test_greedy_tokens_equal_those_of_hf_after_each_step(tmp_path, engine, model):
    folder = write_model(model, tmp_path / "model")
    config = ModelConfig(path=folder)
    trainer = build_engine(config, EngineConfig(), OptimConfig(lr=0.01))
    ours = build_rollout(engine, config, dtype="float32", **OPTIONS[engine])
    hf = build_rollout("hf", config, dtype="float32")
    try:
        syncs = [WeightSync(trainer, target) for target in (ours, hf)]
        check_agreement(ours, hf)
        for version in range(1, STEPS + 1):
            before = ours.weights_digest()
            train_once(trainer, tokens=20)
            for sync in syncs:
                sync.run(version)
            assert ours.version == version
            assert not before.items() & ours.weights_digest().items()  # every weight is new
            check_agreement(ours, hf)
    finally:
        ours.close()
        hf.close()


OPTIONS_KEY = "actor_rollout_ref.rollout.options.tensor_parallel_size"
ACTOR_KEY = "actor_rollout_ref.actor.engine"
TENSOR_KEY = f"{ACTOR_KEY}.tensor_parallel_size"
PLACEMENTS = {
    "one rank": ["trainer.backend=local"],
    "two ranks": ["trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2"],
    "apart": [
        "trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2",
        "placement.actor=[0]", "placement.rollout=[1]",
    ],
}  # fmt: skip
COPIES = {
    "one copy on two ranks": [*PLACEMENTS["two ranks"], f"{OPTIONS_KEY}=2"],
    "actor and copy divided alike": [
        *PLACEMENTS["two ranks"], f"{OPTIONS_KEY}=2", f"{TENSOR_KEY}=2",
    ],
    # Ranks 0 and 2 hold a copy, ranks 1 and 3 another.
    "copies with strides": [
        "trainer.backend=ray", "trainer.num_cpus=4", "trainer.n_gpus_per_node=4",
        f"{OPTIONS_KEY}=2", f"{TENSOR_KEY}=4",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "placement", "steps"),
    [
        *(
            (engine, placement, 1)
            for engine in ENGINES
            for placement in PLACEMENTS
            if (engine, placement) != ("sglang", "two ranks")  # it starts slowly
        ),
        *(
            pytest.param(engine, placement, STEPS, marks=pytest.mark.nightly)
            for engine in ENGINES
            for placement in (PLACEMENTS if engine == "sglang" else PLACEMENTS | COPIES)
        ),
    ],
)
def test_a_run_trains_on_what_its_actor_computes(tmp_path, engine, placement, steps):
    given = [f"trainer.total_training_steps={steps}", *(PLACEMENTS | COPIES)[placement]]
    rows = rows_of_run(tmp_path, engine, *given)
    assert len(rows) == steps
    for row in rows:
        # The first ratio of a step is exp of a difference of at most this size.
        assert row["mismatch/max"] < 1e-3, row
        assert row["mismatch/beyond"] == 0


@pytest.mark.parametrize(
    ("engine", "copies"),
    [
        pytest.param(engine, copies, marks=[pytest.mark.nightly] * (copies == 1))
        for engine in ENGINES
        for copies in (1, 2)
        if engine == "vllm" or copies == 2  # SGLang has no copy on two ranks
    ],
)
def test_stages_of_megatron_train_for_an_engine(tmp_path, engine, copies):
    """Two pipeline stages send weights to a copy of the engine on both ranks, or to one on each."""
    (tmp_path / "on_cpu.py").write_text(megatron_on_cpu.USER_FILE)
    own = f"algorithm.user_files=[{tmp_path / 'on_cpu.py'}]", varying_reward(tmp_path)
    given = [*own, *PLACEMENTS["two ranks"]]
    engines = f"{ACTOR_KEY}.name=megatron", f"{ACTOR_KEY}.pipeline_parallel_size=2"
    size = [f"{OPTIONS_KEY}=2"] * (copies == 1)
    rows = rows_of_run(tmp_path, engine, *given, *engines, *size, "trainer.total_training_steps=2")
    assert [row["mismatch/max"] < 1e-3 for row in rows] == [True, True], rows
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_streamed_run_knows_the_weights_of_each_token(tmp_path, engine):
    """One generator and one trainer. With the same weights, their log-probabilities agree."""
    given = [
        varying_reward(tmp_path),
        "trainer.max_staleness=2",
        "actor_rollout_ref.rollout.update=in_flight",
        "actor_rollout_ref.rollout.slice_tokens=3",
    ]
    given += ["trainer.total_training_steps=4", "data.max_response_length=20"]
    rows = rows_of_run(tmp_path, engine, *PLACEMENTS["apart"], *given)
    assert max(row["staleness/max"] for row in rows) > 0
    order = list(read_jsonl(tmp_path / "run" / "stream.jsonl"))
    versions = [event["versions"] for event in order if "versions" in event]
    assert len(rows) == len(versions) == 4 and any(len(r) > 1 for of in versions for r in of)
    first = versions[0][0][0][0]  # of the first weight sync
    for step, (row, responses) in enumerate(zip(rows, versions, strict=True)):
        assert len(responses) == 16 and all(response == sorted(response) for response in responses)
        own = {version for response in responses for version, _ in response}
        assert first + step - 2 <= min(own) <= max(own) <= first + step
        assert (row["mismatch/max"] < 1e-3) == (own == {first + step})


GAME = """
class Environment:
    def reset(self, row): ...

    def step(self, action):
        from quadriga.agents.environments import Done, Observation
        size = sum(map(ord, action.text)) % 7
        return Done(reward=size) if action.turn == 3 else Observation(str(size), reward=size)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_episodes_of_several_turns(tmp_path, engine):
    """With observations between its turns, an engine samples what the trainer computes."""
    (tmp_path / "game.py").write_text(GAME)
    given = [
        f"agent.path={tmp_path / 'game.py'}", "agent.max_turn_tokens=6",
        "actor_rollout_ref.rollout.slice_tokens=3", "data.max_response_length=80",
        "trainer.total_training_steps=2",
    ]  # fmt: skip
    rows = rows_of_run(tmp_path, engine, *PLACEMENTS["one rank"], *given)
    assert [row["mismatch/max"] < 1e-3 for row in rows] == [True, True], rows
    assert all(row["agent/ended/done"] == 1 and row["agent/turns/mean"] == 3 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    played = {name: episodes_of(tmp_path, name) for name in ("hf", engine)}
    assert played["hf"] == played[engine]
    assert [len(episode["turns"]) for episode in played["hf"]] == [3] * 8


def episodes_of(tmp_path, engine):
    """What `quadriga eval` writes of the episodes of each problem, with greedy decoding."""
    given = [
        f"model.path={tmp_path / 'base'}", f"data_files=[{tmp_path / 'data' / 'test.parquet'}]",
        f"output={tmp_path / engine}", f"rollout.name={engine}", "rollout.dtype=float32",
        "rollout.slice_tokens=3", f"agent.path={tmp_path / 'game.py'}", "agent.max_turn_tokens=6",
        "max_response_length=80",
    ]  # fmt: skip
    run_evaluation(load_config(EvalConfig, given))
    rows = read_jsonl(tmp_path / engine / "responses.jsonl")
    return [episode for row in rows for episode in row["episodes"]]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_calls_a_tool(engine):
    """The example of a calculator, in a short form."""
    calculator = import_file(Path(__file__).parents[2] / "examples/agents/calculator.py", "example")
    *_, row = calculator.main(1, engine=engine, warm_steps=50)
    assert row["agent/tool_calls"] > row["agent/tool_errors"] >= 0


PROGRAM = """
from quadriga.agents.environments import Done

async def rollout(model, row):
    chat = [{"role": "user", "content": "First."}]
    chat += [await model.chat(chat), {"role": "user", "content": "Second."}]
    await model.chat(chat)
    others = [(await model.chat([{"role": "user", "content": "Third."}]))["content"] for _ in "ab"]
    return Done(len(others[0]) % 3 - 1, {"others": others[0] != others[1]})
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_an_episode_with_several_contexts(tmp_path, engine):
    """Each context is sampled and trained as a sequence of its own, and draws its own tokens."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    given = [
        f"agent.path={tmp_path / 'agent.py'}", "agent.name=rollout", "agent.max_turn_tokens=12",
        "actor_rollout_ref.rollout.slice_tokens=4", "data.max_response_length=140",
        "agent.on_error=fail", "trainer.total_training_steps=2",
    ]  # fmt: skip
    rows = rows_of_run(tmp_path, engine, *PLACEMENTS["one rank"], *given)
    assert [row["mismatch/max"] < 1e-3 for row in rows] == [True, True], rows
    names = ("agent/ended/done", "agent/others", "agent/contexts")
    assert [[row[name] for name in names] for row in rows] == [[1, 1, 3]] * 2


def varying_reward(tmp_path):
    """The setting of a reward that differs between responses."""
    (tmp_path / "rule.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(sum(map(ord, solution_str)) % 7)"
    )
    return f"reward.path={tmp_path / 'rule.py'}"


def rows_of_run(tmp_path, engine, *given, model=lambda folder: None):
    """The metrics of a run whose log-probabilities are compared in each step. `model` writes
    another model over that of the task."""
    write_task(tmp_path, "hidden_size=128", "num_heads=4", "num_kv_heads=4")
    model(tmp_path / "base")
    config = load_config(
        TrainConfig,
        [f"actor_rollout_ref.model.path={tmp_path / 'base'}",
         f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]",
         f"data.val_files=[{tmp_path / 'data' / 'test.parquet'}]",
         "data.train_batch_size=8", "data.max_response_length=12",
         "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
         "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.dtype=float32",
         "actor_rollout_ref.actor.engine.dtype=float32",
         f"actor_rollout_ref.rollout.name={engine}", "algorithm.adv_estimator=grpo",
         "actor_rollout_ref.rollout.mismatch.bound=1e-3",
         # Rows without an advantage are measured too: all rewards of a step can be equal.
         "actor_rollout_ref.actor.skip_zero_advantages=false",
         "trainer.test_freq=0",
         "trainer.threads_per_worker=1", f"trainer.default_local_dir={tmp_path / 'run'}",
         "trainer.loggers=[jsonl]", *given],
    )  # fmt: skip
    run_training(config)
    return [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
