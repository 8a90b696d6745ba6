"""`quadriga rm`: a reward model from pairs of responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.schema.choices import BackendName, DeviceName
from quadriga.config.schema.model import EngineConfig, ModelConfig, OptimConfig


@dataclass(frozen=True)
class RMDataConfig:
    """Pairs: each row has a chosen and a rejected response to one prompt.

    A response is text, to the prompt in `prompt_key`; or a list of messages, whose last one is the
    response and whose others are the prompt.
    """

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts, where responses are text
    chosen_key: str = "chosen"  # column of the better responses
    rejected_key: str = "rejected"  # column of the worse responses
    margin_key: str | None = None  # column of the least difference of scores; None: 0
    train_batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size_per_gpu: int | None = None  # sequences; None: see engine.use_dynamic_bsz
    max_length: int = 1024  # tokens of a conversation; longer pairs are left out
    shuffle: bool = True  # shuffle the pairs in each epoch


@dataclass(frozen=True)
class RMTrainerConfig:
    """Machines, number of steps, validation, checkpoints and the run folder."""

    backend: BackendName = "ray"  # local: one process, in which breakpoints work
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    nnodes: int = 1  # nodes
    n_gpus_per_node: int = 1  # ranks per node, on CPU machines too
    num_cpus: int | None = None  # CPUs that a new Ray cluster may use; None: all
    threads_per_worker: int | None = None  # None: CPUs of the node / ranks per node
    total_epochs: int = 1  # passes over the training data
    total_training_steps: int | None = None  # None: epochs × batches per epoch
    seed: int = 0  # of shuffling and new weights
    test_freq: int = 0  # steps between validations; 0: only after the last step
    save_freq: int = 0  # steps between checkpoints; 0: only after the last step
    max_ckpt_to_keep: int | None = 3  # the newest ones; older ones are deleted; None: keep all
    resume_mode: str = "disable"  # disable, auto (the newest complete checkpoint) or its folder
    resume_override: bool = False  # resume although data or model differ from the checkpoint's
    project_name: str = "quadriga"  # of the learning curve and of trackers
    experiment_name: str = "rm"  # name of the run there
    default_local_dir: str = "runs/rm"  # run folder
    overwrite: bool = False  # replace a run that is already in the folder
    # console, jsonl, tensorboard, wandb, or a tracker of your own
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    call_timeout_s: float | None = 3600.0  # deadline of one call to a worker group; None: none


@dataclass(frozen=True)
class RMConfig:
    """Settings of `quadriga rm`."""

    data: RMDataConfig = field(default_factory=RMDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: RMTrainerConfig = field(default_factory=RMTrainerConfig)
