"""Greedy tokens equal those of `hf` in each placement, before and after each training step."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from agreement import ENGINES, ENGINES_AND_MODELS, GREEDY, requests, write_model

from quadriga.backends import get_backend
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.single_controller import Dispatch, register
from quadriga.trainer.worker_groups import WeightLink
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.runtime import RankRuntime
from training_step import train_once

OPTIONS = {"vllm": ["kv_cache_mb=64"], "sglang": [], "hf": []}
STEPS = 5
# Ranks of the actor, and of a rollout in other processes.
PLACEMENTS = {"together on two ranks": (2, 0), "apart": (1, 1), "apart on two ranks each": (2, 2)}

pytestmark = [
    pytest.mark.skipif(not ENGINES, reason="no engine is installed; see make engines"),
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]


class Policy(ActorRolloutRefWorker):
    """The policy with a training step that needs no responses."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train_once(self) -> None:
        train_once(self._engine("actor"), tokens=20)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def greedy(self) -> list[torch.Tensor]:
        """Return the responses of this rank, their masks and log-probabilities."""
        ids, mask, seeds = requests()
        found = self._rollout().generate(ids, mask, GREEDY, seeds)
        return [found.response_ids, found.response_mask, found.rollout_log_probs]


@contextmanager
def started(name, folder, placement):
    """Yield the groups of actor and rollout, and what syncs the weights of one to the other."""
    actor_ranks, rollout_ranks = PLACEMENTS[placement]
    options = [f"actor_rollout_ref.rollout.options.{option}" for option in OPTIONS[name]]
    config = load_config(
        TrainConfig,
        [f"actor_rollout_ref.model.path={folder}", f"actor_rollout_ref.rollout.name={name}",
         "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.actor.engine.dtype=float32",
         "actor_rollout_ref.actor.optim.lr=0.01", *options],
    ).actor_rollout_ref  # fmt: skip
    runtime = RankRuntime(max_response_length=24)
    backend = get_backend("ray")
    backend.start(num_cpus=4, object_store_memory=200 << 20)

    def group(role, ranks):
        pool = backend.resource_pool([ranks], use_gpu=False)
        made = backend.worker_group(
            pool, backend.class_with_args(Policy, config, role, runtime), role=role
        )
        made.init_model()
        return made

    try:
        actor = group("actor" if rollout_ranks else "actor_rollout", actor_ranks)
        rollout = group("rollout", rollout_ranks) if rollout_ranks else actor
        sync = WeightLink(actor, rollout).sync if rollout_ranks else actor.sync_weights
        yield actor, rollout, sync
        rollout.close_rollout()
    finally:
        backend.shutdown()


def greedy(name, folder, placement):
    """Return what each rank of the rollout generates before the first step and after each one."""
    with started(name, folder, placement) as (actor, rollout, sync):
        found = []
        for step in range(STEPS + 1):
            if step:
                actor.train_once()
            sync()
            found.append(rollout.greedy())
        return found


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("engine", "model"), ENGINES_AND_MODELS)
def test_greedy_tokens_equal_those_of_hf(tmp_path, engine, model, placement):
    folder = write_model(model, tmp_path / "model")
    expected, found = (greedy(name, folder, placement) for name in ("hf", engine))
    for step in range(STEPS + 1):
        for hf, ours in zip(expected[step], found[step], strict=True):
            assert torch.equal(hf[0], ours[0])
            assert torch.equal(hf[1], ours[1])
            torch.testing.assert_close(ours[2], hf[2], atol=1e-4, rtol=0)
    assert not torch.equal(found[0][0][2], found[-1][0][2])  # the weights are others
