"""Every setting there is, with its default. Frozen: a run's settings do not change under it.

Batch sizes, in one place (`quadriga plan` prints the arithmetic for a run):

    data.train_batch_size                  prompts a step, over all ranks
    × actor_rollout_ref.rollout.n          = sequences a step, over all ranks
    actor_rollout_ref.actor.ppo_mini_batch_size   prompts an optimizer step, over all ranks
    ….ppo_micro_batch_size_per_gpu         sequences in one forward and backward, on one rank

A setting of None means "not given"; where something is then derived, the comment says from what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING_PATH = ""


@dataclass(frozen=True)
class DataConfig:
    """Which prompts, how many at a time, how long."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    train_batch_size: int = 64
    val_batch_size: int = 256
    max_prompt_length: int = 512
    max_response_length: int = 512
    filter_overlong_prompts: bool = True
    shuffle: bool = True
    seed: int | None = None  # None: trainer.seed


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face folder (or hub name) and how to load it."""

    path: str = MISSING_PATH
    tokenizer_path: str | None = None  # None: the model's own
    trust_remote_code: bool = False
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule. `total_steps` None: the run's number of optimizer steps."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_scheduler: str = "constant"  # constant | linear | cosine
    lr_warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    total_steps: int | None = None
    grad_clip: float = 1.0


@dataclass(frozen=True)
class EngineConfig:
    """The training engine under a role."""

    name: str = "fsdp"
    dtype: str = "auto"  # parameters and compute; auto: bfloat16 on an accelerator, float32 on CPU
    reduce_dtype: str = "float32"
    reshard_after_forward: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    fsdp_size: int = -1  # ranks that share one copy; -1: all
    use_dynamic_bsz: bool = True  # micro-batches by tokens instead of by count
    max_tokens_per_micro_batch: int = 16384
    fused_head: bool | None = None  # log-probs without all logits; None: where these are many


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy's loss and its numbers. Which losses read which is in `quadriga algorithms`."""

    name: str = "ppo_clip"
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0  # dual clip; must be above 1
    options: dict[str, Any] = field(default_factory=dict)  # passed on to the loss by name


@dataclass(frozen=True)
class ActorConfig:
    """The policy's update."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    ppo_mini_batch_size: int = 64
    ppo_micro_batch_size_per_gpu: int | None = None  # None: by tokens (use_dynamic_bsz)
    ppo_epochs: int = 1
    shuffle: bool = False
    loss_agg_mode: str = "token-mean"
    loss_scale_length: int | None = None  # seq-mean-token-sum-norm; None: max_response_length
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"  # full: over the vocabulary, the reference in the actor's worker

    @property
    def reads_full_kl(self) -> bool:
        """Whether the update computes the reference beside the policy."""
        return self.use_kl_loss and self.kl_loss_type == "full"


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that generates."""

    name: str = "hf"  # hf | vllm | sglang
    n: int = 1  # responses a prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    micro_batch_size: int = 256  # sequences generated at once on one rank
    dtype: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # passed on to the engine by name


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy."""

    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Actor, rollout and reference: one model in three uses."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass(frozen=True)
class CriticConfig:
    """The value model. `model.path` empty: the actor's model with a fresh value head."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    ppo_mini_batch_size: int | None = None  # None: the actor's
    ppo_micro_batch_size_per_gpu: int | None = None
    ppo_epochs: int | None = None  # None: the actor's
    cliprange_value: float | None = 0.5  # None: no clip
    loss_agg_mode: str = "token-mean"
    warmup_steps: int = 0  # steps in which only the critic learns


@dataclass(frozen=True)
class RewardConfig:
    """Rule rewards. `path` and `name`: a function in the user's own Python file."""

    path: str | None = None
    name: str = "compute_score"
    num_processes: int = 0  # 0: in the controller; more: a pool, with a deadline a sample
    timeout_s: float = 10.0


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: str = "fixed"  # fixed | adaptive
    kl_coef: float = 0.001
    horizon: float = 10000.0
    target_kl: float = 0.1


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups with equal rewards teach nothing."""

    enable: bool = False
    mode: str = "mask"  # mask: weight zero; refill: draw more prompts, up to the bound
    max_num_gen_batches: int = 3
    under_filled: str = "proceed"  # proceed | error, when the bound is reached


@dataclass(frozen=True)
class OverlongConfig:
    """Soft over-long penalty (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False
    buffer_length: int = 64
    penalty_factor: float = 1.0
    drop_truncated: bool = False  # leave responses that were cut off out of update and groups


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance correction between rollout and training log-probabilities."""

    level: str = "none"  # none | token | sequence | geometric
    mode: str = "truncate"  # truncate | mask
    upper: float = 2.0
    lower: float | None = None  # None: 1 / upper, in mask mode
    normalise: bool = False  # divide by the batch's mean weight


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, rewards and KL."""

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std: bool = True
    whiten_advantages: bool | None = None  # None: as the estimator's paper does
    use_kl_in_reward: bool = False
    kl_penalty: str = "k1"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    reward_clip: float | None = None
    whiten_rewards: bool = False
    reward_components: list[str] = field(default_factory=list)  # of the reward function's dict
    options: dict[str, Any] = field(default_factory=dict)  # passed on to the estimator by name
    user_files: list[str] = field(default_factory=list)  # files that add estimators or losses


@dataclass(frozen=True)
class TrainerConfig:
    """Where, how long, and what is kept."""

    backend: str = "ray"  # ray | local (one process, breakpoints work)
    device: str = "auto"  # auto | cpu | cuda | npu
    nnodes: int = 1
    n_gpus_per_node: int = 1  # ranks a node; on a CPU machine: processes
    num_cpus: int | None = None  # CPUs that Ray may use when it starts here; None: all
    threads_per_worker: int | None = None  # None: the node's CPUs over its ranks
    total_epochs: int = 1
    total_training_steps: int | None = None  # None: epochs × batches
    seed: int = 0
    val_before_train: bool = True
    test_freq: int = 10  # steps between validations; 0: only at the end
    save_freq: int = 0  # steps between checkpoints; 0: only at the end
    max_ckpt_to_keep: int | None = None
    resume_mode: str = "disable"  # disable | auto | a checkpoint folder
    samples_per_step: int = 8  # kept in the run folder each step
    project_name: str = "quadriga"
    experiment_name: str = "run"
    default_local_dir: str = "runs/run"
    overwrite: bool = False  # replace a run that the folder already holds
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    call_timeout_s: float | None = 3600.0
    balance_batch: bool = True


@dataclass(frozen=True)
class TrainConfig:
    """`quadriga train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass(frozen=True)
class SFTDataConfig:
    """Prompts with answers. `response_key` is a dotted path into the row."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    response_key: str = "extra_info.answer"
    train_batch_size: int = 64
    micro_batch_size_per_gpu: int | None = None
    max_length: int = 1024
    shuffle: bool = True


@dataclass(frozen=True)
class SFTTrainerConfig:
    """How long, and when to stop early."""

    backend: str = "ray"
    device: str = "auto"
    nnodes: int = 1
    n_gpus_per_node: int = 1
    num_cpus: int | None = None
    threads_per_worker: int | None = None
    total_epochs: int = 1
    total_training_steps: int | None = None
    seed: int = 0
    test_freq: int = 0  # steps between held-out evaluations; 0: only at the end
    stop_at_accuracy: float | None = None  # stop once held-out greedy accuracy reaches this
    val_size: int = 256  # held-out rows used for each evaluation
    max_response_length: int = 256
    default_local_dir: str = "runs/sft"
    overwrite: bool = False  # replace a run that the folder already holds
    samples_per_step: int = 8  # answers kept in the run folder at each evaluation
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    call_timeout_s: float | None = 3600.0


@dataclass(frozen=True)
class SFTConfig:
    """`quadriga sft`."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


@dataclass(frozen=True)
class GenerateConfig:
    """`quadriga generate`: answers from a model folder, for one prompt or for a file of them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prompt: str | None = None
    data_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    output: str | None = None  # a .jsonl or .parquet file; None: the terminal
    n: int = 1
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_prompt_length: int = 512
    max_response_length: int = 512
    batch_size: int = 64
    device: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class ArithmeticDataConfig:
    """`quadriga data make`: arithmetic word problems in the GSM8K form, and a model for them.

    Writes train.parquet, test.parquet and sft.parquet (demonstrations); no problem is in two.
    """

    output: str = "data/arithmetic"
    train_size: int = 4096
    val_size: int = 256  # rows of test.parquet
    sft_size: int = 512
    max_number: int = 9
    min_steps: int = 1
    max_steps: int = 2
    max_total: int | None = None  # bound of running totals
    phrasings: int = 3  # wordings of each kind of sentence
    operations: list[str] = field(default_factory=lambda: ["+", "-"])  # of + - *
    sft_careful: float = 1.0  # share of demonstrations that do not stop after the first step
    seed: int = 0
    model_output: str | None = None  # also build a tiny model and its tokenizer here
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 384
    vocab_size: int = 512
    initializer_range: float = 0.05
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class AlgorithmsConfig:
    """`quadriga algorithms`."""

    user_files: list[str] = field(default_factory=list)  # files that add estimators or losses


@dataclass(frozen=True)
class DemoConfig:
    """`quadriga demo`: data, tiny model, warm start, then reinforcement learning, on two ranks."""

    output: str = "runs/demo"
    seed: int = 0
    adv_estimator: str = "grpo"
    backend: str = "ray"  # ray | local (local: one rank)
    n_gpus_per_node: int = 2  # ranks; on a CPU machine: processes
    device: str = "auto"
    overwrite: bool = True  # replace an earlier demo in the folder
