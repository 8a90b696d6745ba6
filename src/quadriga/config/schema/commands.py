"""The commands `data make`, `algorithms` and `demo`."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import BackendName, DeviceName, Operation


@dataclass(frozen=True)
class ArithmeticDataConfig(PathSettings):
    """Settings of `quadriga data make`: arithmetic word problems in the form of GSM8K.

    The command writes train.parquet, test.parquet and sft.parquet (demonstrations), which share no
    problem, and on request a tiny model and its tokenizer.
    """

    PATHS = ("output", "model_output")

    output: str = "data/arithmetic"  # folder for the files
    train_size: int = 4096  # rows of train.parquet
    val_size: int = 256  # rows of test.parquet
    sft_size: int = 512  # rows of sft.parquet
    # rows of rm.parquet, pairs of a right and a wrong solution, beside which rm_test.parquet has
    # pairs of the problems of test.parquet; 0: neither
    rm_size: int = 0
    max_number: int = 9  # largest number in a story
    min_steps: int = 1  # calculations per problem
    max_steps: int = 2  # most calculations per problem
    max_total: int | None = None  # largest intermediate result; None: no bound
    phrasings: int = 3  # wordings per kind of sentence
    operations: list[Operation] = field(default_factory=lambda: ["+", "-"])  # those of the problems
    sft_careful: float = 1.0  # share of demonstrations that do all steps, not only the first
    seed: int = 0  # of the problems and of the model
    model_output: str | None = None  # folder for a tiny model and its tokenizer; None: no model
    hidden_size: int = 128  # of the tiny model, as the settings below
    num_layers: int = 4  # transformer layers
    num_heads: int = 4  # attention heads
    num_kv_heads: int = 2  # key and value heads
    intermediate_size: int = 384  # hidden size of the MLP
    vocab_size: int = 512  # largest size of the vocabulary
    initializer_range: float = 0.05  # standard deviation of new weights
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
    seed: int = 0  # of data, model and runs
    adv_estimator: str = "grpo"  # a name of `quadriga algorithms`
    rollout: str = "hf"  # the rollout engine: a value of actor_rollout_ref.rollout.name
    # size of the adapters that reinforcement learning trains (LoRA); None: it trains all weights
    lora_rank: int | None = None
    backend: BackendName = "ray"  # local: one process, one rank
    n_gpus_per_node: int | None = None  # ranks, on CPU machines too; None: 2, one if local
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    overwrite: bool = True  # replace an earlier demo in the folder
