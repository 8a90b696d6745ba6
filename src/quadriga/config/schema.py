"""All settings and their defaults, as frozen dataclasses: the settings of a run never change.

Batch sizes (`quadriga plan` prints these numbers for a run):

    data.train_batch_size                         prompts per step, over all ranks
    × actor_rollout_ref.rollout.n                 = sequences per step, over all ranks
    actor_rollout_ref.actor.ppo_mini_batch_size   prompts per optimizer step, over all ranks
    ….ppo_micro_batch_size_per_gpu                sequences per forward and backward pass, per rank

A value of None means "not given"; the comment of the setting says which value is used then. The
comment is on the line of the setting or above it, and `--help` prints it. A setting with a closed
list of choices has a `Literal` type, and that type is the only place where the choices are listed:
loading, checks and help read it. Names that users can register (estimators, losses, rewards,
trackers, engines) are `str`; `config.checks` compares them with the registries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BackendName = Literal["ray", "local"]
DeviceName = Literal["auto", "cpu", "cuda", "npu"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
ReduceDtypeName = Literal["float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "sdpa", "varlen", "flex"]
LrSchedulerName = Literal["constant", "linear", "cosine"]
AggregationName = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
# `SampledKLName` reads only the log-probabilities of the sampled tokens, all that the reward has.
SampledKLName = Literal["k1", "abs", "k2", "k3", "low_var_kl", "k1+", "abs+", "k3+", "low_var_kl+"]
KLName = Literal[SampledKLName, "full"]
KLControlType = Literal["fixed", "adaptive"]
FilterMode = Literal["mask", "refill"]
UnderFilled = Literal["proceed", "error"]
CorrectionLevel = Literal["none", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
FailurePolicy = Literal["zero", "mask", "fail"]
Operation = Literal["+", "-", "*"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
Checkpointing = bool | Literal["selective"]

# Keyword arguments for a function of the user's own: the names and types are up to that function.
Options = dict[str, Any]

MISSING_PATH = ""


@dataclass(frozen=True)
class DataConfig:
    """The prompts: files, batch sizes, lengths in tokens."""

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
    train_batch_size: int = 64  # prompts per step, over all ranks
    val_batch_size: int = 256  # prompts generated at once in validation
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    filter_overlong_prompts: bool = True  # false: a prompt that is too long is an error
    shuffle: bool = True  # shuffle the prompts in each epoch
    seed: int | None = None  # seed of the row order; None: trainer.seed


@dataclass(frozen=True)
class ModelConfig:
    """A Hugging Face folder or hub name, and how to load it."""

    path: str = MISSING_PATH  # a model folder, or hf://owner/name
    tokenizer_path: str | None = None  # None: the folder of the model
    trust_remote_code: bool = False  # run code of the model's folder
    attn_implementation: str = "sdpa"  # a name of transformers, such as sdpa or eager
    # recompute activations in the backward pass; selective: all but matrix products and attention
    gradient_checkpointing: Checkpointing = False
    use_shm: bool = False  # the ranks of a node read the weights once and share that memory


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the schedule of its learning rate."""

    # adamw_8bit: moments of 8 bits (torchao); muon: for hidden matrices, AdamW for the others
    name: OptimizerName = "adamw"
    lr: float = 1e-6  # largest learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # decay rates of the two moments of AdamW
    momentum: float | None = None  # decay rate of the momentum of muon; None: 0.95
    eps: float = 1e-8  # added to the denominator of the step
    weight_decay: float = 0.01  # decoupled from the gradient
    lr_scheduler: LrSchedulerName = "constant"  # form after the warm-up
    lr_warmup_steps: int = 0  # optimizer steps of linear warm-up
    min_lr_ratio: float = 0.0  # learning rate of the last step, relative to lr
    total_steps: int | None = None  # None: the number of optimizer steps of the run
    grad_clip: float = 1.0  # largest norm of the gradient
    # optimizer steps in a row that may be skipped because the gradient is not finite; None: any
    max_skipped_steps: int | None = 10


@dataclass(frozen=True)
class EngineConfig:
    """The training engine of a role."""

    name: str = "fsdp"  # fsdp; megatron is not in this release
    dtype: DtypeName = "auto"  # compute dtype; auto: bfloat16 on accelerators, else float32
    reduce_dtype: ReduceDtypeName = "float32"  # dtype of the gradient reduction over ranks
    reshard_after_forward: bool = True  # free gathered parameters until the backward pass
    # reduce gradients and free gathered parameters after each micro-batch, not once per optimizer
    # step; None: if whole gradients and parameters would take more than 4 GiB on each rank
    reduce_each_micro_batch: bool | None = None
    param_offload: bool = False  # keep parameters in host memory between calls
    optimizer_offload: bool = False  # keep optimizer state in host memory between optimizer steps
    offload_policy: bool = False  # parameters, gradients, optimizer state and its step on the host
    fsdp_size: int = -1  # ranks over which one copy of the parameters is sharded; -1: all
    use_dynamic_bsz: bool = True  # cut micro-batches by tokens, not by number of sequences
    max_tokens_per_micro_batch: int = 16384  # tokens, if use_dynamic_bsz
    fused_head: bool | None = None  # log-probs without full logits; None: if they would be large
    attention: AttentionName = "auto"  # kernel of packed rows; auto: the fastest that is exact

    def forward_rows(self, size: int | None) -> int | None:
        """Return the sequences of a micro-batch without gradients; None: split by tokens.

        `size`: the `ppo_micro_batch_size_per_gpu` of the role. With gradients it is always used;
        without them more tokens fit, so it is used only if micro-batches are not split by tokens.
        """
        return None if self.use_dynamic_bsz else size


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy loss. `quadriga algorithms` shows which loss reads which setting."""

    name: str = "ppo_clip"  # a name of `quadriga algorithms`
    clip_ratio_low: float = 0.2  # the ratio is clipped below 1 - this
    clip_ratio_high: float = 0.2  # the ratio is clipped above 1 + this
    clip_ratio_c: float = 3.0  # dual clip, above 1
    options: Options = field(default_factory=dict)  # keyword arguments of the loss


@dataclass(frozen=True)
class ActorConfig:
    """The update of the policy."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    # prompts per optimizer step, over all ranks; None: data.train_batch_size, one optimizer step
    ppo_mini_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences; None: see engine.use_dynamic_bsz
    ppo_epochs: int = 1  # passes over the sequences of a step
    # take the old log-probabilities from the update itself, without a pass of their own; needs one
    # optimizer step per step; None: if that is so and nothing reads them before the update
    old_log_probs_from_update: bool | None = None
    # shuffle the sequences of each rank in each epoch of a step; whole prompt groups stay together
    shuffle: bool = False
    loss_agg_mode: AggregationName = "token-mean"  # how token losses become one loss
    loss_scale_length: int | None = None  # of seq-mean-token-sum-norm; None: max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    use_kl_loss: bool = False  # add KL to the reference to the loss
    kl_loss_coef: float = 0.001  # weight of this KL
    kl_loss_type: KLName = "k3"  # estimator; full: over the vocabulary, reference in actor worker

    @property
    def reads_full_kl(self) -> bool:
        """Whether the update computes the logits of the reference together with the policy's."""
        return self.use_kl_loss and self.kl_loss_type == "full"


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled."""

    temperature: float = 1.0  # 0: greedy decoding
    top_p: float = 1.0  # nucleus sampling; 1: all tokens
    top_k: int = -1  # -1: all tokens


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout engine, which generates the responses."""

    name: str = "hf"  # hf; vllm and sglang are not in this release
    n: int = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    micro_batch_size: int = 256  # sequences that one rank generates at once
    dtype: DtypeName = "auto"  # of weights and computation; auto: as engine.dtype
    # MiB of weights sent at once to a rollout in other processes than the actor (`placement`)
    weight_bucket_mb: int = 256
    # rollout and training engines of the policy take turns in device memory: while one side works,
    # the weights and the optimizer state of the other are in host memory
    take_turns: bool = False
    options: Options = field(default_factory=dict)  # keyword arguments of the engine


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy."""

    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    """Actor, rollout and reference: three uses of one model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ref: RefConfig = field(default_factory=RefConfig)


@dataclass(frozen=True)
class CriticConfig:
    """The value model. Without `model.path`: the model of the actor, its settings, a new head."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    engine: EngineConfig = field(default_factory=EngineConfig)
    ppo_mini_batch_size: int | None = None  # None: that of the actor
    ppo_micro_batch_size_per_gpu: int | None = None  # sequences; None: see engine.use_dynamic_bsz
    ppo_epochs: int | None = None  # None: that of the actor
    cliprange_value: float | None = 0.5  # None: no clipping
    loss_agg_mode: AggregationName = "token-mean"  # how token losses become one loss
    warmup_steps: int = 0  # first steps, in which only the critic is updated


@dataclass(frozen=True)
class RewardConfig:
    """Rule rewards. `path` and `name` select a function in a Python file of the user."""

    path: str | None = None  # None: the function registered for the data_source of each row
    name: str = "compute_score"  # function in the file `path`
    num_processes: int = 2  # processes that call it; 0: called in the controller, without deadline
    timeout_s: float = 10.0  # deadline of one sample in a process
    memory_gb: float | None = 8.0  # GiB that one process can allocate; None: no limit
    on_failure: FailurePolicy = "zero"  # a failed sample: score 0, mask its row, or end the run


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: KLControlType = "fixed"  # adaptive: kl_coef follows target_kl
    kl_coef: float = 0.001  # coefficient, or its first value
    horizon: float = 10000.0  # adaptive: sequences over which kl_coef adapts
    target_kl: float = 0.1  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476).

    A prompt group whose rewards are all equal has zero advantage and gives no gradient.
    """

    enable: bool = False  # mask or refill zero-variance prompt groups
    mode: FilterMode = "mask"  # mask: zero-variance groups get weight 0; refill: generate others
    max_num_gen_batches: int = 3  # refill: limit of the batches generated for one step
    under_filled: UnderFilled = "proceed"  # refill: what to do if groups are missing at this limit


@dataclass(frozen=True)
class OverlongConfig:
    """Soft over-long penalty (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False  # penalise responses near max_response_length
    buffer_length: int = 64  # tokens before max_response_length in which the penalty grows
    penalty_factor: float = 1.0  # size of the full penalty
    drop_truncated: bool = False  # exclude truncated responses from the update and the groups


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance correction for the difference of rollout and training log-probabilities."""

    level: CorrectionLevel = "none"  # what one weight covers; none: no correction
    mode: CorrectionMode = "truncate"  # outside [lower, upper]: clamp the weight, or set it to 0
    upper: float = 2.0  # largest weight
    lower: float | None = None  # smallest weight; None: 1 / upper in mode mask, else 0
    normalise: bool = False  # divide weights by their mean over the batch


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, rewards and KL."""

    adv_estimator: str = "gae"  # a name of `quadriga algorithms`
    gamma: float = 1.0  # discount factor
    lam: float = 1.0  # λ of GAE
    norm_adv_by_std: bool = True  # divide group advantages by the standard deviation
    whiten_advantages: bool | None = None  # None: as in the paper of the estimator
    use_kl_in_reward: bool = False  # subtract a KL penalty from the rewards
    kl_penalty: SampledKLName = "k1"  # its estimator; "full" is only in kl_loss_type
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    reward_clip: float | None = None  # clamp rewards to ± this; None: no clamping
    whiten_rewards: bool = False  # scale rewards to unit variance
    reward_components: list[str] = field(default_factory=list)  # keys that reward functions return
    options: Options = field(default_factory=dict)  # keyword arguments of the estimator
    # files that register estimators, losses or roles with sections of their own
    user_files: list[str] = field(default_factory=list)


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


@dataclass(frozen=True)
class TrainConfig:
    """Settings of `quadriga train`."""

    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True)
class SFTDataConfig:
    """Prompts with reference answers. `response_key` is a dotted path into the row."""

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
    response_key: str = "extra_info.answer"  # column of the answers, a dotted path
    train_batch_size: int = 64  # rows per optimizer step, over all ranks
    micro_batch_size_per_gpu: int | None = None  # sequences; None: see engine.use_dynamic_bsz
    max_length: int = 1024  # tokens of prompt and answer; longer rows are left out
    shuffle: bool = True  # shuffle the rows in each epoch


@dataclass(frozen=True)
class SFTTrainerConfig:
    """Machines, number of steps, validation and the run folder."""

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
    stop_at_accuracy: float | None = None  # stop when greedy validation accuracy reaches this value
    val_size: int = 256  # validation rows used each time
    max_response_length: int = 256  # tokens, in validation
    project_name: str = "quadriga"  # of the learning curve and of trackers
    experiment_name: str = "sft"  # name of the run there
    default_local_dir: str = "runs/sft"  # run folder
    overwrite: bool = False  # replace a run that is already in the folder
    samples_per_step: int = 8  # responses written to the run folder at each validation
    # console, jsonl, tensorboard, wandb, or a tracker of your own
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    call_timeout_s: float | None = 3600.0  # deadline of one call to a worker group; None: none
    check_memory: bool = True  # refuse a run that does not fit by the plan of its memory
    device_memory_gb: float | None = None  # as in the settings of `quadriga train`


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
class GenerateConfig:
    """Settings of `quadriga generate`: responses of a model to one prompt or files of prompts."""

    model: ModelConfig = field(default_factory=ModelConfig)
    prompt: str | None = None  # one prompt; None: those of data_files
    data_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    prompt_key: str = "prompt"  # column of the prompts
    output: str | None = None  # a .jsonl or .parquet file; None: standard output
    n: int = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    batch_size: int = 64  # prompts
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    seed: int = 0  # of sampling


@dataclass(frozen=True)
class ArithmeticDataConfig:
    """Settings of `quadriga data make`: arithmetic word problems in the form of GSM8K.

    The command writes train.parquet, test.parquet and sft.parquet (demonstrations), which share no
    problem, and on request a tiny model and its tokenizer.
    """

    output: str = "data/arithmetic"  # folder for the files
    train_size: int = 4096  # rows of train.parquet
    val_size: int = 256  # rows of test.parquet
    sft_size: int = 512  # rows of sft.parquet
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
class AlgorithmsConfig:
    """Settings of `quadriga algorithms`."""

    user_files: list[str] = field(default_factory=list)  # files that register estimators or losses


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `quadriga demo`: data, tiny model, fine-tuning, then reinforcement learning."""

    output: str = "runs/demo"  # folder for data, model and runs
    seed: int = 0  # of data, model and runs
    adv_estimator: str = "grpo"  # a name of `quadriga algorithms`
    backend: BackendName = "ray"  # local: one process, one rank
    n_gpus_per_node: int | None = None  # ranks, on CPU machines too; None: 2, one if local
    device: DeviceName = "auto"  # auto: an accelerator if there is one
    overwrite: bool = True  # replace an earlier demo in the folder
