"""Replicas of a rollout on Ray: one is killed while it generates, and no sample is lost."""

import importlib.util
import threading
from itertools import repeat

import pytest
from agreement import write_task

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.protocol import fields
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.stages import StageRunner

INSTALLED = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None]
ENGINES = INSTALLED or [pytest.param("hf", marks=pytest.mark.nightly)]
ROLLOUT = "actor_rollout_ref.rollout"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def settings(tmp_path):
    write_task(tmp_path)
    return [
        f"actor_rollout_ref.model.path={tmp_path / 'base'}",
        f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]",
        f"data.val_files=[{tmp_path / 'data' / 'test.parquet'}]",
        "data.train_batch_size=16", "data.max_response_length=24", f"{ROLLOUT}.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", f"{ROLLOUT}.dtype=float32",
        "actor_rollout_ref.actor.engine.dtype=float32", "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.threads_per_worker=1",
        f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.loggers=[jsonl]",
        "trainer.backend=ray", "trainer.num_cpus=3", "trainer.n_gpus_per_node=3",
        "placement.actor=[0]", "placement.rollout=[1-2]", f"{ROLLOUT}.replicas.enable=true",
        f"{ROLLOUT}.replicas.restarts=1", f"{ROLLOUT}.replicas.request_rows=4",
        f"{ROLLOUT}.sampling.ignore_eos=true", "trainer.call_timeout_s=300",
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_that_is_killed_while_it_generates_loses_no_sample(settings, engine):
    trainer = RayPPOTrainer(load_config(TrainConfig, [*settings, f"{ROLLOUT}.name={engine}"]))
    try:
        groups = trainer.init_workers()
        sampler = trainer.make_sampler(groups, StageRunner())
        sampler.stream = repeat(next(trainer.stream))
        undisturbed = sampler.draw(1).batch
        replicas = groups.rollout.replicas
        victim = replicas.all[1].group
        answers = []
        submit = type(victim.generate_sequences).submit

        def kill_behind_the_first_answer(method, rows):
            future = submit(method, rows)
            if method.group._ranks is victim._ranks:
                answers.append(future)
                if len(answers) == 3:  # one is answered, two are in flight
                    handle = victim._ranks.handles[0]
                    threading.Timer(0.0, victim._ranks.backend.kill, [handle]).start()
            return future

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(victim.generate_sequences), "submit", kill_behind_the_first_answer)
            disturbed = sampler.draw(1).batch
        assert replicas.all[1].loss is not None and len(answers) >= 3
        assert len(disturbed) == len(undisturbed) == 64
        if engine != "sglang":  # whose seeds are off
            same = disturbed.batch[fields.RESPONSES] == undisturbed.batch[fields.RESPONSES]
            assert same.all()
        groups.sync_weights()  # the replica starts again, and every digest is compared
        assert len(replicas.working) == 2 and replicas.all[1].starts == 2
        again = sampler.draw(1).batch
        assert set(again.batch[fields.WEIGHT_VERSION].tolist()) == {2}
        if engine != "sglang":
            assert (again.batch[fields.RESPONSES] == undisturbed.batch[fields.RESPONSES]).all()
    finally:
        trainer.close()
