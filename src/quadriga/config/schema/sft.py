"""`quadriga sft`: supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import LossTurns, Options
from quadriga.config.schema.model import EngineConfig, ModelConfig, OptimConfig
from quadriga.config.schema.reward import RewardConfig
from quadriga.config.schema.roles import SamplingConfig
from quadriga.config.schema.run import RunConfig


@dataclass(frozen=True)
class SFTDataConfig(PathSettings):
    """Prompts with answers, or conversations of several turns."""

    PATHS = ("train_files", "val_files")

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
    response_key: str = "extra_info.answer"  # column of the answers, a dotted path
    # column of conversations, lists of messages; None: rows have a prompt and an answer
    messages_key: str | None = None
    loss_turns: LossTurns = "all"  # turns of the assistant that are trained
    val_loss: bool = True  # compute the loss of val_files; false: their rows need no answers
    train_batch_size: int = 64  # rows per optimizer step, over all ranks
    micro_batch_size_per_gpu: int | None = None  # most sequences; see engine.use_dynamic_bsz
    max_length: int = 1024  # tokens of a conversation; longer rows are left out
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    shuffle: bool = True  # shuffle the rows in each epoch
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    """Machines, number of steps, validation, checkpoints and the run folder."""

    experiment_name: str = "sft"  # name of the run there
    default_local_dir: str = "runs/sft"  # run folder
    stop_at_accuracy: float | None = None  # stop when greedy validation accuracy reaches this value
    val_size: int = 256  # validation rows used each time
    max_response_length: int = 256  # tokens, in validation
    # of the responses in validation: greedy, and what ends them beside the end tokens of the model
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    samples_per_step: int = 8  # responses written to the run folder at each validation


@dataclass(frozen=True)
class SFTConfig:
    """Settings of `quadriga sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
