"""Validation in training: several responses per prompt, and metrics of each data source."""

import json
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from quadriga.config.commands import EvalConfig
from quadriga.config.loading import load_config
from quadriga.protocol import DataProto, fields
from quadriga.trainer.evaluation import run_evaluation
from quadriga.trainer.validation import Validator

ROLLOUT = "actor_rollout_ref.rollout"
SOURCE = "quadriga/arithmetic"


def record() -> MagicMock:
    """A run record that keeps what it is told."""
    found = MagicMock(last_validation={})
    found.log_samples.side_effect = lambda step, batch, **_: len(batch)
    return found


class Rollout:
    """A rollout of one rank whose responses are the lowest bits of the seeds."""

    world_size = 1

    def generate_sequences(self, inputs: DataProto) -> DataProto:
        response = inputs.batch[fields.SAMPLE_SEED][:, None] & 1
        return DataProto.from_dict(
            {fields.RESPONSES: response, fields.RESPONSE_MASK: torch.ones_like(response)}
        )


class Reward:
    """Gives the rows of each batch the scores that were planned, in order."""

    def __init__(self, scores: list[float], answers: list[str | None] | None = None) -> None:
        self.scores = iter(scores)
        self.planned = iter(answers) if answers else None
        self.answers: list[str | None] = []

    def __call__(self, data: DataProto) -> DataProto:
        if self.planned is not None:
            self.answers = [next(self.planned) for _ in range(len(data))]
        rows = [[next(self.scores)] for _ in range(len(data))]
        return DataProto.from_dict({fields.TOKEN_LEVEL_SCORES: torch.tensor(rows)})


def prompts(index: list[int], sources: list[str | None]) -> DataProto:
    ones = torch.ones(len(index), 2, dtype=torch.int64)
    return DataProto.from_dict(
        {fields.INPUT_IDS: ones, fields.ATTENTION_MASK: ones},
        {fields.INDEX: np.array(index, object), fields.DATA_SOURCE: np.array(sources, object)},
    )


def test_metrics_of_two_sources_by_hand() -> None:
    batches = [prompts([0, 1], ["a", "b"]), prompts([2], ["a"])]
    reward = Reward([1, 0, 0.5, 0.5, 0, 0], ["x", "y", None, None, "z", "z"])
    told = record()
    validator = Validator(0, batches, Rollout(), reward, told, n=2)
    found = validator.run(step=3, due=True)
    aux = {name: value for name, value in found.items() if name.startswith("val-aux")}
    assert aux == {f"val-aux/{s}/reward/pass@1": v for s, v in
                   [("a", 0.25), ("b", 0.0), ("overall", pytest.approx(1 / 6))]}  # fmt: skip
    assert {k: v for k, v in found.items() if k not in aux} == pytest.approx(
        {
            "val/score": 2 / 6, "val/samples": 6.0,
            "val-core/a/reward/mean@2": 0.25, "val-core/a/reward/pass@2": 0.5,
            "val-core/a/reward/best@2/mean": 0.5, "val-core/a/reward/maj@2/mean": 0.25,
            "val-core/b/reward/mean@2": 0.5, "val-core/b/reward/pass@2": 0.0,
            "val-core/b/reward/best@2/mean": 0.5,
            "val-core/overall/reward/mean@2": 1 / 3, "val-core/overall/reward/pass@2": 1 / 3,
            "val-core/overall/reward/best@2/mean": 0.5,
            "val-core/overall/reward/maj@2/mean": (0.5 + 0.5 + 0) / 3,
        }
    )  # fmt: skip
    step, metrics, summaries = told.log_validation.call_args.args
    assert (step, metrics, len(summaries)) == (3, found, 3)
    assert [call.kwargs["written"] for call in told.log_samples.call_args_list] == [0, 4]


def test_one_response_and_no_source_have_the_mean_only() -> None:
    validator = Validator(0, [prompts([0, 1], [None, None])], Rollout(), Reward([1, 0]), record())
    assert validator.run(step=1, due=True) == {
        "val/score": 0.5, "val/samples": 2.0, "val/accuracy": 0.5,
        "val-core/unknown/reward/mean@1": 0.5, "val-core/unknown/reward/pass@1": 0.5,
    }  # fmt: skip
    assert validator.run(step=2, due=False) == {}


def test_scores_of_a_role_have_no_answers_of_an_earlier_batch() -> None:
    class Roles:
        """Stands for a run in which a role has scored the responses before the stage."""

        def result(self, stage, batch, *args, **kwargs):
            if stage.__name__ == "score_responses":
                batch.batch[fields.TOKEN_LEVEL_SCORES] = torch.ones(len(batch), 1)
            return stage(batch, *args, **kwargs)

    reward = Reward([])
    reward.answers = ["old", "old"]
    batches = [prompts([0], ["a"])]
    validator = Validator(0, batches, Rollout(), reward, record(), n=2, runner=Roles())
    assert "val-core/a/reward/maj@2/mean" not in validator.run(step=1, due=True)


RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 3 / 2, "answer": solution_str[:1]}
"""


def test_validation_of_a_run_equals_an_evaluation_of_its_model(
    run, tiny_task, tmp_path, capsys
) -> None:
    """Before the first step, whatever the batches and the number of ranks; and the final table."""
    (tmp_path / "rule.py").write_text(RULE)
    rule = f"reward.path={tmp_path / 'rule.py'}"
    rows = run(
        rule, f"{ROLLOUT}.val_n=4", f"{ROLLOUT}.val_sampling.temperature=1",
        "data.val_batch_size=5", "trainer.seed=7", "trainer.loggers=[jsonl,console]",
    )  # fmt: skip
    out = capsys.readouterr().out
    first = {name: value for name, value in rows[0].items() if name.startswith("val")}
    evaluation = run_evaluation(
        load_config(
            EvalConfig,
            [f"model.path={tiny_task.model}", f"data_files={tiny_task.data('test')}", "n=4",
             "sampling.temperature=1", "max_response_length=12", "seed=7", rule,
             "trainer.backend=local", "trainer.n_gpus_per_node=2",
             "trainer.threads_per_worker=1", f"output={tmp_path / 'eval'}"],
        )
    )  # fmt: skip
    (metrics,) = (summary.metrics for summary in evaluation.summaries)
    for name, ours in (
        ("mean@4", f"val-core/{SOURCE}/reward/mean@4"),
        ("maj@4", f"val-core/{SOURCE}/reward/maj@4/mean"),
        ("best@4", f"val-core/{SOURCE}/reward/best@4/mean"),
        ("pass@2", f"val-aux/{SOURCE}/reward/pass@2"),
    ):
        assert first[ours] == pytest.approx(metrics[name].value, abs=1e-9)
    last = rows[-1][f"val-core/{SOURCE}/reward/mean@4"]
    assert rows[-1]["val/samples"] == 64.0
    assert f"mean@4 {last:.3f}" in " ".join(out.split()) and SOURCE in out
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    texts = [json.loads(line)["response"] for line in samples if '"val"' in line][:4]
    assert len(set(texts)) > 1
