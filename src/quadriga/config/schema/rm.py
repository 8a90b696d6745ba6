"""`quadriga rm`: a reward model from pairs of responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import Options
from quadriga.config.schema.model import EngineConfig, ModelConfig, OptimConfig
from quadriga.config.schema.run import RunConfig


@dataclass(frozen=True)
class RMDataConfig(PathSettings):
    """Pairs: each row has a chosen and a rejected response to one prompt.

    A response is text, to the prompt in `prompt_key`; or a list of messages, whose last one is the
    response and whose others are the prompt.
    """

    PATHS = ("train_files", "val_files")

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts, where responses are text
    chosen_key: str = "chosen"  # column of the better responses
    rejected_key: str = "rejected"  # column of the worse responses
    margin_key: str | None = None  # column of the least difference of scores; None: 0
    train_batch_size: int = 64  # pairs per optimizer step, over all ranks
    micro_batch_size_per_gpu: int | None = None  # most sequences; see engine.use_dynamic_bsz
    max_length: int = 1024  # tokens of a conversation; longer pairs are left out
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    shuffle: bool = True  # shuffle the pairs in each epoch
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"


@dataclass(frozen=True)
class RMTrainerConfig(RunConfig):
    """Machines, number of steps, validation, checkpoints and the run folder."""

    experiment_name: str = "rm"  # name of the run there
    default_local_dir: str = "runs/rm"  # run folder


@dataclass(frozen=True)
class RMConfig:
    """Settings of `quadriga rm`."""

    data: RMDataConfig = field(default_factory=RMDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: RMTrainerConfig = field(default_factory=RMTrainerConfig)
