"""Old log-probabilities of the update itself equal those of a pass of their own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig, TrainConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, fields
from quadriga.trainer import dataflow, stages
from quadriga.trainer.checks.settings import check_train_settings
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.role_workers import settings_for_classes
from quadriga.trainer.roles.placement import Role
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.updates import update_policy

ACTOR = "actor_rollout_ref.actor"
SETTING = f"{ACTOR}.old_log_probs_from_update"
LORA = "actor_rollout_ref.model.lora"
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=null"

RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture
def rule(tmp_path) -> str:
    """The setting of a reward that differs from response to response."""
    (tmp_path / "rule.py").write_text(RULE)
    return f"reward.path={tmp_path / 'rule.py'}"


# Which settings choose it.


def chosen(*overrides: str) -> bool:
    usual = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    return dataflow.takes_old_log_probs_from_update(load_config(TrainConfig, [*usual, *overrides]))


def test_it_is_chosen_where_a_step_is_one_optimizer_step_and_nothing_reads_them_before() -> None:
    assert chosen()
    assert chosen("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
    assert not chosen(f"{ACTOR}.ppo_mini_batch_size=32")
    assert not chosen(f"{ACTOR}.ppo_epochs=2")
    assert not chosen("algorithm.use_kl_in_reward=true")
    assert not chosen("algorithm.rollout_correction.level=token")
    assert not chosen(f"{ACTOR}.policy_loss.name=clip_cov")
    assert not chosen("algorithm.adv_estimator=gae", "critic.warmup_steps=1")
    assert chosen(f"{LORA}.rank=4")
    assert not chosen(f"{LORA}.rank=4", f"{LORA}.dropout=0.1")  # of an update only
    assert not chosen(f"{SETTING}=false")


def test_several_optimizer_steps_are_refused_with_the_arithmetic() -> None:
    overrides = [f"{SETTING}=true", f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ppo_epochs=2"]
    message = r"but 64 / 16 mini-batches × 2 epochs = 8"
    with pytest.raises(ConfigError, match=message):
        check_train_settings(load_config(TrainConfig, overrides))


def test_adapters_that_drop_inputs_in_an_update_are_refused() -> None:
    overrides = [f"{SETTING}=true", f"{LORA}.rank=4", f"{LORA}.dropout=0.1"]
    with pytest.raises(ConfigError, match=r"lora\.dropout=0\.1 drops inputs in an update"):
        check_train_settings(load_config(TrainConfig, overrides))


def test_a_stage_that_reads_them_before_the_update_is_named() -> None:
    config = load_config(
        TrainConfig,
        ["algorithm.adv_estimator=grpo", f"{SETTING}=true", "algorithm.use_kl_in_reward=true"],
    )
    with pytest.raises(ConfigError, match="stage penalise_kl reads field 'old_log_probs'"):
        RayPPOTrainer(config)


def test_a_worker_class_with_its_own_update_gets_them_from_a_pass() -> None:
    class Own(ActorRolloutRefWorker):
        def update_actor(self, data: DataProto) -> DataProto:
            return data

    class Plain(ActorRolloutRefWorker): ...

    config = load_config(TrainConfig, ["algorithm.adv_estimator=grpo"])
    assert settings_for_classes(config, {Role.ActorRollout: Plain}) is config
    own = settings_for_classes(config, {Role.ActorRollout: Own})
    assert own.actor_rollout_ref.actor.old_log_probs_from_update is False
    assert not own.actor_rollout_ref.actor.skip_zero_advantages  # it may read them in every row
    insisting = load_config(TrainConfig, [f"{SETTING}=true"])
    own = settings_for_classes(insisting, {Role.ActorRollout: Own})
    assert own.actor_rollout_ref.actor.old_log_probs_from_update is True


# Parity.


def float64_batch(vocabulary: int) -> DataProto:
    """Six rows with left padding and responses of different lengths."""
    generator = torch.Generator().manual_seed(1)
    B, P, R = 6, 5, 7
    prompt_lengths = torch.tensor([5, 5, 3, 3, 1, 4])
    lengths = torch.tensor([7, 2, 5, 1, 6, 3])
    prompt = torch.arange(P) >= P - prompt_lengths[:, None]
    mask = torch.arange(R) < lengths[:, None]
    ids = torch.randint(3, vocabulary, (B, P + R), generator=generator)
    ids[1, :P], ids[3, :P] = ids[0, :P], ids[2, :P]  # two prompt groups of two rows
    attention = torch.cat([prompt, mask], 1).long()
    noise = torch.rand(B, R, generator=generator, dtype=torch.float64)
    return DataProto.from_dict(
        {
            fields.INPUT_IDS: ids * attention,
            fields.ATTENTION_MASK: attention,
            fields.POSITION_IDS: (attention.cumsum(-1) - 1).clamp(min=0),
            fields.RESPONSES: ids[:, P:],
            fields.RESPONSE_MASK: mask.long(),
            fields.ADVANTAGES: (noise - 0.5) * mask,
            fields.ROLLOUT_LOG_PROBS: (-3 * noise - 0.1) * mask,
        }
    )


def exact_log_probs(engine: FSDPEngine, batch: DataProto) -> torch.Tensor:
    """Return the log-probabilities in float64; `forward` returns float32."""
    rows = {key: batch.batch[key] for key in batch.batch.keys()}  # noqa: SIM118
    with torch.no_grad():
        return engine._token_model(rows, temperature=1.0, entropy=False)["log_probs"]


@pytest.mark.parametrize("micro", [1, 3, None])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "decoupled_ppo", "ppo_clip, entropy bonus"])
def test_the_parameters_after_an_update_are_equal(tiny_task, micro, packed, loss) -> None:
    settings = load_config(
        TrainConfig,
        [f"{ACTOR}.policy_loss.name={loss.split(',')[0]}", ONE_STEP,
         f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro or 'null'}",
         f"{ACTOR}.entropy_coeff={0.1 if 'bonus' in loss else 0}"],
    ).actor_rollout_ref.actor  # fmt: skip
    parameters, reports = [], []
    for from_update in (True, False):
        engine = FSDPEngine(
            ModelConfig(path=str(tiny_task.model)),
            EngineConfig(dtype="float64", reduce_dtype="float64"),
            OptimConfig(lr=1e-2),
            packed=packed,
        )
        batch = float64_batch(64)
        if not from_update:
            batch.batch[fields.OLD_LOG_PROBS] = exact_log_probs(engine, batch)
        report = update_policy(
            engine, batch, settings,
            responses_per_prompt=2, temperature=1.0, length_scale=7, data_ranks=1, seed=0,
        )  # fmt: skip
        parameters.append(dict(engine.state_stream()))
        reports.append(report.meta_info["metrics"])
    before = dict(
        FSDPEngine(
            ModelConfig(path=str(tiny_task.model)), EngineConfig(dtype="float64")
        ).state_stream()
    )
    assert any(not torch.equal(before[name], value) for name, value in parameters[0].items())
    for name, value in parameters[0].items():
        torch.testing.assert_close(value, parameters[1][name], atol=1e-10, rtol=0)
    assert reports[0] == pytest.approx(reports[1], abs=1e-10)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_run_computes_the_same_numbers_with_one_pass_less(
    run, tmp_path, monkeypatch, rule, estimator
) -> None:
    passes: list[str] = []
    original = ActorRolloutRefWorker.compute_log_prob

    def counted(self, data):
        passes.append("pass")
        return original(self, data)

    vars(counted).update(vars(original))
    monkeypatch.setattr(ActorRolloutRefWorker, "compute_log_prob", counted)
    more = [ONE_STEP, rule, f"algorithm.adv_estimator={estimator}", f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.use_kl_loss=true"]  # fmt: skip
    without = run(*more)
    assert passes == []
    with_pass = run(*more, f"{SETTING}=false", f"trainer.default_local_dir={tmp_path / 'b'}")
    assert len(passes) == 2
    for ours, theirs in zip(without, with_pass, strict=True):
        names = {name for name in theirs if not name.startswith(("time/", "perf/", "progress/"))}
        assert names == {n for n in ours if not n.startswith(("time/", "perf/", "progress/"))}
        for name in names:
            # Statistics of log-probabilities: the pass returns them in float32.
            assert ours[name] == pytest.approx(theirs[name], abs=2e-5), name
    assert without[1]["actor/entropy"] > 1 and without[1]["mismatch/abs"] >= 0
    ours, theirs = (load_file(tmp_path / f / "model" / "model.safetensors") for f in ("run", "b"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=0)


# Metrics.


@pytest.mark.parametrize(
    "more",
    [
        [f"{ACTOR}.use_kl_loss=true", ONE_STEP],
        ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
         "algorithm.overlong.enable=true", "algorithm.overlong.buffer_length=4"],
        ["algorithm.rollout_correction.level=token", f"{ACTOR}.entropy_coeff=0.01"],
        ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill"],
    ],
)  # fmt: skip
def test_every_metric_that_a_stage_or_an_update_computes_is_logged(
    run, monkeypatch, rule, more
) -> None:
    computed: set[str] = set()
    created = stages.StageResult.__new__

    def noted(cls, batch, metrics):
        computed.update(metrics)
        return created(cls, batch, metrics)

    from quadriga.trainer.record import RunRecord

    log_update = RunRecord.log_update

    def log(self, report):
        computed.update(report.meta_info["metrics"])
        for partials in report.non_tensor_batch[fields.PARTIALS]:
            computed.update(name for part in partials for name in part)
        log_update(self, report)

    monkeypatch.setattr(stages.StageResult, "__new__", noted)
    monkeypatch.setattr(RunRecord, "log_update", log)
    rows = run(rule, *more)
    logged = {name for row in rows for name in row}
    # Statistics from which the metrics of the mismatch are made.
    expected = {name for name in computed if not name.startswith("mismatch/")}
    assert len(expected) > 15 and expected <= logged, expected - logged
    assert {"actor/entropy", "mismatch/k1", "mismatch/sequence_ess"} <= logged
