"""A settings file and a command line of verl become settings of ours, and the rest is told."""

from pathlib import Path

import pytest

from quadriga.cli.main import main
from quadriga.compat.verl_settings import EVAL, GENERATE, SFT, TRAIN, read_verl
from quadriga.config.commands import EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.convert import type_of_key
from quadriga.config.loading import to_yaml
from quadriga.config.schema import EngineConfig, TrainConfig
from quadriga.errors import ConfigError

FILE = """
actor_rollout_ref:
  model: {path: ~/models/small, lora_rank: 0, use_remove_padding: true}
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 16
    clip_ratio: 0.3
    clip_ratio_low: null
    clip_ratio_high: 0.4
    optim: {lr: 1e-5, lr_warmup_steps: -1, total_training_steps: -1, betas: [0.9, 0.95]}
    fsdp_config: {param_offload: true, forward_prefetch: false, dtype: bfloat16}
    policy_loss: {loss_mode: gspo}
    kl_loss_type: kl
  rollout:
    _target_: verl.workers.config.RolloutConfig
    name: vllm
    n: 8
    prompt_length: ${data.max_prompt_length}
    val_kwargs: {temperature: 0.5}
data: {train_files: a.parquet, train_batch_size: 32, max_prompt_length: 64, seed: null}
algorithm: {adv_estimator: grpo, kl_ctrl: {kl_coef: 0.01}}
critic: {optim: {lr: 5e-5}, model: {path: ~/models/other}}
trainer:
  logger: [console, wandb, file, clearml]
  project_name: mine
  save_freq: -1
  test_freq: 5
  total_training_steps: null
  default_local_dir: checkpoints/${trainer.project_name}
  device: cuda
ray_kwargs: {ray_init: {num_cpus: 4}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ppo_trainer.yaml"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    ("cls", "table"),
    [(TrainConfig, TRAIN), (SFTConfig, SFT), (GenerateConfig, GENERATE), (EvalConfig, EVAL)],
)
def test_every_row_of_the_table_names_a_setting_of_ours(cls, table):
    for row in table.values():
        for key in row.keys:
            type_of_key(cls, key)  # raises for an unknown key


def page_lines(table):
    """The rows of a table on the page: sections with the same settings are one row."""
    sections, rows = {}, {}
    for verl, row in table.items():
        *parents, name = verl.split(".")
        ours = {key.rpartition(".")[0] for key in row.keys}
        names = [key.rpartition(".")[2] for key in row.keys]
        pair = (f"`{'.'.join(parents)}`", ", ".join(f"`{section}`" for section in sorted(ours)))
        told = [f"`{name}`", *(f"`{n}`" for n in dict.fromkeys(names) if [n] != [name])]
        sections.setdefault(pair, []).append(" → ".join(told))
    for (verl, ours), settings in sections.items():
        where = verl if verl == ours else f"{verl} → {ours}"
        rows.setdefault(", ".join(settings), []).append(where)
    return [f"| {'; '.join(where)} | {settings} |" for settings, where in rows.items()]


def test_the_page_has_every_row_of_the_tables():
    page = (Path(__file__).parents[2] / "docs/concepts/verl_settings.md").read_text()
    _, *sections = page.split("\n## ")
    for section, table in zip(sections, (TRAIN, SFT, GENERATE, EVAL), strict=True):
        found = [line for line in section.splitlines() if line.startswith("| ")][1:]
        expected = page_lines(table)
        assert found == expected, "\n".join(expected)


def test_a_file_is_translated(file, monkeypatch):
    monkeypatch.setenv("HOME", "/elsewhere")
    config = read_verl(TrainConfig, TRAIN, file).config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.model.path == "/elsewhere/models/small"
    assert (actor.ppo_mini_batch_size, actor.optim.lr, actor.optim.betas) == (16, 1e-5, (0.9, 0.95))
    loss = actor.policy_loss
    assert (loss.name, loss.clip_ratio_low, loss.clip_ratio_high) == ("gspo_token", 0.3, 0.4)
    assert (actor.engine.param_offload, actor.engine.dtype) == (True, "bfloat16")
    assert actor.kl_loss_type == "k1"
    assert (rollout.name, rollout.n, rollout.val_sampling.temperature) == ("vllm", 8, 0.5)
    assert config.data.train_files == ["a.parquet"]
    assert config.trainer.loggers == ["console", "wandb", "jsonl"]
    assert (config.trainer.save_freq, config.trainer.test_freq) == (0, 5)
    assert config.trainer.default_local_dir == "checkpoints/mine"
    assert (config.trainer.device, config.trainer.num_cpus) == ("auto", 4)
    assert config.critic == TrainConfig().critic  # grpo needs no critic


def test_overrides_of_the_command_line_win_and_may_add_keys(file):
    given = ["data.train_batch_size=64", "+data.val_files=[v.parquet]"]
    data = read_verl(TrainConfig, TRAIN, file, given).config.data
    assert (data.train_batch_size, data.val_files) == (64, ["v.parquet"])


def test_a_typo_of_the_command_line_is_refused(file):
    for typo, meant in {
        "actor_rollout_ref.rolout.n": "actor_rollout_ref.rollout.n",
        "data.max_prompt_lenght": "data.max_prompt_length",
        "dat": None,
    }.items():
        with pytest.raises(ConfigError, match=rf"^{typo}: neither .* has this key") as told:
            read_verl(TrainConfig, TRAIN, file, [f"{typo}=4"])
        assert meant is None or f"Did you mean {meant}?" in str(told.value)
        assert f"+{typo}" in str(told.value)
    told = read_verl(TrainConfig, TRAIN, file, ["+data.max_prompt_lenght=4", "data.seed=3"])
    assert "data.max_prompt_lenght" in told.ignored and told.config.data.seed == 3
    read_verl(TrainConfig, TRAIN, file, ["trainer.project_name=x"])  # only the file has it


def test_what_is_ignored_is_listed(file):
    chosen = "actor_rollout_ref.rollout.enable_chunked_prefill"
    translation = read_verl(
        TrainConfig, TRAIN, file, [f"+{chosen}=0.5", "trainer.logger=[console,clearml]"]
    )
    ignored = set(translation.ignored)
    assert {chosen, "actor_rollout_ref.actor.fsdp_config.forward_prefetch"} <= ignored
    assert not {key for key in ignored if "_target_" in key or key in TRAIN}
    report = translation.report()
    assert "trainer.logger=['console', 'clearml'] → trainer.loggers=['console']" in report
    command_line, _, from_file = report.partition("from the file:")
    assert "  trainer.logger=clearml\n" in command_line
    assert chosen in command_line and chosen not in from_file
    assert "actor_rollout_ref.actor.fsdp_config: forward_prefetch" in from_file


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+actor_rollout_ref.model.lora.rank=8", "whose engine has no adapters; set"),
        ("trainer.val_only=true", "has no counterpart: validate a model with `quadriga eval`"),
        ("data.train_batch_size=many", r"data\.train_batch_size"),
        ("trainer.logger=5", r"trainer\.loggers must be .*, got 5; .* verl is trainer\.logger"),
        (
            "trainer.resume_mode=resume_path",
            r"but trainer\.resume_from_path is None: set .* to the",
        ),
        ("trainer=none", r"^trainer of verl is a section .* got 'none'; set .* trainer\."),
        ("actor_rollout_ref.rollout.val_kwargs=4", r"^actor.*val_kwargs of verl is a section"),
        ("data.seed=${nothing}", "cannot read"),
        ("data.seed", "expected key=value"),
    ],
)
def test_settings_that_cannot_be_taken_are_errors_that_name_verls_key(file, override, message):
    with pytest.raises(ConfigError, match=message) as told:
        read_verl(TrainConfig, TRAIN, file, [override])
    assert told.value.key in ("--verl", override.partition("=")[0].lstrip("+"))


def test_a_checkpoint_to_resume_from_needs_the_mode_that_reads_it(file):
    path = "trainer.resume_from_path=/runs/step_3"
    taken = read_verl(TrainConfig, TRAIN, file, ["trainer.resume_mode=resume_path", path])
    assert taken.config.trainer.resume_mode == "/runs/step_3"
    left = read_verl(TrainConfig, TRAIN, file, ["trainer.resume_mode=auto", path])
    assert left.config.trainer.resume_mode == "auto"
    assert "trainer.resume_from_path=/runs/step_3 (trainer.resume_mode is auto)" in left.ignored


@pytest.mark.timeout(60)  # texts that double 40 times
def test_interpolations_that_double_are_refused_before_they_are_resolved(tmp_path):
    lines = ["algorithm:", "  a0: xxxxxxxxxx"]
    lines += [f"  a{i}: ${{.a{i - 1}}}${{.a{i - 1}}}" for i in range(1, 40)]
    (tmp_path / "main.yaml").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="stand for more than"):
        read_verl(TrainConfig, TRAIN, tmp_path / "main.yaml")
    (tmp_path / "main.yaml").write_text("trainer: {project_name: a}\n")
    overrides = [f"+trainer.{line.strip().replace(': ', '=')}" for line in lines[1:]]
    with pytest.raises(ConfigError, match="stand for more than"):
        read_verl(TrainConfig, TRAIN, tmp_path / "main.yaml", overrides)


def test_the_report_shows_no_secrets(file, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-v4lue")
    override = "custom_reward_function.path='/rewards/${oc.env:WANDB_API_KEY}'"
    translation = read_verl(TrainConfig, TRAIN, file, [override])
    report = translation.report()
    assert "s3cr3t-v4lue" not in report and "reward.path=/rewards/***" in report
    assert "s3cr3t-v4lue" not in to_yaml(translation.config)


def test_the_command_line_prints_the_translation_once(capsys, replace_training, file):
    seen = []
    replace_training(seen.append)
    command = ["train", "--verl", str(file), "data.train_batch_size=8", "+trainer.v1.mode=sync"]
    assert main(command) == 0
    assert [config.data.train_batch_size for config in seen] == [8]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("settings of verl were translated") == 1
    assert "  trainer.v1.mode\n" in shown.err
    assert main(["train", "--verl", str(file), "--config", str(file)]) == 2
    assert "pass one" in capsys.readouterr().err
    assert main(["train", "--verl", str(file.parent / "none.yaml")]) == 2
    assert "no settings file" in capsys.readouterr().err


MEGATRON = """
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4, dtype: bfloat16,
      virtual_pipeline_model_parallel_size: 2, sequence_parallel: true, grad_offload: true,
      use_distributed_optimizer: false, optimizer_offload: true}
  ref: {megatron: {pipeline_model_parallel_size: 2, sequence_parallel: true}}
critic: {strategy: fsdp2, megatron: {tensor_model_parallel_size: 8}}
"""


def test_megatron_is_translated(tmp_path):
    (tmp_path / "main.yaml").write_text(MEGATRON)
    told = read_verl(TrainConfig, TRAIN, tmp_path / "main.yaml")
    assert told.config.actor_rollout_ref.actor.engine == EngineConfig(
        name="megatron", dtype="bfloat16", optimizer_offload=True, tensor_parallel_size=2,
        pipeline_parallel_size=4, virtual_pipeline_parallel_size=2, sequence_parallel=True,
        distributed_optimizer=False,
    )  # fmt: skip
    reference = told.config.actor_rollout_ref.ref.engine  # sequence_parallel needs tensor ranks
    assert reference == EngineConfig(name="megatron", pipeline_parallel_size=2)
    assert told.config.critic.engine == EngineConfig()
    assert "actor_rollout_ref.actor.megatron.grad_offload" in told.ignored
