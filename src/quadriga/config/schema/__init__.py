"""All settings and their defaults, as frozen dataclasses: the settings of a run never change.

    train      `quadriga train`: data, steps, machines, placement, and the sections of all others
    roles      the policy in its three uses (actor, rollout, reference), and the critic
    model      a model, its optimizer and its training engine, which several roles share
    algorithm  advantages, KL, group filtering, over-long penalty, importance correction
    reward     rewards
    sft        `quadriga sft`
    rm         `quadriga rm`
    run        what the sections `trainer` of these three have in common
    evaluation `quadriga generate` and `quadriga eval`
    commands   the other commands
    choices    the closed lists of choices

Batch sizes (`quadriga plan` prints these numbers for a run):

    data.train_batch_size                         prompts per step, over all ranks
    × actor_rollout_ref.rollout.n                 = sequences per step, over all ranks
    actor_rollout_ref.actor.ppo_mini_batch_size   prompts per optimizer step, over all ranks
    ….ppo_micro_batch_size_per_gpu                most sequences per pass with gradients, per rank
    ….engine.max_tokens_per_micro_batch           most tokens per pass, per rank

A value of None means "not given"; the comment of the setting says which value is used then. The
comment is on the line of the setting or above it, and `--help` prints it. A setting with a closed
list of choices has a `Literal` type, and that type is the only place where the choices are listed:
loading, checks and help read it. Names that users can register (estimators, losses, rewards,
trackers, engines) are `str`; `config.checks` compares them with the registries.
"""

from __future__ import annotations

from quadriga.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
)
from quadriga.config.schema.choices import (
    MISSING_PATH,
    AggregationName,
    AlarmAction,
    AttentionName,
    BackendName,
    Checkpointing,
    CorrectionLevel,
    CorrectionMode,
    DeviceName,
    DtypeName,
    FailurePolicy,
    FilterMode,
    GenerationBackendName,
    KLControlType,
    KLName,
    LossTurns,
    LrSchedulerName,
    Operation,
    OptimizerName,
    Options,
    ReduceDtypeName,
    SampledKLName,
    UnderFilled,
    WeightTransport,
)
from quadriga.config.schema.commands import (
    AlgorithmsConfig,
    ArithmeticDataConfig,
    DemoConfig,
)
from quadriga.config.schema.evaluation import (
    EvalConfig,
    GenerateConfig,
    GenerationConfig,
    RanksConfig,
)
from quadriga.config.schema.model import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.config.schema.reward import RewardConfig, RewardModelConfig
from quadriga.config.schema.rm import RMConfig, RMDataConfig, RMTrainerConfig
from quadriga.config.schema.roles import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    MismatchConfig,
    PolicyLossConfig,
    RefConfig,
    ReplicasConfig,
    RolloutConfig,
    RolloutEngineConfig,
    SamplingConfig,
)
from quadriga.config.schema.run import RunConfig
from quadriga.config.schema.sft import SFTConfig, SFTDataConfig, SFTTrainerConfig
from quadriga.config.schema.train import (
    DataConfig,
    DatasetClassConfig,
    PlacementConfig,
    SamplerConfig,
    TrainConfig,
    TrainerConfig,
)

__all__ = [
    "MISSING_PATH",
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AggregationName",
    "AlarmAction",
    "AlgorithmConfig",
    "AlgorithmsConfig",
    "ArithmeticDataConfig",
    "AttentionName",
    "BackendName",
    "Checkpointing",
    "CorrectionLevel",
    "CorrectionMode",
    "CriticConfig",
    "DataConfig",
    "DatasetClassConfig",
    "DemoConfig",
    "DeviceName",
    "DtypeName",
    "EngineConfig",
    "EvalConfig",
    "FailurePolicy",
    "FilterGroupsConfig",
    "FilterMode",
    "GenerateConfig",
    "GenerationBackendName",
    "GenerationConfig",
    "KLControlConfig",
    "KLControlType",
    "KLName",
    "LoraConfig",
    "LossTurns",
    "LrSchedulerName",
    "MismatchConfig",
    "ModelConfig",
    "Operation",
    "OptimConfig",
    "OptimizerName",
    "Options",
    "OverlongConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "RMConfig",
    "RMDataConfig",
    "RMTrainerConfig",
    "RanksConfig",
    "ReduceDtypeName",
    "RefConfig",
    "ReplicasConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutEngineConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "SampledKLName",
    "SamplerConfig",
    "SamplingConfig",
    "TrainConfig",
    "TrainerConfig",
    "UnderFilled",
    "WeightTransport",
]
