"""`quadriga train`: data, steps, machines, and all other sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.algorithm import AlgorithmConfig
from quadriga.config.schema.choices import Options
from quadriga.config.schema.reward import RewardConfig, RewardModelConfig
from quadriga.config.schema.roles import ActorRolloutRefConfig, CriticConfig
from quadriga.config.schema.run import RunConfig


@dataclass(frozen=True)
class DatasetClassConfig(PathSettings):
    """A dataset class of the user, in place of the one that reads the files."""

    PATHS = ("path",)

    path: str | None = None  # Python file; None: the built-in class
    name: str = "Dataset"  # class in this file


@dataclass(frozen=True)
class SamplerConfig(PathSettings):
    """A class of the user that chooses the rows of each batch, such as a curriculum."""

    PATHS = ("path",)

    path: str | None = None  # Python file; None: the seeded order
    name: str = "Sampler"  # class in this file
    options: Options = field(default_factory=dict)  # keyword arguments of the class


@dataclass(frozen=True)
class DataConfig(PathSettings):
    """The prompts: files, batch sizes, lengths in tokens."""

    PATHS = ("train_files", "val_files")

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    # share of each training file in the prompts; None: every row once in an epoch
    train_weights: list[float] | None = None
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    image_key: str | None = "images"  # column of the images of a prompt; None: there are none
    train_batch_size: int = 64  # prompts per step, over all ranks
    val_batch_size: int = 256  # prompts generated at once in validation
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = True  # false: a prompt that is too long is an error
    shuffle: bool = True  # shuffle the prompts in each epoch
    seed: int | None = None  # seed of the row order; None: trainer.seed
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"
    dataset: DatasetClassConfig = field(default_factory=DatasetClassConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """Machines, number of steps, validation, checkpoints, the run folder, and balancing."""

    val_before_train: bool = True  # validate before the first step
    test_freq: int = 10  # steps between validations; 0: only after the last step
    samples_per_step: int = 8  # responses written to the run folder in each step
    balance_batch: bool = True  # give each rank about the same work in each mini-batch
    # keep the responses of one prompt on one rank, which computes the prompt once for all of them;
    # false: balance single sequences
    balance_groups: bool = True


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks each role uses. Roles with the same ranks share one process on each of them.

    Ranks are counted node by node from 0. An entry is one rank or a range: [0-3], [0,1,6-7].
    """

    actor: list[int | str] | None = None  # ranks of the trained policy; None: all
    rollout: list[int | str] | None = None  # ranks that generate; None: those of the actor
    ref: list[int | str] | None = None  # ranks of the reference policy; None: those of the actor
    critic: list[int | str] | None = None  # ranks of the critic; None: those of the actor
    reward_model: list[int | str] | None = None  # ranks of the reward model; None: the actor's


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `quadriga train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
