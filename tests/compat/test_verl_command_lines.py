"""Command lines in the spelling of verl 0.4 to 0.9: what they become, and what is refused."""

from functools import reduce

import pytest

from quadriga.compat.verl.controller.groups import ResourcePoolManager
from quadriga.compat.verl.training.run_settings import check_called, pools_of
from quadriga.compat.verl.training.trainer import TaskRunner
from quadriga.compat.verl_settings import SFT, TRAIN, read_verl
from quadriga.config.commands import SFTConfig
from quadriga.config.schema import AlgorithmConfig, RewardModelConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.roles.registry import Role

FILE = """
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 256
    clip_ratio_low: 0.2
    grad_clip: 1.0
    optim: {clip_grad: 1.0, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.0}
    fsdp_config: {param_offload: false}
    megatron: {param_offload: false, override_transformer_config: {attention_backend: flash}}
  ref:
    megatron: {override_transformer_config: "${oc.select:actor_rollout_ref.actor.m,{}}"}
  rollout: {name: "???", free_cache_engine: true, gpu_memory_utilization: 0.5, max_num_seqs: 256}
reward_model: {enable: null, nnodes: null, n_gpus_per_node: null, enable_resource_pool: null}
reward: {reward_model: {enable: false, nnodes: 0}, reward_manager: {name: naive}}
trainer: {nnodes: 1, n_gpus_per_node: 8}
data: {train_batch_size: 1024, max_response_length: 512}
"""
A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
RM = ["reward_model.enable=True", "reward_model.model.path=a/rm"]
POOL = [*RM, "reward_model.enable_resource_pool=True", "reward_model.nnodes=1"]
VLLM = {"name": "vllm", "take_turns": True, "micro_batch_size": 64, "options": {
    "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8, "enforce_eager": True,
    "engine_args": {"mm_processor_cache_gb": 0, "max_num_batched_tokens": 10240}}}  # fmt: skip
SGLANG = {"take_turns": False, "options": {"tensor_parallel": 4, "server_args": {
    "attention_backend": "triton", "mem_fraction_static": 0.5}}}  # fmt: skip


def read(tmp_path, overrides, cls=TrainConfig, table=TRAIN):
    (tmp_path / "main.yaml").write_text(FILE)
    return read_verl(cls, table, tmp_path / "main.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2", f"{R}.gpu_memory_utilization=0.8",
          f"{R}.max_num_batched_tokens=10240", f"{R}.max_num_seqs=64", f"{R}.enforce_eager=True",
          f"+{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True", f"{R}.mode=async"],
         {f"{R}.{key}": value for key, value in VLLM.items()}),
        ([f"{R}.name=sglang", f"{R}.tensor_model_parallel_size=4",
          f"{R}.engine_kwargs.sglang.attention_backend=triton"],
         {f"{R}.{key}": value for key, value in SGLANG.items()}),
        (["+data.custom_cls.path=a.py", "+data.custom_cls.name=Own"],
         {"data.dataset.path": "a.py", "data.dataset.name": "Own"}),
        ([f"{R}.name=hf"], {f"{R}.options": {}, f"{R}.take_turns": False}),
        ([f"{M}.path=Qwen/Qwen2-7B"], {f"{M}.path": "hf://Qwen/Qwen2-7B"}),
        ([f"{M}.path=<path>"], {f"{M}.path": "<path>"}),
        ([f"{M}.lora_rank=8", f"{M}.target_modules=all-linear", f"{M}.exclude_modules='.*vis.*'"],
         {f"{M}.lora.target_modules": ("all-linear",), f"{M}.lora.exclude_modules": ("*vis*",)}),
        ([f"{M}.lora_rank=8", f"{M}.lora_adapter_path=/a"], {f"{M}.lora.rank": None}),
        ([f"{A}.freeze_vision_tower=True"], {f"{M}.freeze": ("*visual.*",)}),
        # the command line precedes the file, and one side of the clip precedes both
        ([f"{A}.optim.clip_grad=0.5", f"{A}.clip_ratio=0.3"],
         {f"{A}.optim.grad_clip": 0.5, f"{A}.policy_loss.clip_ratio_low": 0.2,
          f"{A}.policy_loss.clip_ratio_high": 0.3}),
        # 1024 / 256 optimizer steps in each training step
        ([f"{A}.optim.lr_warmup_steps=10"], {f"{A}.optim.lr_warmup_steps": 40}),
        ([f"{A}.optim.lr_warmup_steps_ratio=0.1"], {f"{A}.optim.lr_warmup_ratio": 0.1}),
        ([f"{A}.optim.lr=2e-6", f"+{A}.optim.min_lr=1e-6", f"+{A}.optim.lr_decay_style=cosine"],
         {f"{A}.optim.min_lr_ratio": 0.5, f"{A}.optim.lr_scheduler": "cosine"}),
        ([f"{A}.strategy=megatron", f"{A}.megatron.param_offload=True",
          f"{A}.megatron.grad_offload=True", "critic.strategy=megatron",
          "critic.megatron.param_offload=True", "+critic.model.fsdp_config.param_offload=False",
          f"+{A}.megatron.override_transformer_config.recompute_granularity=full"],
         {f"{A}.engine.param_offload": True, f"{M}.gradient_checkpointing": True,
          "actor_rollout_ref.ref.engine.name": "megatron", "critic.engine.param_offload": True}),
        ([f"{A}.policy_loss.loss_mode=clip_cov", f"{A}.policy_loss.clip_cov_ub=4.0"],
         {f"{A}.policy_loss.options": {"clip_cov_ub": 4.0}}),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=0",
          "+data.gen_batch_size=1536"],
         {"algorithm.filter_groups.mode": "refill", "algorithm.filter_groups.under_filled": "error",
          "algorithm.filter_groups.max_num_gen_batches": 10**6}),
        (["reward_model.reward_manager=dapo", "reward_model.reward_kwargs.max_resp_len=512",
          "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
          "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128"],
         {"algorithm.overlong.enable": True, "algorithm.overlong.buffer_length": 128}),
        (["+reward_model.overlong_buffer.enable=True"], {"algorithm.overlong.enable": False}),
        ([*RM, "reward_model.strategy=fsdp2", "reward_model.use_reward_loop=False"],
         {"reward_model.enable": True, "reward_model.model.path": "hf://a/rm",
          "reward_model.rule_weight": 0.0, "reward_model.engine.name": "fsdp"}),
        ([*POOL, "reward_model.n_gpus_per_node=8"],
         {"trainer.nnodes": 2, "placement.actor": ["0-7"], "placement.reward_model": ["8-15"]}),
        ([*POOL, "reward_model.n_gpus_per_node=2"],
         {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 10, "placement.reward_model": ["8-9"]}),
        (["trainer.default_hdfs_dir=hdfs://a/run"], {"trainer.remote_dir": "hdfs://a/run"}),
        # a key of Quadriga
        ([f"{R}.name=vllm", f"{R}.options.kv_cache_mb=512"],
         {f"{R}.options": {"kv_cache_mb": 512, "gpu_memory_utilization": 0.5}}),
    ],
)  # fmt: skip
def test_command_lines_become_settings(tmp_path, overrides, expected):
    config = read(tmp_path, overrides).config
    found = {key: reduce(getattr, key.split("."), config) for key in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(([f"+{key}={value}"], rf"^{key}=.* of verl has no counterpart: ") for key, value in {
            "data.sampler.class_path": "a.py", "data.val_max_samples": 8,
            "trainer.checkpoint_callback_class": "a", "trainer.del_local_ckpt_after_load": True,
            "actor_rollout_ref.hybrid_engine": False, f"{M}.external_lib": "a.b",
            f"{R}.skip_rollout": True, "data.reward_fn_key": "source", f"{A}.ppo_micro_batch_size":
            8, f"{M}.override_config.rope_theta": 1, "reward_model.reward_manager": "batch",
            f"{A}.optim.override_optimizer_config.momentum": 0.5, "trainer.v1.trainer_mode":
            "separate_async", f"{M}.mtp.enable": True, f"{R}.nnodes": 1}.items()),
        ([f"{R}.response_length=64"], r"^.*response_length=64 .* is 512: one length .* both equal"),
        ([*RM, "+custom_reward_function.path=a.py"], "enable is True: verl scores with only one"),
        ([*POOL, "reward_model.n_gpus_per_node=0"], r"needs reward_model\.nnodes ≥ 1"),
        (["+data.gen_batch_size=8"], r"gen_batch_size=8 .*train_batch_size is 1024"),
        (["+critic.enable=False"], "the estimator gae needs the critic"),
        ([f"{A}.optim.clip_grad=0.5", f"{A}.grad_clip=2.0"], r"both set .*optim\.grad_clip; rem"),
        ([f"{R}.name=vllm", f"{R}.max_num_seqs=8", f"{R}.micro_batch_size=9"], "both set"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_or_contradicts_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, overrides)


def test_a_folder_beside_the_file_is_a_choice_of_files(tmp_path):
    (tmp_path / "model_engine").mkdir()
    (tmp_path / "model_engine/megatron.yaml").write_text("model_engine: megatron\n")
    told = read(tmp_path, ["+model_engine=megatron", "+algorithm.gamma=0.5"])
    assert told.config.algorithm.gamma == 0.5


def test_fine_tuning_keeps_its_checkpoints_and_its_conversations(tmp_path):
    config = read(
        tmp_path, ["+data.messages_key=messages", "+trainer.save_freq=5", "engine.strategy=fsdp2"],
        SFTConfig, SFT,
    ).config  # fmt: skip
    assert (config.data.messages_key, config.trainer.save_freq) == ("messages", 5)
    assert config.engine.name == "fsdp"
    megatron = ["+engine._target_=verl.workers.config.McoreEngineConfig", "+model.lora.rank=0"]
    assert read(tmp_path, megatron, SFTConfig, SFT).config.engine.name == "megatron"


def test_a_reward_model_has_a_pool_if_the_run_uses_it(capsys):
    roles = (Role.ActorRollout, Role.Critic, Role.RefPolicy, Role.RewardModel)
    manager = ResourcePoolManager({"g": [1]}, dict.fromkeys(roles, "g"))
    config = TrainConfig(algorithm=AlgorithmConfig(adv_estimator="grpo"))
    check_called(manager.mapping, config, "the mapping")
    assert pools_of(manager, config, "cpu").mapping[Role.ActorRollout] == "g"
    assert "does not use: critic, ref, reward_model" in capsys.readouterr().err
    own = {"nnodes": 1, "n_gpus_per_node": 2, "enable_resource_pool": True}
    for more, pool, spec in (
        ({}, "global_pool", {"global_pool": [8]}),
        (own, "reward_pool", {"global_pool": [8], "reward_pool": [2]}),
    ):
        section = {"enable": True, "model": {"path": "/rm"}, **more}
        given = {"reward_model": section, "trainer": {"nnodes": 1, "n_gpus_per_node": 8}}
        runner = TaskRunner()
        runner.add_reward_model_resource_pool(given)
        assert runner.mapping == {Role.RewardModel: pool}
        assert runner.init_resource_pool_mgr(given).resource_pool_spec == spec


def test_the_workers_of_megatron_need_the_engine():
    from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    import quadriga.compat.verl  # noqa: F401

    actor = {"model": {"path": "/m"}, "actor": {"strategy": "megatron"}}
    built = ActorRolloutRefWorker(config=actor, role="actor")
    assert built.config.actor.engine.name == built.config.ref.engine.name == "megatron"
    for cls, config, section in (
        (
            ActorRolloutRefWorker,
            {**actor, "actor": {"strategy": "fsdp"}},
            "actor_rollout_ref.actor",
        ),
        (CriticWorker, {"model": {"path": "/m"}, "strategy": "fsdp2"}, "critic"),
        (RewardModelWorker, RewardModelConfig(), "reward_model"),
    ):
        arguments = {"role": "actor_rollout"} if section.endswith("actor") else {}
        with pytest.raises(ConfigError, match=f"but the settings choose fsdp; set {section}.strat"):
            cls(config=config, **arguments)
