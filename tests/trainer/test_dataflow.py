"""Declared fields of all stages: the check of their order, and the comparison with a real step."""

from contextlib import closing
from pathlib import Path

import pytest
from field_access import FieldAccess
from run_cases import RULE, often

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.engines.micro_batches import REQUIRED_FIELDS
from quadriga.errors import ConfigError
from quadriga.protocol import fields
from quadriga.protocol.fields import StageFields
from quadriga.trainer import dataflow, stages
from quadriga.trainer.ingredients import load_ingredients
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.record import RunRecord
from quadriga.trainer.stages import Sampler
from quadriga.workers import ActorRolloutRefWorker, CriticWorker, SFTWorker
from quadriga.workers.method_fields import MODEL_INPUTS, UPDATE_SFT

ACTOR = "actor_rollout_ref.actor"
# What only some runs load.
LOAD_MORE = StageFields("PromptLoader", writes=(fields.MULTI_MODAL_INPUTS, fields.COLUMNS))
LOAD_DEMONSTRATIONS = StageFields(
    "SFTLoader",
    writes=(fields.PROMPTS, fields.RESPONSES, *dataflow.LOAD_PROMPTS.writes[:3], "response_mask"),
)
DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"

# Settings that together run every stage, each with every field that it can read and write.
VARIANTS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "old log-probabilities from the update": [
        f"{ACTOR}.ppo_mini_batch_size=null", f"{ACTOR}.old_log_probs_from_update=true",
    ],
    "gae, KL in the loss": ["algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true"],
    "gae, KL in the reward": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "KL over the vocabulary": [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"],
    "remax": ["algorithm.adv_estimator=remax"],
    "streamed": ["trainer.max_staleness=1", "algorithm.adv_estimator=remax"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.reward_components=[form,length]"],
    "clip_cov, corrected": [
        f"{ACTOR}.policy_loss.name=clip_cov", "algorithm.rollout_correction.level=token",
    ],
    # Long responses, so that an untrained model ends some of them: without any the step is empty.
    "truncated": [
        "algorithm.overlong.drop_truncated=true", "algorithm.overlong.enable=true",
        "algorithm.overlong.buffer_length=4", "data.max_response_length=96",
    ],
    "failed samples masked": ["reward.on_failure=mask"],
    "masked": ["algorithm.filter_groups.enable=true"],
    "refilled": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill"],
    "decoupled_ppo": [f"{ACTOR}.policy_loss.name=decoupled_ppo"],
    "old log-probabilities in the estimator": ["algorithm.adv_estimator=reads_old"],
}  # fmt: skip

NO_SCORE = """
    if digits > 0.8:
        raise ValueError("one in seven responses has no score")
    return"""


@pytest.fixture(autouse=True)
def estimator_of_old_log_probs(monkeypatch):
    """A user's estimator that reads old log-probabilities, which no built-in one does."""
    from quadriga.algorithms.advantages import register_advantage

    monkeypatch.setattr("quadriga.algorithms.advantages.ADVANTAGES", dict(ADVANTAGES))

    @register_advantage("reads_old", formula="A = r")
    def reads_old(token_level_rewards_BT, response_mask_BT, old_log_prob_BT):
        advantages = token_level_rewards_BT.sum(-1, keepdim=True) * response_mask_BT
        return advantages, advantages + 0 * old_log_prob_BT


def config_of(*overrides: str) -> TrainConfig:
    usual = ["algorithm.adv_estimator=grpo", f"{ACTOR}.old_log_probs_from_update=false"]
    return load_config(TrainConfig, [*usual, *overrides])


def names(flow: tuple[StageFields, ...]) -> list[str]:
    return [stage.name for stage in flow]


# The check.


ALL = [
    *VARIANTS.values(),
    *([f"algorithm.adv_estimator={name}"] for name in sorted(set(ADVANTAGES) - {"gdpo"})),
    *([f"{ACTOR}.policy_loss.name={name}"] for name in sorted(POLICY_LOSSES)),
]


def test_every_field_that_is_read_is_written_earlier() -> None:
    for overrides in ALL:
        config = config_of(*overrides)
        dataflow.check_dataflow(dataflow.StepPlan.of(config).stages)
        dataflow.check_dataflow(dataflow.validation_dataflow(config))


MOVES = [
    ("compute_log_prob", "measure_entropy", "entropys"),
    ("compute_values", "estimate_advantages", "values"),
    ("score_responses", "measure_batch", "token_level_scores"),
    ("expand_prompts", "generate_sequences", "sample_seed"),
    ("update_critic", "log_update", "partials"),
]


@pytest.mark.parametrize(("writer", "reader", "field"), MOVES)
def test_a_stage_that_runs_before_its_input_is_reported(writer, reader, field) -> None:
    flow = dataflow.StepPlan.of(config_of(*VARIANTS["gae, KL in the loss"])).stages
    moved = [stage for stage in flow if stage.name == writer]
    rest = [stage for stage in flow if stage.name != writer]
    place = next(i for i, stage in enumerate(rest) if stage.name == reader)
    rest = [*rest[: place + 1], *moved, *rest[place + 1 :]]
    message = rf"stage {reader} reads field '{field}' \(written by .*{writer}.*\), but"
    with pytest.raises(ConfigError, match=message):
        dataflow.check_dataflow(rest)


def test_a_field_that_generation_drops_cannot_be_read_later() -> None:
    late = StageFields("late", reads=(fields.SAMPLE_SEED,))
    flow = (*dataflow.StepPlan.of(config_of()).stages, late)
    with pytest.raises(ConfigError, match="stage late reads field 'sample_seed'"):
        dataflow.check_dataflow(flow)


def test_the_trainer_checks_before_it_loads_or_starts_anything() -> None:
    config = config_of("algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=2")
    with pytest.raises(ConfigError, match=r"reward_components=\[\] is read by"):
        RayPPOTrainer(config)


# The declarations against each other.


def all_stages() -> list[StageFields]:
    with_model = ["reward_model.enable=true", "reward_model.model.path=scorer"]
    routes = ["actor_rollout_ref.rollout.replay_routes=true"]
    variants = [*VARIANTS.values(), with_model, ["agent.path=game.py"], routes]
    flows = [dataflow.StepPlan.of(config_of(*overrides)).stages for overrides in variants]
    stages_ = [stage for flow in flows for stage in flow]
    # In a step the baselines are one stage with the branch that makes them; here it is taken apart.
    apart = [stage for stage in stages_ if stage.name != dataflow.ADD_BASELINES.name]
    more = [LOAD_MORE, LOAD_DEMONSTRATIONS, UPDATE_SFT]
    return [*apart, dataflow.ADD_BASELINES, *more]


def test_writers_of_the_list_of_fields_are_those_of_the_stages() -> None:
    for field in fields.FIELDS:
        writers = {stage.name for stage in all_stages() if field.name in stage.writes}
        reserved = {"compute_rm_score"}  # a part of `score_responses`
        assert set(field.written_by) - reserved == writers, field.name


def test_every_field_is_read_by_a_stage() -> None:
    """A field that no stage reads is computed for nothing, but for those that users read."""
    read = {name for stage in all_stages() for name in (*stage.reads, *stage.reads_if_present)}
    of_users = {
        fields.PROMPTS, fields.POSITION_IDS, fields.INDEX, fields.WEIGHT_VERSION, fields.PAUSED,
    }  # fmt: skip
    assert set(fields.BY_NAME) - read == of_users


def test_worker_methods_read_what_the_engines_need_and_nothing_else() -> None:
    assert set(MODEL_INPUTS) == set(REQUIRED_FIELDS)


def test_stages_have_the_names_of_functions_and_methods() -> None:
    homes = (stages, ActorRolloutRefWorker, CriticWorker, SFTWorker, Sampler, RunRecord)
    others = {"PromptLoader", "SFTLoader", dataflow.START_PASSES.name}
    unknown = {
        stage.name for stage in all_stages() if not any(hasattr(home, stage.name) for home in homes)
    }
    assert unknown == others


# The declarations against a real step.


def test_the_loaders_write_the_declared_fields(train_overrides: list[str]) -> None:
    prompts = next(iter(load_ingredients(load_config(TrainConfig, train_overrides)).train_loader))
    written = {*prompts.batch.keys(), *prompts.non_tensor_batch}
    assert written == set(dataflow.LOAD_PROMPTS.writes)


@pytest.fixture
def accessed(train_overrides, tmp_path):
    """accessed("a=b", …) -> the dataflow of these settings, and the accesses of a real step."""
    rule = tmp_path / "rule.py"
    rule.write_text(RULE.replace("\n    return", NO_SCORE))

    def _accessed(*more: str) -> tuple[tuple[StageFields, ...], FieldAccess]:
        overrides = [*train_overrides, f"reward.path={rule}", "trainer.total_training_steps=1",
                     "trainer.val_before_train=false", "data.val_files=[]", *more]  # fmt: skip
        config = load_config(TrainConfig, overrides)
        flow = dataflow.StepPlan.of(config).stages
        access = FieldAccess(names(flow))
        trainer = RayPPOTrainer(config)
        with closing(trainer):
            trainer.init_workers()
            with pytest.MonkeyPatch.context() as patch:
                access.watch(patch)
                trainer.fit()
        return flow, access

    return _accessed


OFTEN = ("gae, KL in the reward", "clip_cov, corrected", "gdpo", "refilled", "truncated", "remax",
         "old log-probabilities from the update")  # fmt: skip


@pytest.mark.parametrize(
    "variant", often([v for v in VARIANTS if "in the estimator" not in v], *OFTEN)
)
def test_a_real_step_accesses_the_declared_fields(accessed, variant: str) -> None:
    flow, access = accessed(*VARIANTS[variant])
    present: set[str] = set()
    for stage in flow:
        if stage.name == dataflow.ADD_BASELINES.name:
            stage = dataflow.ADD_BASELINES  # the parts of the branch are recorded by themselves
        expected = {*stage.reads, *(set(stage.reads_if_present) & present)}
        if fields.WEIGHT_VERSION in stage.writes:
            expected.add(fields.WEIGHT_VERSION)  # compared with the actor's, in the same stage
        if stage is not dataflow.LOAD_PROMPTS:
            assert access.reads[stage.name] == expected, f"reads of {stage.name}"
            assert access.writes[stage.name] == set(stage.writes), f"writes of {stage.name}"
        present |= set(stage.writes)
