"""`quadriga train`: data, steps, machines, and all other sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.schema.algorithm import AlgorithmConfig
from quadriga.config.schema.choices import BackendName, DeviceName, Options
from quadriga.config.schema.reward import RewardConfig, RewardModelConfig
from quadriga.config.schema.roles import ActorRolloutRefConfig, CriticConfig


@dataclass(frozen=True)
class DatasetClassConfig:
    """A dataset class of the user, in place of the one that reads the files."""

    path: str | None = None  # Python file; None: the built-in class
    name: str = "Dataset"  # class in this file


@dataclass(frozen=True)
class SamplerConfig:
    """A class of the user that chooses the rows of each batch, such as a curriculum."""

    path: str | None = None  # Python file; None: the seeded order
    name: str = "Sampler"  # class in this file
    options: Options = field(default_factory=dict)  # keyword arguments of the class


@dataclass(frozen=True)
class DataConfig:
    """The prompts: files, batch sizes, lengths in tokens."""

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    # share of each training file in the prompts; None: every row once in an epoch
    train_weights: list[float] | None = None
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
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
class TrainerConfig:
    """Machines, number of steps, validation, checkpoints and the run folder."""

    backend: BackendName = "ray"  # local: one process, in which breakpoints work
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    nnodes: int = 1  # nodes
    n_gpus_per_node: int = 1  # ranks per node, on CPU machines too
    num_cpus: int | None = None  # CPUs that a new Ray cluster may use; None: all
    threads_per_worker: int | None = None  # None: CPUs of the node / ranks per node
    total_epochs: int = 1  # passes over the training data
    total_training_steps: int | None = None  # None: epochs × batches per epoch
    seed: int = 0  # of sampling, shuffling and new weights
    val_before_train: bool = True  # validate before the first step
    test_freq: int = 10  # steps between validations; 0: only after the last step
    # A checkpoint is saved after the last step, every `save_freq` steps, and after the first step
    # that ends `save_interval_s` seconds after the last checkpoint. A crash in a run with these
    # defaults therefore loses half an hour and one step.
    save_freq: int = 0  # steps between checkpoints; 0: by time and after the last step
    save_interval_s: float | None = 1800.0  # seconds between checkpoints; None: not by time
    max_ckpt_to_keep: int | None = 3  # the newest ones; older ones are deleted; None: keep all
    save_on_stop: bool = True  # on SIGTERM or Ctrl-C, end the step and save a checkpoint first
    stop_grace_s: float = 60.0  # seconds for that; then the run stops without a new checkpoint
    resume_mode: str = "disable"  # disable, auto (the newest complete checkpoint) or its folder
    resume_override: bool = False  # resume although data or model differ from the checkpoint's
    samples_per_step: int = 8  # responses written to the run folder in each step
    project_name: str = "quadriga"  # of the learning curve and of trackers
    experiment_name: str = "run"  # name of the run there
    default_local_dir: str = "runs/run"  # run folder
    overwrite: bool = False  # replace a run that is already in the folder
    # console, jsonl, tensorboard, wandb, or a tracker of your own
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    call_timeout_s: float | None = 3600.0  # deadline of one call to a worker group; None: none
    check_memory: bool = True  # refuse a run that does not fit by the plan of its memory
    # GiB that a rank's device has, or on CPUs all ranks of a node; None: as this machine has
    device_memory_gb: float | None = None
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
