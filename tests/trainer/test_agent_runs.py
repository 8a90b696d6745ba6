"""Runs with environments: what is trained is what was sampled, and observations are not trained."""

import shutil
from pathlib import Path

import pytest
import torch
from run_cases import noted
from transformers import AutoTokenizer

from quadriga.agents.environments import Action, Done
from quadriga.agents.turns import Turns
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, RewardError
from quadriga.models.loading import tokenizer_of
from quadriga.observability.jsonl import read_jsonl, read_samples
from quadriga.protocol import DataProto, fields
from quadriga.streams.episodes import turn_spans
from quadriga.streams.playing import make_episodes
from quadriga.streams.queue import PromptGroup
from quadriga.trainer import stages
from quadriga.trainer.ingredients import load_ingredients
from quadriga.trainer.main import run_training

GAME = """
from quadriga.agents.environments import Done, Observation

class Environment:
    def reset(self, row):
        self.limit = 3 + len(row["reward_model"]["ground_truth"])

    async def step(self, action):
        size = sum(map(ord, action.text)) % 5
        if size == 0 or action.turn == self.limit:
            return Done(reward=size / 10, metrics={"ends": 1})
        return Observation(f"{action.turn}: {size}", reward=-size / 10)
"""


@pytest.fixture
def game(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    return [
        f"agent.path={tmp_path / 'game.py'}", "agent.max_turn_tokens=4", "agent.max_turns=5",
        "actor_rollout_ref.rollout.slice_tokens=4", "data.max_response_length=80",
    ]  # fmt: skip


@pytest.fixture
def batches(monkeypatch) -> list[DataProto]:
    """The batches that the steps of runs have trained."""
    found: list[DataProto] = []
    noted(monkeypatch, stages, "measure_batch", lambda batch: found.append(batch.select()))
    return found


def rows_of(batch: DataProto):
    names = (
        fields.RESPONSES, fields.RESPONSE_MASK, fields.TOKEN_VERSIONS, fields.TOKEN_LEVEL_SCORES,
        fields.ROLLOUT_LOG_PROBS,
    )  # fmt: skip
    attention = batch.batch[fields.ATTENTION_MASK][:, -batch.batch[fields.RESPONSES].shape[1] :]
    arrays = batch.non_tensor_batch[fields.COLUMNS], batch.non_tensor_batch[fields.EPISODE]
    yield from zip(*(batch.batch[name] for name in names), attention, *arrays, strict=True)


def model_with(train_overrides, template, folder):
    """Return a copy of the model of a run, with another chat template, and its tokenizer."""
    [model] = [s for s in train_overrides if s.startswith("actor_rollout_ref.model.path=")]
    shutil.copytree(model.partition("=")[2], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def check_episodes(batch: DataProto, config: TrainConfig) -> int:
    """Play each episode again, from the texts of its turns, and compare all tokens. Return how many
    turns they have."""
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    turns, scope, count = Turns(tokenizer), {}, 0
    exec(Path(config.agent.path).read_text(), scope)
    import asyncio

    for ids, mask, versions, scores, log_probs, attention, columns, about in rows_of(batch):
        environment, spans = scope["Environment"](), turn_spans(mask)
        environment.reset(columns)
        length, expected = int(attention.sum()), torch.zeros(len(ids))
        assert attention[:length].all() and not (versions[:length] == 0).any()
        for turn, (first, last) in enumerate(spans, 1):
            own = ids[first:last].tolist()
            action = Action(tokenizer.decode([t for t in own if t not in turns.end_ids]), turn)
            behind = spans[turn][0] if turn < len(spans) else length
            assert (versions[first:last] >= 0).all() and (log_probs[first:last] < 0).all()
            assert (versions[last:behind] == -2).all() and (log_probs[last:behind] == 0).all()
            if length == len(ids) and turn == len(spans):
                break  # the response is full: the environment was not asked
            answer = asyncio.run(environment.step(action))
            expected[last - 1] = answer.reward
            if isinstance(answer, Done):
                assert turn == len(spans) and about["status"] == "done" and behind == last
            elif turn == len(spans):
                assert about["status"] in ("turns", "length") and behind == last
            else:
                messages = [{"role": "user", "content": answer.messages}]
                assert ids[last:behind].tolist() == turns.following_ids([(own, messages)])[0]
        torch.testing.assert_close(scores, expected)
        assert about["turns"] == len(spans)
        count += len(spans)
    return count


def check_samples(config: TrainConfig, batch: DataProto) -> None:
    """Check that the samples of the first step hold its episodes by turns."""
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    samples = read_samples(Path(config.trainer.default_local_dir) / "samples.jsonl")
    found = [s for s in samples if s.step == 1 and s.split == "train"]
    assert found
    rows = {
        tokenizer.decode(ids[: int(attention.sum())]): scores[mask.bool()].tolist()
        for ids, mask, _, scores, _, attention, *_ in rows_of(batch)
    }
    for sample in found:
        text = "".join(turn["sampled"] + turn["observed"] for turn in sample.turns)
        rewards = [t["reward"] for t in sample.turns if t["reward"]]
        assert [s for s in rows[text] if s] == pytest.approx(rewards)
        assert sum(sum(turn["tokens"]) for turn in sample.turns) == sample.response_tokens
        assert sum(n for _, n in sample.weight_versions) == sum(
            t["tokens"][0] for t in sample.turns
        )
        *before, last = sample.turns
        assert all(t["source"] == "user" and min(t["seconds"]) >= 0 for t in before)
        assert last["observed"] == last["source"] == ""


@pytest.mark.parametrize("staleness", [0, 1])
def test_episodes_are_trained_as_they_were_played(train_overrides, game, batches, staleness):
    config = load_config(
        TrainConfig, [*train_overrides, *game, f"trainer.max_staleness={staleness}",
                      "trainer.total_training_steps=3", "trainer.test_freq=3"],
    )  # fmt: skip
    run_training(config)
    assert len(batches) == 3
    assert sum(check_episodes(batch, config) for batch in batches) > 3 * 16 * 1.5
    rows = [*read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl")][1:]
    # Old and rollout log-probabilities agree, so the trainer has seen what the policy has seen.
    assert rows[0]["mismatch/max"] < 1e-4 and rows[0]["agent/turns/mean"] > 1.5
    assert all(0 < row["agent/ended/done"] <= 1 and "val/score" in rows[-1] for row in rows)
    assert rows[0]["agent/ends"] == pytest.approx(rows[0]["agent/ended/done"])
    check_samples(config, batches[0])


def test_the_number_of_processes_and_of_rows_changes_nothing(
    train_overrides, game, batches, tmp_path
):
    for number, more in enumerate((["agent.processes=1"], ["agent.concurrency=3"])):
        folder = f"trainer.default_local_dir={tmp_path / str(number)}"
        run_training(load_config(TrainConfig, [*train_overrides, *game, folder, *more]))
    for one, other in zip(batches[:2], batches[2:], strict=True):
        assert torch.equal(one.batch[fields.RESPONSES], other.batch[fields.RESPONSES])
        assert torch.equal(one.batch[fields.TURN_REWARDS], other.batch[fields.TURN_REWARDS])


def test_what_reset_returns_is_in_the_prompt(train_overrides, game, batches, tmp_path):
    text = GAME.replace("self.limit =", "self.limit = 3 or")
    text += '\n    def reset(self, row):\n        self.limit = 9\n        return "Now."\n'
    (tmp_path / "game.py").write_text(text)
    # Token 4 begins a turn of the assistant, so observations end with a token that ends responses.
    stops = "actor_rollout_ref.rollout.sampling.stop_token_ids=[4]"
    config = load_config(TrainConfig, [*train_overrides, *game, "agent.reset_tokens=24", stops])
    run_training(config)
    turns = Turns(tokenizer_of(config.actor_rollout_ref.model))
    batch = batches[0]
    for prompt, raw, length in zip(
        batch.batch[fields.PROMPTS], batch.non_tensor_batch[fields.RAW_PROMPT],
        batch.batch[fields.PROMPT_LENGTH].tolist(), strict=True,
    ):  # fmt: skip
        assert raw[-1] == {"role": "user", "content": "Now."} and len(raw) == 2
        assert prompt[-length:].tolist() == turns.prompt_ids(raw)
    assert (batch.batch[fields.TOKEN_VERSIONS] == -2).any()


FAILS = """
class Environment:
    def reset(self, row):
        self.fails = int(row["reward_model"]["ground_truth"]) % 2

    def step(self, action):
        from quadriga.agents.environments import Done
        if self.fails:
            raise ValueError("of the user")
        return Done(reward=1.0)
"""


def test_a_failed_episode_is_left_out(train_overrides, game, batches, tmp_path, caplog):
    (tmp_path / "game.py").write_text(FAILS)
    base = [*train_overrides, *game, "trainer.total_training_steps=1"]
    run_training(load_config(TrainConfig, [*base, "agent.on_error=mask"]))
    for _, mask, _, scores, *_, columns, about in rows_of(batches[0]):
        fails = int(columns["reward_model"]["ground_truth"]) % 2
        assert about["status"] == ("raised" if fails else "done")
        assert float(scores.sum()) == 1 - fails and bool(mask.any()) != bool(fails)
    assert "ValueError: of the user. They are left out of the update" in caplog.text
    more = ["agent.on_error=fail", f"trainer.default_local_dir={tmp_path / 'fails'}"]
    with pytest.raises(RewardError, match=r"or set agent\.on_error to zero or mask"):
        run_training(load_config(TrainConfig, [*base, *more]))


FAILS_IN_RESET = """
from quadriga.agents.environments import Done

class Environment:
    def reset(self, row):
        if row["reward_model"]["ground_truth"] == "4":
            raise ValueError("of the user")

    def step(self, action):
        return Done(reward=len(action.text) % 3)
"""


def test_prompts_without_an_episode_do_not_end_a_streamed_run(train_overrides, game, tmp_path):
    (tmp_path / "game.py").write_text(FAILS_IN_RESET)
    more = ["trainer.max_staleness=1", "trainer.total_training_steps=6", "agent.on_error=mask"]
    config = load_config(TrainConfig, [*train_overrides, *game, *more])
    run_training(config)
    rows = [*read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl")]
    assert len(rows) == 7 and any(row.get("agent/raised", 0) > 0 for row in rows)


def test_an_environment_that_always_fails_ends_the_run(train_overrides, game, tmp_path):
    (tmp_path / "game.py").write_text(FAILS_IN_RESET.replace('== "4"', "is not None"))
    with pytest.raises(RewardError, match=r"Correct agent\.path=.*game.py$"):
        run_training(load_config(TrainConfig, [*train_overrides, *game]))


def test_a_group_that_begins_again_has_the_prompt_of_reset_once(train_overrides, game, tmp_path):
    text = GAME + '\n    def reset(self, row):\n        self.limit = 9\n        return "Now."\n'
    (tmp_path / "game.py").write_text(text)
    config = load_config(TrainConfig, [*train_overrides, *game, "agent.reset_tokens=24"])
    ingredients = load_ingredients(config)
    episodes = make_episodes(config, ingredients.tokenizer)
    prompts = next(iter(ingredients.train_loader))
    group = PromptGroup(0, stages.expand_prompts(prompts, n=1, seed=0).batch.select_idxs([0]))
    found = []
    for _ in range(2):
        episodes.begin(group)
        assert [len(part.rows) for part in episodes.settle()] == [1]
        found.append(group.prompts.batch[fields.INPUT_IDS].tolist())
        episodes.forget([group])
    episodes.close()
    assert found[0] == found[1] and len(group.prompts.non_tensor_batch[fields.RAW_PROMPT][0]) == 2


def test_a_run_goes_on_with_its_episodes(train_overrides, game, batches, tmp_path):
    base = [*train_overrides, *game, "trainer.max_staleness=1", "trainer.save_freq=1",
            "trainer.resume_mode=auto"]  # fmt: skip
    run_training(load_config(TrainConfig, [*base, "trainer.total_training_steps=2"]))
    config = load_config(TrainConfig, [*base, "trainer.total_training_steps=4"])
    run_training(config)
    assert len(batches) == 4
    assert sum(check_episodes(batch, config) for batch in batches) > 0
    trained = [i for batch in batches for i in batch.non_tensor_batch[fields.INDEX].tolist()]
    assert len(set(trained)) == 4 * 8 and len(trained) == 4 * 16, "each prompt once"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["reward.path=rule.py"], "reward: is not called, because the environment scores"),
        (["agent.max_turn_tokens=100"], "is above data.max_response_length=80"),
        (["agent.spread=true"], "needs the nodes of trainer.backend=ray"),
        (["reward.spread=true"], "reward.spread=true needs a training with trainer.backend=ray"),
        (["agent.name=Gone"], "agent.name=Gone of agent.path=.*does not exist"),
        (["agent.max_turns=0"], "agent.max_turns"),
    ],
)
def test_settings_that_do_not_fit_are_refused(train_overrides, game, more, words, tmp_path, rule):
    more = [rule if entry.startswith("reward.path") else entry for entry in more]
    with pytest.raises(ConfigError, match=words):
        run_training(load_config(TrainConfig, [*train_overrides, *game, *more]))


TOOLS = """
from dataclasses import replace
from quadriga.agents.tools import ToolEnvironment

def add(a: int, b: int):
    '''Add.

    Args:
        a: the first
        b: the second
    '''
    return a + b

class Environment(ToolEnvironment):
    tools = [add]

    async def step(self, action):  # a random model calls no tool
        call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
        return await super().step(replace(action, text=call if action.turn == 1 else "7"))

    def reward(self, answer):
        return float(answer == "7" and self.row["reward_model"]["ground_truth"] != "")
"""
TEMPLATE = """
{%- if tools %}{{ '<|system|>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""  # noqa: E501


def test_tools_are_in_the_prompt_and_their_results_in_the_episode(
    train_overrides, game, batches, tmp_path
):
    (tmp_path / "game.py").write_text(TOOLS)
    folder, tokenizer = model_with(train_overrides, TEMPLATE, tmp_path / "model")
    more = [f"actor_rollout_ref.model.path={folder}", "data.max_prompt_length=400"]
    run_training(load_config(TrainConfig, [*train_overrides, *game, *more]))
    batch = batches[0].batch
    for prompt, ids, length, scores in zip(
        batch[fields.PROMPTS], batch[fields.RESPONSES], batch[fields.PROMPT_LENGTH].tolist(),
        batch[fields.TOKEN_LEVEL_SCORES], strict=True,
    ):  # fmt: skip
        assert '"name": "add"' in tokenizer.decode(prompt[-length:])
        assert "<|tool|>7<|end|><|assistant|>" in tokenizer.decode(ids)
        assert scores.sum() == 1.0


PROGRAM = """
async def rollout(model, row):
    chat = [{"role": "user", "content": "First."}]
    chat += [await model.chat(chat), {"role": "user", "content": "Second."}]
    await model.chat(chat)
    third = await model.chat([{"role": "user", "content": "Third."}])
    return len(third["content"]) % 3 - 1
"""


@pytest.mark.parametrize("more", [[], ["trainer.max_staleness=1", "algorithm.adv_estimator=gae"]])
def test_the_contexts_of_a_function_are_trained_as_they_were_sampled(
    train_overrides, game, batches, tmp_path, more
):
    (tmp_path / "game.py").write_text(PROGRAM)
    config = load_config(
        TrainConfig, [*train_overrides, *game, "agent.name=rollout", "agent.max_turn_tokens=5",
                      "actor_rollout_ref.rollout.n=2", *more],
    )  # fmt: skip
    run_training(config)
    turns = Turns(tokenizer_of(config.actor_rollout_ref.model))

    def begins(text):
        return turns.prompt_ids([{"role": "user", "content": text}])

    rows = [*read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl")][1:]
    assert rows[0]["mismatch/max"] < 1e-4
    # A step whose groups were all scored before it has no metrics of its own scores.
    assert {row.get("agent/contexts", 2) for row in rows} == {2}
    for sample in read_samples(Path(config.trainer.default_local_dir) / "samples.jsonl"):
        sources = [turn["source"] for turn in sample.turns]
        assert sources == ["user", "user; a context begins", ""]
        assert sample.turns[1]["observed"] == "<|user|>Third.<|end|><|assistant|>"
    for batch in batches:
        tensors = batch.batch
        for prompt, ids, mask, contexts, positions in zip(
            tensors[fields.PROMPTS], tensors[fields.RESPONSES], tensors[fields.RESPONSE_MASK],
            tensors[fields.ATTENTION_MASK], tensors[fields.POSITION_IDS], strict=True,
        ):  # fmt: skip
            width = len(prompt)
            (f1, l1), (f2, l2), (f3, l3) = turn_spans(mask)
            assert contexts[:width].sum() == len(begins("First."))
            assert prompt[contexts[:width] == 1].tolist() == begins("First.")
            second = [{"role": "user", "content": "Second."}]
            assert ids[l1:f2].tolist() == turns.following_ids([(ids[f1:l1].tolist(), second)])[0]
            assert ids[l2:f3].tolist() == begins("Third.")
            numbers = contexts[width:]
            assert (numbers[f1:l2] == 1).all() and (numbers[l2:l3] == 2).all()
            assert positions[width + l2 : width + l3].tolist() == list(range(l3 - l2))


TALK = """
class Environment:
    def reset(self, row): ...

    def step(self, action):
        from quadriga.agents.environments import Done
        return Done(reward=len(action.text) % 3) if action.turn == 3 else "go on"
"""
MARKS = """
{%- for m in messages -%}
<|{{ m.role }}|>{{ "(before) " if m.role == "assistant" and not loop.last }}{{ m.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""


def test_a_template_that_writes_earlier_turns_in_another_way_begins_contexts(
    train_overrides, game, batches, tmp_path
):
    (tmp_path / "game.py").write_text(TALK)
    folder, tokenizer = model_with(train_overrides, MARKS, tmp_path / "model")
    more = [f"actor_rollout_ref.model.path={folder}", "data.max_response_length=200"]
    for number, history in enumerate(("template", "sampled")):
        own = [f"agent.history={history}", f"trainer.default_local_dir={tmp_path / history}"]
        run_training(load_config(TrainConfig, [*train_overrides, *game, *more, *own]))
        [row, *_] = [*read_jsonl(tmp_path / history / "metrics.jsonl")][1:]
        assert row["agent/rewritten_turns"] == 2 - 2 * number and row["mismatch/max"] < 1e-4
    for ids in batches[0].batch[fields.RESPONSES]:
        text = tokenizer.decode(ids)
        assert text.count("<|assistant|>(before) ") == 3  # of one turn, and then of two
