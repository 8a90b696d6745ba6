"""Stages of added roles run where the dataflow says, and their results are used."""

import functools
from contextlib import closing

import pytest
import torch
from run_cases import noted, often, trained

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.fields import StageFields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer import dataflow, stages
from quadriga.trainer.dataflow import NOT_PLACES, PASSES, START_PASSES, with_added
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.registry import PlacedStage, Role, load_train_config
from quadriga.workers import ActorRolloutRefWorker, CriticWorker

ACTOR = "actor_rollout_ref.actor"
FILTER = "algorithm.filter_groups.enable=true"
REFILL = (FILTER, "algorithm.filter_groups.mode=refill")
VARIANTS = {
    "grpo": (f"{ACTOR}.old_log_probs_from_update=false",),
    "gae, KL in the reward": (
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    ),
    "masked before the passes": (FILTER, f"{ACTOR}.use_kl_loss=true"),
    "refilled": (*REFILL, "algorithm.filter_groups.max_num_gen_batches=1"),
    "critic warm-up": ("algorithm.adv_estimator=gae", "critic.warmup_steps=1"),
}  # fmt: skip


def placed(name: str, **place: str) -> PlacedStage:
    return PlacedStage("judge", RoleStage(name, reads=("uid",), **place))


def names(flow) -> list[str]:
    return [stage.name.removeprefix("judge.") for stage in flow]


def test_places_among_the_stages_of_a_step() -> None:
    stages_ = ("score_responses", "measure_batch", "compute_log_prob", "compute_values",
               "shape_scores")  # fmt: skip
    flow = [START_PASSES, *(StageFields(name) for name in stages_)]
    added = [
        placed("a", before="compute_values"), placed("b", before="score_responses"),
        placed("c", after="score_responses"), placed("d", after="compute_log_prob"),
        placed("e", before="shape_scores"), placed("f", after="judge.b"),
    ]  # fmt: skip
    assert names(with_added(flow, added)) == [
        "start_passes", "a", "b", "f", "score_responses", "c", "measure_batch",
        "compute_log_prob", "compute_values", "d", "e", "shape_scores",
    ]  # fmt: skip


def test_names_of_places_are_names_of_stages(train_overrides) -> None:
    given = [*train_overrides, *VARIANTS["gae, KL in the reward"], *REFILL]
    config = load_train_config([*given, f"{ACTOR}.use_kl_loss=true"])
    flow = {stage.name for stage in dataflow.StepPlan.of(config).stages}
    flow |= {"add_baselines", "add_greedy_rows"}
    assert {*PASSES, *NOT_PLACES} <= flow


# A role with a stage before and after every stage of a step.

EVENTS: list[str] = []


def probe_class(methods: list[str]) -> type[Worker]:
    """A worker class with these methods, which note their names."""

    def noting(name: str):
        def method(self, data):
            EVENTS.append(f"probe.{name}")

        method.__name__ = name
        return register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(method)

    return type("Probe", (Worker,), {name: noting(name) for name in methods})


def note_calls(monkeypatch, flow: list[str]) -> None:
    """Let every stage of the flow note its name when it is called."""
    for name in flow:
        for home in (stages, ActorRolloutRefWorker, CriticWorker):
            attribute = "generate" if (home, name) == (stages, "generate_sequences") else name
            if hasattr(home, attribute) and attribute != "generate_sequences":
                note = functools.partial(EVENTS.append, name)
                noted(monkeypatch, home, attribute, lambda *_, note=note, **__: note())


OFTEN = ("gae, KL in the reward", "masked before the passes")


@pytest.mark.parametrize("variant", often(VARIANTS, *OFTEN))
def test_stages_run_in_the_order_of_the_dataflow(
    train_overrides, own_roles, monkeypatch, variant
) -> None:
    given = [*train_overrides, *VARIANTS[variant], "trainer.total_training_steps=2",
             "trainer.val_before_train=false", "data.val_files=[]"]  # fmt: skip
    built_in = [s.name for s in dataflow.StepPlan.of(load_train_config(given)).stages]
    places = [name for name in dict.fromkeys(built_in) if name not in NOT_PLACES]
    added = [
        RoleStage(f"{side}_{name}", reads=("index",), **{side: name})
        for name in places
        for side in ("before", "after")
    ]
    worker = probe_class([stage.method for stage in added])
    register_role(Role.add("Probe"), worker=worker, stages=added)
    trainer = RayPPOTrainer(load_train_config(given), reward_fn=on_the_controller)
    flow = [s.name for s in dataflow.StepPlan.of(trainer.config).stages if s.name not in NOT_PLACES]
    assert len(flow) == 3 * len(places)
    EVENTS.clear()
    with closing(trainer), monkeypatch.context() as patch:
        note_calls(patch, places)
        trainer.init_workers()
        trainer.fit()
    # The passes compute beside the stages that stand before them.
    flow = [name for name in flow if name not in PASSES]
    first = flow
    if variant == "critic warm-up":  # in its first step the actor is not updated
        first = [name for name in flow if not name.endswith("update_actor")]
    assert [name for name in EVENTS if name in flow] == [*first, *flow]


# Scores of a role, against the same function on the controller.


def score(data: DataProto) -> torch.Tensor:
    """Return scores [B, R] float32 that differ within prompt groups."""
    mask = data.batch[fields.RESPONSE_MASK]
    amounts = (data.batch[fields.RESPONSES] * mask).sum(-1) % 3 / 2
    return add_to_last_token(torch.zeros(mask.shape), mask, amounts)


class Scorer(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={fields.TOKEN_LEVEL_SCORES: score(data)})


def on_the_controller(data: DataProto) -> DataProto:
    return DataProto.from_dict(tensors={fields.TOKEN_LEVEL_SCORES: score(data)})


SCORING = RoleStage(
    "score", reads=(fields.RESPONSES, fields.RESPONSE_MASK), writes=(fields.TOKEN_LEVEL_SCORES,),
    before="score_responses", in_validation=True,
)  # fmt: skip


def test_a_role_that_scores_equals_a_function_that_scores(train_overrides, own_roles) -> None:
    expected = trained(train_overrides, reward_fn=on_the_controller)
    register_role(Role.add("Scorer"), worker=Scorer, stages=[SCORING])
    again = [*train_overrides, "trainer.overwrite=true"]
    assert trained(again) == expected
    assert expected[0]["val/score"] > 0
    # A batch of validation that does not divide over the ranks of the role is padded.
    apart = ("trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.scorer=[1-2]",
             "data.val_batch_size=5")  # fmt: skip
    assert trained([*again, *apart]) == expected


def test_a_program_may_give_the_class_and_the_pool(train_overrides, own_roles) -> None:
    from quadriga.backends import get_backend
    from quadriga.trainer.roles.registry import ResourcePoolManager

    role = register_role(Role.RewardModel, stages=[SCORING]).role
    config = load_train_config(train_overrides)
    with pytest.raises(ConfigError, match="role reward_model has no worker class"):
        RayPPOTrainer(config)
    manager = ResourcePoolManager(
        {"a": [1], "b": [2]}, {Role.ActorRollout: "a", role: "b"}, get_backend("local")
    )
    trainer = RayPPOTrainer(
        config, role_worker_mapping={role: Scorer}, resource_pool_manager=manager
    )
    with closing(trainer):
        groups = trainer.init_workers()
        assert groups.added["reward_model"].world_size == 2
        trainer.fit()
