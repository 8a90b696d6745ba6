"""Programs that build the workers of the built-in roles and call their methods as in verl."""

import asyncio

import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

from quadriga import workers
from quadriga.backends import get_backend
from quadriga.backends.ray.rank_process import AsyncRankProcess, rank_process_class
from quadriga.errors import ConfigError, WorkerInitError, WorkerMethodError
from quadriga.protocol import DataProto

IDS = torch.arange(5, 45).view(4, 10)


class Own(ActorRolloutRefWorker):
    """Switches as verl's workers do, and has verl's constructor and arguments."""

    def __init__(self, config, role):
        super().__init__(config, role)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def switch(self):
        asyncio.run(self.rollout_mode())
        version, held = self.rollout.version, self.rollout.engine.module.state_dict()
        equal = all(torch.equal(held[name], weight) for name, weight in self.actor.state_stream())
        asyncio.new_event_loop().run_until_complete(self.both())
        return version, equal, set(self.trainer_mode())  # the direct call

    async def both(self):
        await asyncio.gather(self.rollout_mode(), asyncio.wait_for(self.trainer_mode(), 9))

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        own = {"hdfs_path": hdfs_path, "global_step": global_step}
        return super().save_checkpoint(local_path, max_ckpt_to_keep=max_ckpt_to_keep, **own)


class Forgetful(ActorRolloutRefWorker):
    def __init__(self, config, role, **kwargs):
        super().__init__(config, role)


@pytest.fixture(scope="module")
def config(folder):
    model, data = {"path": folder}, {"max_response_length": 6}
    actor = {"strategy": "fsdp", "ppo_mini_batch_size": 4, "optim": {"lr": 0.01}}
    rollout = {"name": "hf", "temperature": 0.7, "response_length": "${data.max_response_length}"}
    mini_batch = "${actor_rollout_ref.actor.ppo_mini_batch_size}"
    critic = {"model": model, "ppo_mini_batch_size": mini_batch, "rollout_n": 2}
    policy = {"model": model, "actor": actor, "rollout": rollout}
    return OmegaConf.create({"data": data, "actor_rollout_ref": policy, "critic": critic})


def group(cls, **arguments):
    backend = get_backend("local")
    held = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return backend.worker_group(backend.resource_pool([1]), held)


@pytest.fixture
def policy(config):
    made = group(Own, config=config.actor_rollout_ref, role="actor_rollout")
    made.init_model()
    return made


def test_a_worker_takes_a_section_of_verl(config, capsys):
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor_rollout")
    assert isinstance(worker, Worker) and worker._is_actor and not worker._is_ref
    assert worker.config.rollout.sampling.temperature == 0.7
    assert worker.config.actor.ppo_mini_batch_size == 4
    assert worker.runtime.max_response_length == 6
    runtime = workers.RankRuntime(seed=3)  # which the trainer gives to every worker
    assert Own(worker.config, role="actor", runtime=runtime).runtime is runtime
    assert Forgetful(worker.config, role="actor", runtime=runtime).runtime is runtime
    critic = CriticWorker(config.critic)
    assert (critic.config.ppo_mini_batch_size, critic.responses_per_prompt) == (4, 2)
    assert CriticWorker(config).config == critic.config  # the whole configuration
    model = {**config.critic.model, "input_tokenizer": "other"}
    judge = RewardModelWorker({"model": model, "micro_batch_size_per_gpu": 2})
    assert (judge.config.micro_batch_size_per_gpu, judge.policy.path) == (2, "other")
    assert "settings of verl were translated" in capsys.readouterr().err


def test_a_section_that_is_not_of_quadriga_is_refused(config):
    alone = OmegaConf.create({"model": {"path": "${data.path}"}})
    for cls, given, message in (
        (workers.ActorRolloutRefWorker, config.actor_rollout_ref, "must be ActorRolloutRefConfig"),
        (workers.CriticWorker, config.critic, "classes of quadriga.compat translate settings of"),
        (ActorRolloutRefWorker, alone, r"key 'data\.path' not found; give a section of the whole"),
        (ActorRolloutRefWorker, {"modle": 1}, "with actor_rollout_ref.model.path; got modle"),
        (CriticWorker, "critic", "expected settings of verl"),
        (ActorRolloutRefWorker, {"model": {"path": "a"}, "rollout": "hf"}, "got 'hf'"),
        (CriticWorker, {"model": {"path": "dfs://a"}}, "critic.model.path=dfs://a: no file system"),
    ):
        role = {} if issubclass(cls, workers.CriticWorker) else {"role": "actor"}
        with pytest.raises(WorkerInitError, match=f"ConfigError .*{message}"):
            group(cls, config=given, **role)


def test_the_modes_are_coroutines_and_the_rollout_gets_the_trained_weights(policy):
    rows, mask = {"input_ids": IDS, "responses": IDS[:, 4:]}, torch.ones_like(IDS)
    rows |= {"attention_mask": mask, "response_mask": mask[:, 4:], "advantages": torch.ones(4, 6)}
    policy.update_actor(DataProto.from_dict({**rows, "old_log_probs": -torch.ones(4, 6)}))
    metrics = {"memory/trainer_mode_before", "memory/trainer_mode_after"}
    assert policy.switch() == [(2, True, metrics)]
    assert type(policy.rollout_mode()[0]) is dict
    # No event loop runs around a plain method on Ray.
    assert not issubclass(rank_process_class("Own", {"Own": Own}), AsyncRankProcess)


def test_checkpoints_in_verls_spelling(policy, tmp_path):
    saved = [str(tmp_path / f"global_step_{step}" / "actor") for step in range(4)]
    policy.save_checkpoint(saved[1], 1)  # as the trainer calls it
    policy.save_checkpoint(saved[2], None, 2, 2)
    files = policy.save_checkpoint(local_path=saved[3], global_step=3, max_ckpt_to_keep=2)
    assert any(file.name == "shard_00000.json" for file in files[0])
    policy.load_checkpoint(saved[2], del_local_after_load=True)
    policy.load_checkpoint(local_path=saved[3], hdfs_path=None)
    policy.load_checkpoint(saved[3], 3)
    with pytest.raises(WorkerMethodError, match=r"CheckpointError .* is of step 3"):
        policy.load_checkpoint(saved[3], 4)
    assert sorted(str(path) for path in tmp_path.glob("*/*")) == saved[2:]


def test_what_a_checkpoint_cannot_be_is_refused(config):
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    remote = "is not on this machine"
    for call, given, message in (
        ("load", {"local_path": "hdfs://a/b"}, f"local_path=hdfs://a/b {remote}"),
        ("load", {"local_path": "x", "remote_path": "s3://b"}, f"remote_path=s3://b {remote}"),
        ("save", {"local_path": "x", "hdfs_path": "b"}, "expected hdfs_path=None, got 'b'"),
        ("save", {"path": "x", "step": "s3://b"}, f"step=s3://b {remote}"),
        ("load", {"path": "x", "local_path": "y"}, "local_path='y' is the same argument as"),
        ("save", {"path": "x", "step": 1, "global_steps": 2}, "global_steps=2 is the same"),
        ("save", {"global_steps": 1}, "needs local_path, the folder of the checkpoint"),
        ("save", {"local_path": "x", "max_ckpt_to_keep": "2"}, "must be a number, got '2'"),
        ("load", {"local_path": "x", "keep": 1}, "has no argument 'keep'; remove it"),
    ):
        with pytest.raises(ConfigError, match=message):
            getattr(worker, f"{call}_checkpoint")(**given)
