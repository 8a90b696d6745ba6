"""Rows whose advantages are all 0 are not computed, and the parameters are the same.

`tests/workers/test_update_parity.py` compares updates with such rows with an independent update
that computes them, on 1, 2 and 4 ranks.
"""

from dataclasses import replace

import pytest
import torch
from run_cases import noted
from safetensors.torch import load_file

from quadriga.algorithms.policy_losses import POLICY_LOSSES, register_policy_loss
from quadriga.config.loading import load_config
from quadriga.config.schema import ActorConfig, PolicyLossConfig, TrainConfig
from quadriga.engines.token_model import TokenModel
from quadriga.errors import ConfigError
from quadriga.protocol import fields
from quadriga.trainer import dataflow
from quadriga.trainer.preflight import check_settings
from quadriga.workers.updates import mask_with_advantage, skips_zero_advantages

ACTOR = "actor_rollout_ref.actor"
SETTING = f"{ACTOR}.skip_zero_advantages"
TWO_OPTIMIZER_STEPS = f"{ACTOR}.ppo_mini_batch_size=4"

# Scores of two values, so that some prompt groups have equal scores and some have not.
RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % 2)
"""


# Where rows are left out.


def test_a_row_counts_if_an_advantage_under_the_mask_is_not_0():
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]])
    advantages = torch.tensor([[0.0, 2, 0], [0, 0, 9], [1, 1, 1], [0, 0, 0]])
    expected = [[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert mask_with_advantage(mask, advantages).tolist() == expected


@pytest.mark.parametrize("reason", ["entropy_coeff=0.01", "use_kl_loss=true"])
def test_insisting_on_what_cannot_be_kept_is_refused(train_overrides, reason):
    given = [*train_overrides, f"{SETTING}=true", f"{ACTOR}.{reason}"]
    with pytest.raises(ConfigError, match=rf"{SETTING}=true cannot be kept, .* {ACTOR}.{reason}"):
        check_settings(load_config(TrainConfig, given))
    check_settings(load_config(TrainConfig, [*train_overrides, f"{SETTING}=true"]))


def test_rows_are_left_out_only_if_the_loss_has_no_terms_but_the_policys(monkeypatch):
    plain = ActorConfig()
    assert skips_zero_advantages(plain)
    assert not skips_zero_advantages(replace(plain, skip_zero_advantages=False))
    assert not skips_zero_advantages(replace(plain, entropy_coeff=-0.01))
    assert not skips_zero_advantages(replace(plain, use_kl_loss=True))
    monkeypatch.setattr("quadriga.algorithms.policy_losses.POLICY_LOSSES", dict(POLICY_LOSSES))

    @register_policy_loss("own")
    def own(log_prob_BT, advantages_BT):
        return log_prob_BT.exp() - advantages_BT

    # Other tests of the session may have added losses.
    built_in = [name for name, loss in POLICY_LOSSES.items() if loss.origin == "built-in"]
    computed = [
        name
        for name in built_in
        if not skips_zero_advantages(replace(plain, policy_loss=PolicyLossConfig(name)))
    ]
    assert computed == ["clip_cov", "kl_cov"]
    assert not skips_zero_advantages(replace(plain, policy_loss=PolicyLossConfig("own")))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["algorithm.filter_groups.enable=true"], True),
        ([f"{SETTING}=false"], False),
        (["algorithm.use_kl_in_reward=true"], False),
        ([f"{ACTOR}.use_kl_loss=true"], False),
        ([f"{ACTOR}.entropy_coeff=0.01"], False),
        (["algorithm.rollout_correction.level=token"], False),
        (["algorithm.adv_estimator=gae"], False),
        (["algorithm.adv_estimator=reinforce_plus_plus"], False),
    ],
)
def test_advantages_are_estimated_before_the_passes_where_nothing_else_reads_these(
    overrides, expected
):
    usual = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", TWO_OPTIMIZER_STEPS]
    config = load_config(TrainConfig, [*usual, *overrides])
    names = [stage.name for stage in dataflow.StepPlan.of(config).stages]
    assert dataflow.StepPlan.of(config).advantages_before_passes == expected
    assert (names.index("estimate_advantages") < names.index("balance_over_ranks")) == expected
    assert names.count("estimate_advantages") == names.count("shape_scores") == 1


def test_truncated_rows_are_masked_before_the_passes():
    overrides = ["algorithm.adv_estimator=gae", "algorithm.overlong.drop_truncated=true"]
    config = load_config(TrainConfig, overrides)
    names = [stage.name for stage in dataflow.StepPlan.of(config).stages]
    assert names.index("mask_truncated") < names.index("compute_values")
    plan = dataflow.StepPlan.of(load_config(TrainConfig, overrides[:1]))
    assert not plan.masks_before_passes


# Parity.


@pytest.fixture
def tokens(monkeypatch) -> list[int]:
    """The response tokens of each row that a forward pass computes."""
    counts: list[int] = []

    def count(self, rows, **settings):
        counts.extend(rows[fields.RESPONSE_MASK].sum(1).tolist())

    noted(monkeypatch, TokenModel, "__call__", count)
    return counts


@pytest.fixture
def outcome(run, tmp_path, tokens):
    """outcome("name", "a=b", …) trains; it returns metrics, weights, and tokens of each row that
    was computed."""
    (tmp_path / "rule.py").write_text(RULE)

    def _run(name: str, *more: str):
        del tokens[:]
        folder = tmp_path / name
        rows = run(
            f"reward.path={tmp_path / 'rule.py'}", f"trainer.default_local_dir={folder}",
            "trainer.check_memory=false",  # the plan simulates forward passes
            *more,
        )  # fmt: skip
        return rows, load_file(folder / "model" / "model.safetensors"), tokens.copy()

    return _run


@pytest.mark.parametrize(
    ("more", "passes"),
    [
        ([TWO_OPTIMIZER_STEPS], 2),
        pytest.param([f"{ACTOR}.ppo_mini_batch_size=null"], 1, marks=pytest.mark.nightly),
    ],
    ids=["old log-probabilities and update", "update"],
)
def test_a_run_computes_live_groups_only_and_trains_the_same_model(outcome, more, passes):
    rows, weights, tokens = outcome("skipped", *more)
    all_rows, expected, all_tokens = outcome("computed", *more, f"{SETTING}=false")
    dead = [int(row["group/dead"]) for row in rows if "group/dead" in row]
    assert dead and all(0 < count < 8 for count in dead), "the test needs groups of both kinds"
    # 8 prompts with 2 responses each.
    assert len(tokens) == sum(passes * 2 * (8 - count) for count in dead)
    assert len(all_tokens) == passes * 16 * len(dead) and sum(tokens) < sum(all_tokens)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=5e-6, rtol=0)
    for ours, theirs in zip(rows, all_rows, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "critic/advantages/mean"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5), name


def test_a_run_whose_truncated_rows_are_not_computed_trains_the_same_model(outcome, monkeypatch):
    more = ["algorithm.adv_estimator=gae", "algorithm.overlong.drop_truncated=true",
            "data.max_response_length=64", "trainer.total_training_steps=1"]  # fmt: skip
    rows, weights, tokens = outcome("early", *more)
    assert any(0 < row.get("response_length/clip_ratio", 0) < 1 for row in rows)
    plan_of = dataflow.StepPlan.of
    late = lambda *args, **kwargs: replace(plan_of(*args, **kwargs), masks_before_passes=False)  # noqa: E731
    monkeypatch.setattr(dataflow.StepPlan, "of", late)
    _, expected, all_tokens = outcome("late", *more)
    assert len(tokens) < len(all_tokens) and sum(tokens) < sum(all_tokens)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=5e-6, rtol=0)
