"""What the sections `trainer` of all commands that train have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import BackendName, DeviceName


@dataclass(frozen=True)
class RunConfig(PathSettings):
    """Machines, number of steps, validation, checkpoints and the run folder."""

    PATHS = ("default_local_dir", "resume_mode")

    backend: BackendName = "ray"  # local: one process, in which breakpoints work
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    nnodes: int = 1  # nodes
    n_gpus_per_node: int = 1  # ranks per node, on CPU machines too
    num_cpus: int | None = None  # CPUs that a new Ray cluster may use; None: all
    threads_per_worker: int | None = None  # None: CPUs of the node / ranks per node
    total_epochs: int = 1  # passes over the training data
    total_training_steps: int | None = None  # None: epochs × batches per epoch
    seed: int = 0  # of sampling, shuffling and new weights
    test_freq: int = 0  # steps between validations; 0: only after the last step
    # A checkpoint is saved after the last step, every `save_freq` steps, and after the first step
    # that ends `save_interval_s` seconds after the last checkpoint. A crash in a run with these
    # defaults therefore loses half an hour and one step.
    save_freq: int = 0  # steps between checkpoints; 0: by time and after the last step
    save_interval_s: float | None = 1800.0  # seconds between checkpoints; None: not by time
    max_ckpt_to_keep: int | None = 3  # the newest ones; older ones are deleted; None: keep all
    save_on_stop: bool = True  # on SIGTERM or Ctrl-C, end the step and save a checkpoint first
    stop_grace_s: float = 60.0  # seconds for that; then the run stops without a new checkpoint
    # disable, auto (the newest complete checkpoint; without one, from step 1) or its folder
    resume_mode: str = "disable"
    resume_override: bool = False  # resume although data or model differ from the checkpoint's
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
