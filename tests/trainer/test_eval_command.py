"""`quadriga eval`: responses of a model or of files, scored and summarised."""

import json
from pathlib import Path

import pytest

from quadriga.config.commands import EvalConfig
from quadriga.config.loading import load_config
from quadriga.errors import ConfigError, DataError, RewardError
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer import evaluation as generation
from quadriga.trainer.evaluation import Evaluation, run_evaluation

GSM, OWN = "openai/gsm8k", "quadriga/arithmetic"


def row(source: str, truth: str, *texts: str) -> dict[str, object]:
    return {
        "prompt": "?",
        "data_source": source,
        "reward_model": {"ground_truth": truth},
        "responses": list(texts),
    }


@pytest.fixture
def evaluate(tmp_path):
    """evaluate([row, …], "n=…") scores the rows of a file."""

    def run(rows: list[dict[str, object]], *more: str) -> Evaluation:
        file = tmp_path / "responses.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_evaluation(
            load_config(
                EvalConfig, [f"response_files={file}", f"output={tmp_path / 'eval'}", *more]
            )
        )

    return run


@pytest.fixture
def of_model(tiny_task, tmp_path):
    """of_model("n=2", …) generates and scores; returns the folder."""

    def run(*more: str) -> Path:
        return run_evaluation(
            load_config(
                EvalConfig,
                [f"model.path={tiny_task.model}", f"data_files={tiny_task.data('test')}", "n=4",
                 "sampling.temperature=1", "max_response_length=6", "batch_size=6",
                 "trainer.threads_per_worker=1", "trainer.device=cpu",
                 f"output={tmp_path / 'eval'}", *more],
            )
        ).folder  # fmt: skip

    return run


def results_in(folder: Path) -> dict[str, object]:
    return json.loads((folder / "results.json").read_text())


ROWS = [
    row(GSM, "7", "#### 7", "#### 8", "so #### 7.0", "seven"),
    row(GSM, "9", "#### 1", "#### 2", "#### 2", "#### 9"),
    row(OWN, "3", "#### 3", "#### 3", "#### 4", "#### 4"),
]


def test_responses_of_files_by_hand(evaluate, tmp_path) -> None:
    """2, 1 and 2 of 4 responses are correct; the majorities are 7, 2, and 3 tied with 4."""
    found = {s.data_source: s.metrics for s in evaluate(ROWS, "resamples=50").summaries}
    assert (found[GSM]["maj@4"].value, found[OWN]["maj@4"].value) == (0.5, 0.5)
    assert found["overall"]["mean@4"].value == pytest.approx(5 / 12)
    written = results_in(tmp_path / "eval")
    assert [source["data_source"] for source in written["sources"]] == [GSM, OWN, "overall"]
    mean = written["sources"][0]["metrics"]["mean@4"]
    assert mean["value"] == 0.375 and mean["low"] in (0.25, 0.375) and mean["high"] == 0.5
    samples = list(read_jsonl(tmp_path / "eval" / "samples.jsonl"))
    assert [(s["index"], s["answer"], s["score"]) for s in samples[:4]] == [
        (0, "7.0", 1.0), (0, "8.0", 0.0), (0, "7.0", 1.0), (0, None, 0.0),
    ]  # fmt: skip
    assert (tmp_path / "eval" / "results.png").read_bytes().startswith(b"\x89PNG")


RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "boom":
        raise ValueError("planted")
    return {"score": len(solution_str) / 10, "pred": solution_str[:1], "length": len(solution_str)}
"""


def test_the_rule_of_the_user_scores_and_names_the_answer(evaluate, tmp_path) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    rows = [row("mine", "", "ab", "abcd", "boom", "x")]
    done = evaluate(rows, f"reward.path={tmp_path / 'rule.py'}", "correct_at=0.4")
    (found,) = done.summaries
    assert done.failed == 1
    assert found.metrics["mean@4"].value == pytest.approx(0.7 / 4)
    assert found.metrics["maj@4"].value == pytest.approx(0.3)
    assert found.metrics["pass@1"].value == 0.25
    samples = list(read_jsonl(tmp_path / "eval" / "samples.jsonl"))
    assert samples[2]["status"] == "raised" and "planted" in samples[2]["detail"]
    assert samples[0]["extra"]["length"] == 2.0
    with pytest.raises(RewardError, match="planted"):
        evaluate(rows, f"reward.path={tmp_path / 'rule.py'}", "reward.on_failure=fail")


def test_an_evaluation_of_a_model_equals_that_of_its_responses(
    of_model, tmp_path, monkeypatch
) -> None:
    folder = of_model()
    names = {"config.yaml", "responses.jsonl", "responses.jsonl.inputs.json", "results.json",
             "results.png", "samples.jsonl"}  # fmt: skip
    assert {p.name for p in folder.iterdir()} == names
    again = run_evaluation(
        load_config(
            EvalConfig,
            [f"response_files={folder / 'responses.jsonl'}", f"output={tmp_path / 'again'}"],
        )
    ).folder
    first = results_in(folder)["sources"]
    assert results_in(again)["sources"] == first
    assert (again / "samples.jsonl").read_bytes() == (folder / "samples.jsonl").read_bytes()
    # A changed rule scores the responses that are there.
    monkeypatch.setattr(generation, "rollout_group", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "rule.py").write_text(RULE)
    second = results_in(of_model(f"reward.path={tmp_path / 'rule.py'}", "pass_at=[1]"))["sources"]
    assert first[0]["metrics"]["mean@4"] != second[0]["metrics"]["mean@4"]


def test_another_model_or_file_in_the_same_folder_is_refused(
    of_model, evaluate, tiny_task, tmp_path
) -> None:
    folder = of_model()
    before = (folder / "results.json").read_bytes()
    with pytest.raises(ConfigError, match="with other inputs: seed: 0 → 3; choose another output"):
        of_model("seed=3")
    with pytest.raises(ConfigError, match="the content of response_files is another one"):
        evaluate(ROWS)
    assert (folder / "results.json").read_bytes() == before
    evaluate(ROWS, "overwrite=true")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("gsm", "1", "x")], "scored: there is no rule function for data_source 'gsm'"),
        ([row(GSM, "1", "x"), {**row(GSM, "1"), "responses": 3}], "row 1: 'responses' must be a"),
        ([{**row(GSM, "1", "x"), "reward_model": {}}], r"responses.jsonl: row 0 cannot be scored"),
    ],
)
def test_rows_that_cannot_be_scored_are_named(evaluate, rows, words) -> None:
    with pytest.raises(DataError, match=words):
        evaluate(rows)


ENVIRONMENT = """
from quadriga.agents.environments import Done, Observation

class Environment:
    def reset(self, row):
        self.truth = row["reward_model"]["ground_truth"]

    def step(self, action):
        if action.turn == 2:
            return Done(reward=1.0, metrics={"known": len(self.truth)})
        if int(self.truth) % 2:
            raise ValueError("odd")
        return Observation("again", reward=-0.25)
"""


def test_scores_that_a_file_has_of_episodes_do_not_stand_for_the_reward(evaluate):
    folder = evaluate([row(GSM, "7", "#### 6") | {"episodes": [{"score": 1.0}]}]).folder
    assert [sample["score"] for sample in read_jsonl(folder / "samples.jsonl")] == [0.0]


def test_an_evaluation_plays_the_episodes_of_a_validation(of_model, tiny_task, tmp_path):
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    played = [f"agent.path={tmp_path / 'game.py'}", "agent.max_turn_tokens=4", "n=2",
              "rollout.slice_tokens=4", "max_response_length=40"]  # fmt: skip
    folder = of_model(*played)
    written = (folder / "responses.jsonl").read_bytes()
    rows = list(read_jsonl(folder / "responses.jsonl"))
    episodes = [episode for row in rows for episode in row["episodes"]]
    samples = list(read_jsonl(folder / "samples.jsonl"))
    assert [s["score"] for s in samples] == [e["score"] for e in episodes]
    for row, episode in zip([r for r in rows for _ in range(2)], episodes, strict=True):
        truth, found = row["reward_model"]["ground_truth"], (episode["score"], episode["status"])
        if int(truth) % 2:
            assert found == (0, "raised") and "odd" in episode["detail"]
            continue
        assert found == (0.75, "done") and episode["metrics"] == {"known": len(truth)}
        assert ["again" in turn["observed"] for turn in episode["turns"]] == [True, False]
    results = json.loads((folder / "results.json").read_text())
    raised = sum(episode["status"] == "raised" for episode in episodes)
    assert 0 < raised < len(episodes) and results["failed"] == raised
    assert results["agent"]["agent/raised"] == raised / len(episodes)
    assert of_model(*played, "rollout.replicas.enable=true") == folder  # reads what is there
    assert (folder / "responses.jsonl").read_bytes() == written
    with pytest.raises(ConfigError, match=r"agent\.max_turns: 8 → 1"):
        of_model(*played, "agent.max_turns=1")
    (tmp_path / "game.py").write_text(ENVIRONMENT + "\n")
    with pytest.raises(ConfigError, match=r"content of agent\.path"):
        of_model(*played)
    with pytest.raises(ConfigError, match=r"agent\.on_error.* leaves samples out of an update"):
        of_model(*played, "agent.on_error=mask")
    with pytest.raises(ConfigError, match="response_files are not played"):
        of_model(*played, f"response_files={folder / 'responses.jsonl'}", "data_files=")
