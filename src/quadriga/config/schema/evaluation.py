"""The commands `generate` and `eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import DeviceName, GenerationBackendName, Options
from quadriga.config.schema.model import ModelConfig
from quadriga.config.schema.reward import RewardConfig
from quadriga.config.schema.roles import RolloutEngineConfig, SamplingConfig


@dataclass(frozen=True)
class RanksConfig:
    """The ranks that generate, as in the section `trainer` of `quadriga train`."""

    # ray; local: one process, in which breakpoints work; auto: local with one rank, else ray
    backend: GenerationBackendName = "auto"
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    nnodes: int = 1  # nodes
    n_gpus_per_node: int = 1  # ranks per node, on CPU machines too
    num_cpus: int | None = None  # CPUs that a new Ray cluster may use; None: all
    threads_per_worker: int | None = None  # None: CPUs of the node / ranks per node
    call_timeout_s: float | None = 3600.0  # deadline of the generation of one batch; None: none
    check_memory: bool = True  # refuse a generation that does not fit by the plan of its memory
    # GiB that a rank's device has, or on CPUs all ranks of a node; None: as this machine has
    device_memory_gb: float | None = None


@dataclass(frozen=True)
class GenerationConfig(PathSettings):
    """What `quadriga generate` and `quadriga eval` have in common."""

    PATHS: ClassVar[tuple[str, ...]] = ("data_files",)

    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutEngineConfig = field(default_factory=RolloutEngineConfig)
    trainer: RanksConfig = field(default_factory=RanksConfig)
    data_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files of prompts
    prompt_key: str = "prompt"  # column of the prompts
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    image_key: str | None = "images"  # column of the images of a prompt; None: there are none
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"
    n: int = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_prompt_length: int = 512  # tokens; longer prompts are left out
    max_response_length: int = 512  # tokens
    batch_size: int = 64  # prompts generated at once, over all ranks
    seed: int = 0  # of sampling, and of the bootstrap
    overwrite: bool = False  # replace an output that other settings or data have made


@dataclass(frozen=True)
class GenerateConfig(GenerationConfig):
    """Settings of `quadriga generate`: responses of a model to one prompt or files of prompts."""

    PATHS = (*GenerationConfig.PATHS, "images", "output")

    prompt: str | None = None  # one prompt; None: those of data_files
    images: list[str] = field(default_factory=list)  # image files of `prompt`
    output: str | None = None  # a .jsonl or .parquet file; None: standard output


@dataclass(frozen=True)
class EvalConfig(GenerationConfig):
    """Settings of `quadriga eval`: responses to files of prompts, scored and summarised."""

    PATHS = (*GenerationConfig.PATHS, "response_files", "output")

    # .parquet or .jsonl files that hold responses already; then nothing is generated
    response_files: list[str] = field(default_factory=list)
    response_key: str = "responses"  # column of a text or a list of texts in these files
    output: str = "runs/eval"  # folder
    reward: RewardConfig = field(default_factory=RewardConfig)
    pass_at: list[int] = field(default_factory=list)  # the k of pass@k; empty: 1, 2, 4, … and n
    correct_at: float = 1.0  # a response with at least this score is correct
    resamples: int = 1000  # of the bootstrap over prompts
    confidence: float = 0.95  # of the intervals
