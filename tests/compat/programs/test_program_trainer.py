"""Programs that use verl's estimators, stages, helpers and entry points of training."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from small_runs import verl_settings
from verl import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    compute_gae_advantage_return,
    get_adv_estimator_fn,
    get_kl_controller,
    register_adv_est,
)
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer,
    ResourcePoolManager,
    Role,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.utils import torch_functional as verl_F
from verl.utils.model import compute_position_id_with_mask, create_random_mask, get_model_size
from verl.workers.fsdp_workers import ActorRolloutRefWorker

from processes import run_python
from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.compat.verl.training.trainer import ray_init_arguments
from quadriga.errors import ConfigError, InputError
from quadriga.rewards.tensors import TensorReward


@pytest.fixture
def registries():
    """Removes the estimators that a program has added."""
    known = set(ADV_ESTIMATOR_REGISTRY), set(ADVANTAGES)
    yield
    for registry, names in zip((ADV_ESTIMATOR_REGISTRY, ADVANTAGES), known, strict=True):
        for name in set(registry) - names:
            del registry[name]


def test_an_estimator_is_registered_and_found(registries):
    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index=None, config=None, **kwargs):
        return token_level_rewards, token_level_rewards

    assert get_adv_estimator_fn("mine") is mine is ADV_ESTIMATOR_REGISTRY["mine"]
    assert register_adv_est("mine")(mine) is mine  # the same function once more
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_adv_est("mine")(lambda **kwargs: None)


def test_an_estimator_is_found_by_its_enum_member():
    assert get_adv_estimator_fn(AdvantageEstimator.GAE) is compute_gae_advantage_return
    assert get_adv_estimator_fn("gae") is ADV_ESTIMATOR_REGISTRY["gae"]
    assert AdvantageEstimator("grpo") is AdvantageEstimator.GRPO
    assert AdvantageEstimator.GRPO == "grpo"
    with pytest.raises(ValueError, match="no_such"):
        get_adv_estimator_fn("no_such")
    with pytest.raises(ValueError, match="no_such"):
        AdvantageEstimator("no_such")


def scored():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
    scores = torch.zeros(4, 3)
    scores[:, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    whole = torch.cat([torch.ones(4, 2, dtype=torch.long), mask], dim=1)
    tensors = {"responses": torch.zeros(4, 3, dtype=torch.long), "attention_mask": whole}
    tensors |= {"token_level_scores": scores, "token_level_rewards": scores.clone()}
    tensors |= {"old_log_probs": torch.full((4, 3), -1.0)}
    tensors |= {"ref_log_prob": torch.full((4, 3), -1.5)}
    return DataProto.from_dict(tensors, {"uid": ["p", "p", "q", "q"]})


def test_the_mask_of_the_responses():
    assert compute_response_mask(scored()).sum(-1).tolist() == [2, 3, 1, 2]


def test_the_kl_penalty_is_subtracted():
    data = scored()
    data.batch["response_mask"] = compute_response_mask(data)
    control = get_kl_controller({"type": "fixed", "kl_coef": 0.1})
    data, metrics = apply_kl_penalty(data, control, kl_penalty="kl")
    rewards = data.batch["token_level_rewards"]
    assert rewards[0].tolist() == pytest.approx([0.95, -0.05, 0.0])
    expected = {"reward_kl_penalty": pytest.approx(0.5), "reward_kl_penalty_coeff": 0.1}
    assert metrics == {f"actor/{name}": value for name, value in expected.items()}


def test_advantages_of_a_batch():
    data = compute_advantage(scored(), adv_estimator=AdvantageEstimator.GRPO)
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert data.batch["advantages"][0, 0] == pytest.approx(half, rel=1e-4)
    assert data.batch["advantages"][2].tolist() == [0.0] * 3  # equal rewards
    plain = compute_advantage(scored(), "grpo", norm_adv_by_std_in_grpo=False)
    assert plain.batch["advantages"][1, 2] == pytest.approx(-0.5)
    values = scored()
    values.batch["values"] = torch.zeros(4, 3)
    gae = compute_advantage(values, AdvantageEstimator.GAE, gamma=0.5, lam=1.0)
    assert gae.batch["returns"][0].tolist() == [1.0, 0.0, 0.0]
    assert compute_advantage(scored(), "rloo").batch["advantages"][0, 0] == pytest.approx(1.0)


def test_an_estimator_of_ones_own_in_compute_advantage(registries):
    @register_adv_est("constant")
    def constant(token_level_rewards, response_mask, index, config=None, **kwargs):
        assert list(index) == ["p", "p", "q", "q"]
        return response_mask * config["size"], response_mask

    data = compute_advantage(scored(), "constant", config={"size": 3})
    assert data.batch["advantages"][2].tolist() == [3, 0, 0]


def test_helpers_of_models():
    ids = torch.zeros(64, 10, dtype=torch.long)
    mask = create_random_mask(ids, max_ratio_of_valid_token=0.7, max_ratio_of_left_padding=0.3)
    counts = mask.sum(-1)
    assert mask.dtype == torch.int64 and int(counts.min()) >= 1 and int(counts.max()) <= 7
    assert mask[:, :3].sum() < mask[:, 3:6].sum()  # left padding, of 3 at most
    for row in mask:  # one run of ones
        assert (row.diff().abs().sum() + row[0] + row[-1]) == 2
    with pytest.raises(InputError, match="ratios"):
        create_random_mask(ids, 0.9, 0.3)
    positions = compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1, 0]]))
    assert positions.tolist() == [[0, 0, 0, 1, 1]]
    assert get_model_size(torch.nn.Linear(10, 100, bias=False)) == (1000.0, "")
    assert get_model_size(torch.nn.Linear(10, 200, bias=False), "K") == (2.0, "K")


def test_helpers_of_tensors():
    values, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1, 1, 0]])
    assert verl_F.masked_mean(values, mask).item() == pytest.approx(1.5)
    assert verl_F.masked_sum(values, mask, axis=-1).tolist() == [3.0]
    logits = torch.tensor([[0.0, 0.0]])
    found = verl_F.logprobs_from_logits(logits, torch.tensor([1]))
    assert found.item() == pytest.approx(-0.6931, 1e-3)
    assert verl_F.entropy_from_logits(logits).item() == pytest.approx(0.6931, 1e-3)
    ids = torch.tensor([[5, 2, 7, 2]])
    assert verl_F.get_response_mask(ids, eos_token=2).tolist() == [[1, 1, 0, 0]]
    assert verl_F.get_response_mask(ids, eos_token=[7]).tolist() == [[1, 1, 1, 0]]
    assert verl_F.pad_sequence_to_length(ids, 5, 0, left_pad=True).tolist() == [[0, 5, 2, 7, 2]]
    assert verl_F.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    clipped = verl_F.clip_by_value(values, torch.tensor(1.5), torch.tensor(2.5))
    assert clipped.tolist() == [[1.5, 2.0, 2.5]]


def test_roles_and_pools(judge):
    manager = ResourcePoolManager(
        resource_pool_spec={"global_pool": [2, 2], "critic_pool": [1]},
        mapping={Role.ActorRollout: "global_pool", Role.Critic: "critic_pool"},
    )
    assert manager.get_n_gpus() == 5
    assert Role.register("Judge") == Role.add("Judge") == judge  # once more
    with pytest.raises(AttributeError, match=r"Role has no 'Env'; .*Role\.add\('Env'\)"):
        Role.Env  # noqa: B018
    assert not hasattr(Role, "Env")
    assert (Role.Judge, str(judge)) == (judge, "judge")


def test_the_arguments_of_ray_init_are_merged():
    own, variables = {"num_cpus": 4, "include_dashboard": True}, {"NCCL_DEBUG": "INFO", "MINE": "1"}
    environment = {"env_vars": variables, "py_executable": None}
    merged = ray_init_arguments({**own, "address": None, "runtime_env": environment})
    expected = {"TOKENIZERS_PARALLELISM": "true", **variables}
    assert merged == {**own, "runtime_env": {"env_vars": expected}}
    assert ray_init_arguments(None)["runtime_env"]["env_vars"]["NCCL_DEBUG"] == "WARN"


class OwnActor(ActorRolloutRefWorker):
    """A worker class of one's own, in place of the built-in one."""


class Runner(TaskRunner):
    """A runner that replaces hooks."""

    def add_actor_rollout_worker(self, config):
        _, group_class = super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = OwnActor
        return OwnActor, group_class

    def init_resource_pool_mgr(self, config):
        self.mapping[Role.ActorRollout] = "own_pool"
        return ResourcePoolManager({"own_pool": [1]}, self.mapping, max_colocate_count=1)

    def run(self, config):
        super().run(config)
        return sorted(map(str, self.role_worker_mapping)), dict(self.mapping)


@pytest.mark.nightly
def test_run_ppo_with_hooks_of_ones_own(cluster, settings, tmp_path):
    roles, mapping = run_ppo(settings, task_runner_class=Runner)
    assert (roles, mapping) == (["actor_rollout"], {Role.ActorRollout: "own_pool"})
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0


@pytest.mark.nightly
def test_the_runner_is_not_on_a_head_node_without_cpus(settings, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    program = Path(__file__).with_name("off_head_program.py")
    run = run_python(program, tmp_path / "settings.json")
    seen = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert seen["runner"] == seen["second"]
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0


def test_what_the_trainer_cannot_take_is_refused(settings, monkeypatch):
    with pytest.raises(ConfigError, match="groups of Quadriga, not of"):
        RayPPOTrainer(settings, ray_worker_group_cls=dict)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "own", lambda *args: (torch.tensor(0.0), {}))
    settings["actor_rollout_ref"]["actor"]["policy_loss"] = {"loss_mode": "own"}
    with pytest.raises(ConfigError, match=r"'own' was added with verl's .*policy_losses\.register"):
        RayPPOTrainer(settings)
    settings["actor_rollout_ref"]["model"]["lora"] = {"rank": 8}
    with pytest.raises(ConfigError, match="it is for Megatron, whose engine"):
        RayPPOTrainer(settings)


def test_a_configuration_is_validated_before_anything_starts(settings):
    from verl.utils.config import validate_config

    validate_config(settings, use_reference_policy=False, use_critic=False)
    with pytest.raises(ConfigError, match=r"use_critic=True, but need_critic\(config\) is False"):
        validate_config(settings, use_reference_policy=False, use_critic=True)
    settings["data"]["train_batch_size"] = -1
    with pytest.raises(ConfigError, match=r"data\.train_batch_size"):
        validate_config(settings)


@pytest.mark.parametrize("names", ["quadriga", "verl"])
def test_reward_functions_of_training_and_validation(settings, names):
    from quadriga import RayPPOTrainer as QuadrigaTrainer
    from quadriga.compat.verl.training.run_settings import train_settings

    def reward_fn(data, return_dict=False):
        scores = torch.zeros(data.batch["responses"].shape)
        return {"reward_tensor": scores} if return_dict else scores

    class RewardManager:
        def __call__(self, data):
            return torch.ones(data.batch["responses"].shape)

    cls, given = RayPPOTrainer, settings
    if names == "quadriga":
        cls, given = QuadrigaTrainer, train_settings(settings, tell=False)
    batch = DataProto.from_dict({"responses": torch.zeros(2, 3)})
    for val, expected in ((None, 0.0), (reward_fn, 0.0), (RewardManager(), 1.0)):
        trainer = cls(given, reward_fn=reward_fn, val_reward_fn=val)
        validator = trainer.make_validator(mock.Mock(), mock.Mock(last_validation={}))
        for reward, score in ((trainer.reward_fn, 0.0), (validator.reward, expected)):
            assert reward(batch).batch["token_level_scores"].tolist() == [[score] * 3] * 2
        trainer.close()
    for name in ("reward_fn", "val_reward_fn"):
        with pytest.raises(ConfigError, match=f"{name} must be a function of a batch, got 5"):
            cls(given, **{name: 5})


def test_what_a_trainer_tells_of_its_run(task, tmp_path, monkeypatch):
    monkeypatch.setattr(RayPPOTrainer, "init_workers", lambda self: pytest.fail("a start"))
    names = ["use_critic", "use_rm", "use_reference_policy", "ref_in_actor", "hybrid_engine"]

    def told(**actor):
        settings = verl_settings(task, tmp_path)
        settings["algorithm"]["adv_estimator"] = actor.pop("estimator", "grpo")
        settings["actor_rollout_ref"]["actor"].update(actor)
        trainer = RayPPOTrainer(settings)
        trainer.close()
        return [name for name in names if getattr(trainer, name)]

    assert told() == ["hybrid_engine"]
    assert told(estimator="gae", use_kl_loss=True) == [names[0], names[2], names[4]]


def test_a_reward_function_is_called_once_with_what_it_takes():
    calls = []

    def plain(data):
        calls.append(len(data))
        return torch.zeros(len(data), 3)

    def broken(data, return_dict=False):
        calls.append(return_dict)
        raise TypeError("planted")

    batch = DataProto.from_dict({"responses": torch.zeros(2, 3)})
    assert TensorReward(plain)(batch).batch["token_level_scores"].shape == (2, 3)
    with pytest.raises(TypeError, match="planted"):
        TensorReward(broken)(batch)
    assert calls == [2, True]


def test_generation_with_settings_of_verl(task, tmp_path):
    from verl.trainer.main_generation import run_generation

    data = {"path": str(task / "data" / "test.parquet"), "n_samples": 2, "batch_size": 4}
    data["output_path"] = str(tmp_path / "out.parquet")
    rollout = {"temperature": 1.0, "response_length": 4}
    config = {"model": {"path": str(task / "base")}, "data": data, "rollout": rollout}
    answers = run_generation({**config, "trainer": {"device": "cpu"}})
    assert [len(answer.responses) for answer in answers] == [2] * 4
    assert (tmp_path / "out.parquet").exists()


def test_an_evaluation_with_settings_of_verl(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from verl.trainer.main_eval import main

    rows = [
        {"data_source": "mine", "reward_model": {"ground_truth": truth}, "responses": ["7", "8"]}
        for truth in ("7", "9")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "scored.parquet")
    (tmp_path / "rule.py").write_text(
        "def same(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    monkeypatch.chdir(tmp_path)
    data = {"path": str(tmp_path / "scored.parquet"), "response_key": "responses"}
    data |= {"data_source_key": "data_source", "reward_model_key": "reward_model"}
    rule = {"path": str(tmp_path / "rule.py"), "name": "same"}
    config = {"data": data, "custom_reward_function": rule}
    (found,) = main(config).summaries
    assert (found.data_source, found.metrics["mean@2"].value) == ("mine", 0.25)
    assert (tmp_path / "runs" / "eval" / "results.json").exists()
    config["data"]["data_source_key"] = "source"
    with pytest.raises(ConfigError, match="must have the name 'data_source', got 'source'"):
        main(config)


def test_the_names_of_the_workers():
    from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

    from quadriga.trainer.fine_tuning import SFTTrainer

    assert FSDPSFTTrainer is SFTTrainer
