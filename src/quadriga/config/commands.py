"""The settings of the commands beside `quadriga train`, as frozen dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from quadriga.config.paths import PathSettings
from quadriga.config.schema import (
    AgentConfig,
    BackendName,
    Count,
    DeviceName,
    EngineConfig,
    GenerationBackendName,
    LossTurns,
    MachineConfig,
    ModelConfig,
    Natural,
    OptimConfig,
    Options,
    Positive,
    RewardConfig,
    RolloutEngineConfig,
    RunConfig,
    SamplingConfig,
    Share,
    SpecialTokens,
)

MAX_ROWS = 5_000_000
"""Data files with more rows are not read."""

Rows = Annotated[int, Ge(1), Le(MAX_ROWS)]


@dataclass(frozen=True)
class _DataConfig(PathSettings):
    """What the rows of `quadriga sft` and the pairs of `quadriga rm` have in common."""

    PATHS = REMOTE = ("train_files", "val_files")
    KEPT = ("cache_dir",)

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts; pairs of messages have none
    train_batch_size: Count = 64  # rows per optimizer step, over all ranks
    micro_batch_size_per_gpu: Count | None = None  # most sequences; see engine.use_dynamic_bsz
    max_length: Count = 1024  # tokens of a conversation; longer rows are left out
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    special_tokens: SpecialTokens = "keep"  # what happens to special tokens in texts of messages
    shuffle: bool = True  # shuffle the rows in each epoch
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"


@dataclass(frozen=True)
class SFTDataConfig(_DataConfig):
    """Prompts with answers, or conversations of several turns."""

    response_key: str = "extra_info.answer"  # column of the answers, a dotted path
    # column of conversations, lists of messages; None: rows have a prompt and an answer
    messages_key: str | None = None
    loss_turns: LossTurns = "all"  # turns of the assistant that are trained
    val_loss: bool = True  # compute the loss of val_files; false: their rows need no answers


@dataclass(frozen=True)
class SFTTrainerConfig(RunConfig):
    """Machines, number of steps, validation, checkpoints and the run folder."""

    experiment_name: str = "sft"  # name of the run there
    default_local_dir: str = "runs/sft"  # run folder
    val_size: Count = 256  # validation rows used each time
    max_response_length: Count = 256  # tokens, in validation
    # of the responses in validation: greedy, and what ends them beside the end tokens of the model
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    samples_per_step: Natural = 8  # responses written to the run folder at each validation
    tokens_per_sample: Natural = 128  # tokens of each that are written with log-probabilities


@dataclass(frozen=True)
class SFTConfig:
    """Settings of `quadriga sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


@dataclass(frozen=True)
class RMDataConfig(_DataConfig):
    """Pairs: each row has a chosen and a rejected response to one prompt.

    A response is text, to the prompt in `prompt_key`; or a list of messages, whose last one is the
    response and whose others are the prompt.
    """

    chosen_key: str = "chosen"  # column of the better responses
    rejected_key: str = "rejected"  # column of the worse responses
    margin_key: str | None = None  # column of the least difference of scores; None: 0


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


@dataclass(frozen=True)
class RanksConfig(MachineConfig):
    """The ranks that generate, as in the section `trainer` of `quadriga train`."""

    # ray; local: one process, in which breakpoints work; auto: local with one rank, else ray
    backend: GenerationBackendName = "auto"


@dataclass(frozen=True)
class GenerationConfig(PathSettings):
    """What `quadriga generate` and `quadriga eval` have in common."""

    PATHS: ClassVar[tuple[str, ...]] = ("data_files",)
    REMOTE = ("data_files",)
    KEPT = ("cache_dir",)

    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutEngineConfig = field(default_factory=RolloutEngineConfig)
    trainer: RanksConfig = field(default_factory=RanksConfig)
    data_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files of prompts
    prompt_key: str = "prompt"  # column of the prompts
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    special_tokens: SpecialTokens = "keep"  # what happens to special tokens in texts of messages
    image_key: str | None = "images"  # column of the images of a prompt; None: there are none
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"
    n: Count = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_prompt_length: Count = 512  # tokens; longer prompts are left out
    max_response_length: Count = 512  # tokens
    agent: AgentConfig = field(default_factory=AgentConfig)  # a response is a whole episode
    batch_size: Count = 64  # prompts generated at once, over all ranks
    seed: Natural = 0  # of sampling, and of the bootstrap
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
    pass_at: list[Count] = field(default_factory=list)  # the k of pass@k; empty: 1, 2, 4, … and n
    correct_at: float = 1.0  # a response with at least this score is correct
    resamples: Count = 1000  # of the bootstrap over prompts
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95  # of the intervals


@dataclass(frozen=True)
class ArithmeticDataConfig(PathSettings):
    """Settings of `quadriga data make`: arithmetic word problems in the form of GSM8K.

    The command writes train.parquet, test.parquet and sft.parquet (demonstrations), which share no
    problem, and on request a tiny model and its tokenizer.
    """

    PATHS = ("output", "model_output")

    output: str = "data/arithmetic"  # folder for the files
    train_size: Rows = 4096  # rows of train.parquet
    val_size: Rows = 256  # rows of test.parquet
    sft_size: Rows = 512  # rows of sft.parquet
    # rows of rm.parquet, pairs of a right and a wrong solution, beside which rm_test.parquet has
    # pairs of the problems of test.parquet; 0: neither
    rm_size: Annotated[int, Ge(0), Le(MAX_ROWS)] = 0
    max_number: Count = 9  # largest number in a story
    min_steps: Count = 1  # calculations per problem
    max_steps: Count = 2  # most calculations per problem
    max_total: int | None = None  # largest intermediate result; None: no bound
    sft_careful: Share = 1.0  # share of demonstrations that do all steps, not only the first
    seed: Natural = 0  # of the problems and of the model
    model_output: str | None = None  # folder for a tiny model and its tokenizer; None: no model
    hidden_size: Count = 128  # of the tiny model, as the settings below
    num_layers: Count = 4  # transformer layers
    num_heads: Count = 4  # attention heads
    num_kv_heads: Count = 2  # key and value heads
    intermediate_size: Count = 384  # hidden size of the MLP
    vocab_size: Count = 512  # largest size of the vocabulary
    initializer_range: Positive = 0.05  # standard deviation of new weights
    tie_word_embeddings: bool = False  # the output layer uses the input embeddings


@dataclass(frozen=True)
class AlgorithmsConfig(PathSettings):
    """Settings of `quadriga algorithms`."""

    PATHS = ("user_files",)

    user_files: list[str] = field(default_factory=list)  # files that register estimators or losses


@dataclass(frozen=True)
class DemoConfig(PathSettings):
    """Settings of `quadriga demo`: data, tiny model, fine-tuning, then reinforcement learning."""

    PATHS = ("output",)

    output: str = "runs/demo"  # folder for data, model and runs
    seed: Natural = 0  # of data, model and runs
    adv_estimator: str = "grpo"  # a name of `quadriga algorithms`
    rollout: str = "hf"  # the rollout engine: a value of actor_rollout_ref.rollout.name
    # size of the adapters that reinforcement learning trains (LoRA); None: it trains all weights
    lora_rank: Count | None = None
    backend: BackendName = "ray"  # local: one process, one rank
    n_gpus_per_node: Count | None = None  # ranks, on CPU machines too; None: 2, one if local
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    overwrite: bool = True  # replace an earlier demo in the folder
