"""The rollout of the actor's process uses the actor's tensors, unless a setting is against it."""

import pytest
from torch.distributed.tensor import DTensor

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.checks.memory import train_plan
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.runtime import RankRuntime

SECTION = "actor_rollout_ref"
LORA = f"{SECTION}.model.lora.rank=2"
FREEZE = f"{SECTION}.model.freeze=[*mlp*]"


@pytest.fixture
def worker(folder):
    def build(*overrides: str) -> ActorRolloutRefWorker:
        path = f"{SECTION}.model.path={folder}"
        config = load_config(TrainConfig, [path, *overrides]).actor_rollout_ref
        runtime = RankRuntime(max_response_length=8)
        worker = ActorRolloutRefWorker(config, "actor_rollout", runtime)
        worker.init_model()
        return worker

    return build


def addresses(tensors) -> set[int]:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return {t.data_ptr() for t in local}


def shares(worker: ActorRolloutRefWorker) -> bool:
    held = addresses(worker.rollout.engine.module.parameters())
    trained = addresses(worker.actor.module.parameters())
    assert held == trained or not held & trained
    return held == trained


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        ([], True),
        ([f"{SECTION}.rollout.share_weights=false"], False),
        ([f"{SECTION}.rollout.take_turns=true"], False),
        ([f"{SECTION}.actor.engine.param_offload=true"], False),
        ([f"{SECTION}.rollout.dtype=bfloat16"], False),
    ],
    ids=str,
)
def test_the_tensors_are_those_of_the_actor(worker, overrides, shared) -> None:
    assert shares(worker(*overrides)) is shared


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], "none"),
        ([f"{SECTION}.actor.engine.param_offload=true"], "all"),
        # Weights that adapters are merged into are tensors of the rollout's own.
        ([LORA], "some"),
        # Frozen weights are kept in the dtype of the computation, the others in float32.
        ([FREEZE, f"{SECTION}.actor.engine.dtype=bfloat16"], "some"),
    ],
    ids=str,
)
def test_the_plan_has_the_bytes_of_the_copy(worker, folder, overrides, expected) -> None:
    trained = worker(*overrides)
    of_actor = addresses(trained.actor.module.parameters())
    held = {t.data_ptr(): t.nbytes for t in trained.rollout.engine.module.parameters()}
    own = sum(size for address, size in held.items() if address not in of_actor)
    assert expected == {0: "none", sum(held.values()): "all"}.get(own, "some")
    config = load_config(TrainConfig, [f"{SECTION}.model.path={folder}", *overrides])
    (pool,) = train_plan(config, "cpu").pools
    assert pool.phases["generation"].get("rollout weights", 0) == own
