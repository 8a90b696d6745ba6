"""Complete runs of two steps: the files they write, and that backends compute the same."""

import json
import os

import pytest
from run_cases import timeless

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config

USER_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the response, which a policy can raise within a few steps."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
'''


def test_a_run_writes_its_folder_and_a_model_that_generates(
    run, train_overrides, tmp_path, pictures
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quadriga.trainer.evaluation import run_generation

    before = os.umask(0o027)
    try:
        rows = run("trainer.loggers=[jsonl,tensorboard]", "trainer.save_freq=1")
    finally:
        os.umask(before)
    folder = tmp_path / "run"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(0o640)}
    assert any(path.name == "model.safetensors" for path in files)
    assert [row["step"] for row in rows] == [0, 1, 2]
    pictures = {"learning_curve.png", "report.html"}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "model"} | pictures <= {
        p.name for p in folder.iterdir()
    }
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "checkpoints").is_dir()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples if s["split"] == "train"} == {1, 2}
    assert AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template
    answers = run_generation(
        load_config(
            GenerateConfig,
            [f"model.path={folder / 'model'}", "prompt='1 and 2?'", "n=3", "sampling.temperature=1",
             "max_response_length=5", f"output={tmp_path / 'answers.jsonl'}"],
        )
    )  # fmt: skip
    assert len(answers) == 1 and len(answers[0].responses) == 3
    written = json.loads((tmp_path / "answers.jsonl").read_text())
    assert written["responses"] == answers[0].responses


def test_training_raises_a_reward_that_is_easy_to_raise(run, tmp_path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(USER_REWARD)
    rows = run(
        f"reward.path={rule}", "trainer.total_training_steps=25", "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=3e-3",
        "trainer.val_before_train=false",
    )  # fmt: skip
    # One optimizer step in each step, with the weights that generated.
    assert rows[0]["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["actor/ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["mismatch/max"] < 1e-4
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])


OWN_FILE = """
from quadriga.algorithms.advantages import register_advantage
from quadriga.algorithms.policy_losses import register_policy_loss

@register_advantage("by_length", formula="l_i − mean l")
def by_length(response_mask_BT, groups):
    centred_B = groups.centre_B(response_mask_BT.sum(-1)).float()
    return centred_B[:, None] * response_mask_BT, response_mask_BT.float()

@register_policy_loss("halved", formula="−A log π / 2")
def halved(log_prob_BT, advantages_BT, *, scale=1.0):
    return -scale * advantages_BT * log_prob_BT
"""


@pytest.mark.usefixtures("restored_tables")
@pytest.mark.parametrize(
    "own",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["built-in", "file of the user, KL over the vocabulary"],
)
def test_two_ranks_compute_the_steps_of_one_rank(run, tmp_path, own, restored_tables) -> None:
    """The built-in algorithm takes two optimizer steps per step; that of the user balances single
    sequences."""
    names = ["reward/mean", "actor/loss", "actor/grad_norm", "critic/advantages/max_abs"]
    rule, more = tmp_path / "rule.py", []
    rule.write_text(USER_REWARD)
    if own:
        actor, file = "actor_rollout_ref.actor", tmp_path / "own.py"
        file.write_text(OWN_FILE)
        names.append("actor/kl_loss")
        more = [f"algorithm.user_files=[{file}]", "algorithm.adv_estimator=by_length",
                f"{actor}.policy_loss.name=halved", f"+{actor}.policy_loss.options.scale=0.5",
                f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_type=full",
                f"{actor}.kl_loss_coef=0.1", f"{actor}.engine.fused_head=true",
                "trainer.balance_groups=false"]  # fmt: skip
    more += [f"reward.path={rule}", "actor_rollout_ref.rollout.n=4",
             f"actor_rollout_ref.actor.ppo_mini_batch_size={8 if own else 4}"]  # fmt: skip
    one = timeless(run(*more))
    two = timeless(run("trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2",
                       f"trainer.default_local_dir={tmp_path / 'two'}", *more))  # fmt: skip
    assert all(row["actor/grad_norm"] > 1e-3 for row in one[1:])
    assert {row["actor/optimizer_steps"] for row in two[1:]} == {1.0 if own else 2.0}
    assert all(1 <= row["batch/cost_imbalance"] < 1.5 for row in two[1:])
    if own:
        assert one[-1]["actor/kl_loss"] > 1e-4
    for name in names:
        assert [row.get(name) for row in two[1:]] == pytest.approx(
            [row.get(name) for row in one[1:]], abs=2e-4
        ), name
