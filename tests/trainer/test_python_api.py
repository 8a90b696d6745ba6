"""The Python API: what a program gives becomes files and settings, and runs as the command does."""

import asyncio
import inspect
import json
import os
import re
import signal
import sys
import threading
import types
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import quadriga
from quadriga import (
    GRPO,
    PPO,
    SFT,
    InputError,
    RayPPOTrainer,
    RewardModel,
    Run,
    TrainConfig,
    load_config,
)
from quadriga.cli.api import data_files, nested, rows_in
from quadriga.trainer.ingredients import load_ingredients

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{a} and {b}?", "answer": str(a + b)} for a in range(4) for b in range(2)]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
SMALL = {"steps": 2, "responses": 2, "max_response_length": 8, "lr": 1e-3, "loggers": ["jsonl"]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tiny_task):
    return str(tiny_task.model)


def program(model: str, more: str) -> str:
    """The ten lines of the README, with a model and sizes of a test."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = blocks[0]
    assert code.startswith("import quadriga")
    assert sum(map(bool, code.splitlines())) <= 10
    for found, own in (
        ("Qwen/Qwen2.5-0.5B-Instruct", model),
        ("lora=8", f"max_response_length=8, steps=2, batch_size=8, {more}"),
        ("run.model_path, ", "run.model_path, max_response_length=8, prompts="),
    ):
        assert found in code
        code = code.replace(found, own)
    return code


@pytest.mark.parametrize(
    "more",
    ["lora=2", pytest.param("backend='ray', num_cpus=2, device='cpu'", marks=pytest.mark.nightly)],
)
def test_the_ten_lines_of_the_readme_run(model, more, capsys):
    code = compile(program(model, more), "README.md", "exec")

    async def cell() -> None:  # as in a notebook, whose thread runs an event loop
        exec(code, {"__name__": "__main__"})

    asyncio.run(cell())
    (folder,) = Path("runs").iterdir()
    assert (
        "Answer(prompt=[{'role': 'user', 'content': 'What is 20 + 22?'}]" in capsys.readouterr().out
    )
    history = Run(folder).history
    assert [row["step"] for row in history] == [1, 2]
    assert {row["reward/failed"] for row in history} == {0.0}
    assert Run(folder).plot()._repr_png_().startswith(b"\x89PNG")


def test_functions_reach_the_reward_processes_with_every_column(model):
    offset = 3.0

    def closure(response, answer, *, unit="none", **columns):
        assert columns == {"prompt": columns["prompt"], "level": 2}
        return {
            "score": offset + len(answer),
            "pid": float(os.getpid()),
            "unit": float(unit == "m"),
        }

    async def waiting(text, **_):
        await asyncio.sleep(0)
        return len(text)

    def batch(prompts, completions, answer, **columns):
        assert columns["level"] == [2] * len(answer) and "unit" in columns
        return [2.0 if done[0]["role"] == "assistant" else 0.0 for done in completions]

    rows = [{**row, "level": 2, "unit": "m"} for row in CHATS]
    rewards = {"own": closure, "slow": waiting, "all": batch, "lambda": lambda response: 1.0}
    given = {"reward_weights": {"own": 0.5, "slow": 0}, "num_processes": 1, **SMALL, "steps": 1}
    run = GRPO(model, rewards, rows, **given).train()
    found = run.history[0]
    assert found["reward/mean"] == 0.5 * 4 + 2 + 1 and found["reward/failed"] == 0
    assert found["reward/extra/own/unit"] == 1.0
    assert found["reward/extra/own/pid"] not in (0.0, float(os.getpid()))
    assert {sample["data_source"] for sample in run.samples} == {None}


def test_a_run_is_trained_again_resumed_and_read(model, monkeypatch):
    seen = []

    def here(response, answer):
        seen.append(answer)
        return float(len(seen) % 2)

    grpo = GRPO(model, here, ROWS, val_data=ROWS[:2], num_processes=0, **SMALL)
    first = grpo.train()
    assert set(seen) == {row["answer"] for row in ROWS}
    second = grpo.train()  # the cell runs again: a run folder of its own
    assert first.folder != second.folder
    resumed = second.resume(steps=3)
    assert [row["step"] for row in resumed.history] == [0, 1, 2, 3]
    assert resumed.folder == second.folder and "val/score" in resumed.metrics
    with pytest.raises(InputError, match="needs the package pandas"):
        resumed.history.to_pandas()
    pandas = types.SimpleNamespace(DataFrame=lambda rows: ("frame", *rows))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert resumed.samples.to_pandas()[0] == "frame"
    with pytest.raises(InputError, match=r"folder='.*', and call its resume\(\)"):
        Run(resumed.folder).resume()
    with pytest.raises(InputError, match="holds no run"):
        Run("absent")
    result = quadriga.evaluate(
        resumed.model_path, ROWS, here, responses=2, temperature=1.0, max_response_length=8
    )
    assert result.summaries[0].responses == 2 * len(ROWS) and result.failed == 0


class Interrupted:
    """Sends Ctrl-C to its own process, once or twice, at an event."""

    def __init__(self, event, times):
        setattr(self, event, lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(times)])


@pytest.mark.parametrize(
    ("event", "times", "done"),
    [
        ("on_step", 1, [1]),
        ("on_step", 2, [1]),
        ("on_start", 1, []),
        pytest.param("on_save", 1, [1], marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.nightly)])
def test_ctrl_c_leaves_a_run_that_goes_on_and_no_process(model, backend, event, times, done):
    """One lets the step end; a second one, or one before step 1, ends the run at once."""
    more = {"save_freq": 1, "backend": backend, "num_cpus": 2, "device": "cpu"}
    grpo = GRPO(model, lambda response: float(len(response)), ROWS, **SMALL, **more,
                callbacks=[Interrupted(event, times)], async_save=False)  # fmt: skip
    before = signal.getsignal(signal.SIGINT)
    others = psutil.Process().children(recursive=True)  # of other tests

    async def cell() -> None:  # as in a notebook
        grpo.train()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert signal.getsignal(signal.SIGINT) is before
    assert not {*psutil.Process().children(recursive=True)} - {*others}
    (folder,) = Path("runs").iterdir()
    saved = sorted(path.name for path in (folder / "checkpoints").glob("global_step_*"))
    assert saved == [f"global_step_{step}" for step in done]
    grpo._callbacks = []
    assert [row["step"] for row in grpo.resume().history] == [1, 2]


@pytest.mark.parametrize("beside", ["folder", "object"])
def test_a_tokenizer_object_beside_a_model_is_saved_for_the_ranks(model, beside):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "own" + tokenizer.chat_template
    given = {**SMALL, "steps": 1, "num_processes": 0, "tokenizer": tokenizer}
    policy = AutoModelForCausalLM.from_pretrained(model) if beside == "object" else model
    run = GRPO(policy, lambda response: 1.0, ROWS, **given).train()
    assert AutoTokenizer.from_pretrained(run.model_path).chat_template.startswith("own")


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_a_reward_of_ingredients_may_return_a_tensor(train_overrides, form):
    config = load_config(TrainConfig, train_overrides)

    def reward(data):
        scores = data.batch["response_mask"] * 0.5
        extra = {"acc": [1.0] * len(data)}
        return scores if form == "tensor" else {"reward_tensor": scores, "reward_extra_info": extra}

    with closing(
        RayPPOTrainer(config, replace(load_ingredients(config), reward=reward))
    ) as trainer:
        trainer.fit()
    last = Run(config.trainer.default_local_dir).history[-1]
    assert last["reward/mean"] == 0.5 * last["response_length/mean"]
    assert last.get("reward/extra/acc") == (None if form == "tensor" else 1.0)


@pytest.mark.nightly
def test_model_objects_and_other_algorithms(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"steps": 1, "loggers": ["jsonl"]}
    rows = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in ROWS]
    done = SFT(own, rows, val_data=rows[:2], tokenizer=tokenizer, test_freq=1, **sizes).train()
    assert done.metrics["val/loss"] > 0 and (done.folder / "inputs" / "model").is_dir()
    chats = [
        {"messages": [*chat["prompt"], {"role": "assistant", "content": "3"}]} for chat in CHATS
    ]
    assert SFT(done.model_path, chats, **sizes).train().metrics["sft/loss"] > 0
    pairs = [{**row, "chosen": row["answer"], "rejected": "no"} for row in ROWS]
    assert RewardModel(model, pairs, **sizes).train().metrics["rm/loss"] > 0
    small = {**SMALL, "steps": 1}
    # A model object tells its tokenizer.
    assert (
        "critic/loss" in PPO(own, lambda text: 1.0, ROWS, critic_lr=1e-4, **small).train().metrics
    )
    answers = quadriga.generate(own, ["1 and 2?", "3?"], tokenizer=tokenizer, max_response_length=4)
    assert [len(answer.responses) for answer in answers] == [1, 1]


def one_argument(response): ...


def missing(response, solution): ...


def no_response(*, answer): ...


lock = threading.Lock()
BAD = {
    "typo": ({"lrr": 1}, r"no setting lrr; did you mean lr\?"),
    "of TRL": ({"num_generations": 8}, r"no setting num_generations; did you mean responses\?"),
    "far": (
        {"kl_los_coef": 1},
        r"no setting kl_los_coef; did you mean actor_rollout_ref.actor.kl_",
    ),
    "range": ({"responses": 0}, r"actor_rollout_ref\.rollout\.n must be at least 1, got 0"),
    "several": ({"dtype": "float32"}, r"dtype is the end of actor_rollout_ref\..* and \d+ others"),
    "arity": ({"reward": no_response}, r"'no_response' must have the parameters \(response, "),
    "type": ({"reward": 5}, r"'int' must be a function, got int: 5"),
    "twice": ({"reward": [missing, missing]}, r"two rewards are named 'missing'; name them"),
    "weights": ({"reward_weights": {"a": 1}}, r"reward_weights\['a'\]: there is no such reward"),
    "heavy": (
        {"reward": {"a": one_argument}, "reward_weights": {"a": "big"}},
        r"parts\.a\.weight must be a number, got the text 'big'",
    ),
    "swapped": ({"reward": ROWS, "data": one_argument}, r"'dict' must be a function, got dict: "),
    "none": ({"reward": []}, r"'list' must be a function, got list: \[\]"),
    "surrogate": ({"data": [{"prompt": "a\ud83d"}]}, r"train, row 0: .* surrogates not allowed"),
    "unnamed": ({"reward_weights": [1, 2]}, r"expected weights by name, .* got \[1, 2\]"),
    "column": (
        {"reward": missing},
        r"^train: row 0 cannot be scored: .* a column 'solution'; found answer",
    ),
    "prompt": ({"data": [{"text": "a"}]}, r"^train, row 0: no 'prompt'; found keys \['text'\]"),
    "null": ({"val_data": [{"prompt": None}]}, r"^val, row 0: no value of 'prompt'; found keys"),
    "columns": ({"data": {"prompt": ["a"]}}, r"a mapping with prompt; pass rows, as \[{'prompt"),
    "section": ({"trainer": 5}, r"trainer must be .*, got 5"),
    "name": ({"folder": 5}, r"trainer\.default_local_dir must be .*, got 5"),
    "rows": ({"data": [1]}, r"train, row 0: expected a dict, got 1"),
    "empty": ({"data": []}, r"train has no rows"),
    "splits": ({"data": {"train": ROWS}}, r"a mapping with train; pass one of these"),
    "stream": ({"data": iter(ROWS)}, r"got list_iterator; make a list of what it yields"),
    "image": ({"data": [{"prompt": "a", "x": lock}]}, r"row 0: a value of type lock cannot be wr"),
    "tokenizer": ({"tokenizer": 5}, r"tokenizer: expected a folder, a name of the hub, .* got int"),
    "relative": (
        {"model": "modle/tiny"},
        r"hf://modle/tiny cannot be .*; nor is there a folder mo",
    ),
    "model": ({"model": 5}, r"model: expected a folder, a name of the hub, .* got int"),
    "folder": ({"model": "./absent"}, r"absent does not exist"),
    "pickle": ({"reward": lambda text: (lock, 1)[1]}, r"cannot be sent to the reward processes"),
    "path": ({"reward": "absent.py:score"}, r"reward file .*absent\.py does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(model, case, tmp_path):
    given, message = BAD[case]
    given = {"model": model, "reward": one_argument, "data": ROWS, **SMALL, **given}
    with pytest.raises(InputError, match=message) as caught:
        GRPO(**given).train()
    assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("completion", [None, 3, [{"role": "assistant"}]])
def test_a_completion_that_is_no_text_is_named(model, completion):
    with pytest.raises(InputError, match=r"^train, row 0: each message of 'messages' must be"):
        SFT(model, [{"prompt": "a", "completion": completion}], steps=1).train()


def test_model_objects_that_ranks_cannot_read_are_refused(model):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.name_or_path = ""
    whole = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    adapted = AutoModelForCausalLM.from_config(config)
    adapted.peft_config = {}
    for own, more, message in (
        (whole, {}, "does not tell its tokenizer; pass tokenizer="),
        (whole, {"trainer": {"nnodes": 2}}, "2 nodes cannot read it"),
        (empty, {}, "weights that are not in this process"),
        (adapted, {}, "has adapters of PEFT"),
    ):
        with pytest.raises(InputError, match=message):
            GRPO(own, one_argument, ROWS, **more)


class Frame:
    columns = ("prompt", "n")

    def to_dict(self, orient):
        assert orient == "records"
        return [{"prompt": "a", "n": float("nan")}]


class Dataset:  # as `datasets.Dataset`
    def __len__(self):
        return 2

    def __iter__(self):
        return iter([{"prompt": "a", "n": np.int64(3)}, {"prompt": "b", "n": np.arange(2)}])


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (Frame(), [{"prompt": "a", "n": None}]),
        (Dataset(), [{"prompt": "a", "n": 3}, {"prompt": "b", "n": [0, 1]}]),
        (("a", "b"), [{"prompt": "a"}, {"prompt": "b"}]),
        (["a.jsonl", Path("b.parquet")], None),
        ("a.jsonl", None),
    ],
)
def test_forms_of_data(data, rows, tmp_path):
    files, _ = data_files(data, tmp_path, "train")
    if rows is None:
        assert rows_in(data, "train") is None and files[0] == "a.jsonl"
    else:
        assert [json.loads(line) for line in Path(files[0]).read_text().splitlines()] == rows


def test_keywords_are_names_of_settings():
    given = {"lr": 1e-5, "kl_loss_coef": 0.1, "trainer": {"save_freq": 3}, "trainer.seed": 4}
    assert nested(GRPO.KIND, GRPO.SHORT, given) == {
        "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}, "kl_loss_coef": 0.1}},
        "trainer": {"save_freq": 3, "seed": 4},
    }
    shown = inspect.signature(GRPO).parameters
    assert {"lr", "kl_loss_coef", "clip_ratio_high", "trainer"} <= set(shown)
    assert "dtype" not in shown and "critic_lr" in inspect.signature(PPO).parameters
    assert sys.modules["quadriga.cli.api"].model_name("Qwen/Qwen3-0.6B") == "hf://Qwen/Qwen3-0.6B"
