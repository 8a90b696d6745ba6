"""The settings of `quadriga train` and their defaults, as frozen dataclasses.

`TrainConfig` is at the end. `config.commands` has the other commands, which share the sections of
models, engines, sampling, rewards and runs with this one.

Batch sizes (`quadriga plan` prints these numbers for a run):

    data.train_batch_size                         prompts per step, over all ranks
    × actor_rollout_ref.rollout.n                 = sequences per step, over all ranks
    actor_rollout_ref.actor.ppo_mini_batch_size   prompts per optimizer step, over all ranks
    ….ppo_micro_batch_size_per_gpu                most sequences per pass with gradients, per rank
    ….engine.max_tokens_per_micro_batch           most tokens per pass, per rank

A value of None means "not given"; the comment of the setting says which value is used then. The
comment is on the line of the setting or above it, and `--help` prints it. The type of a setting has
its range or its choices, which `config.convert` checks and `--help` prints:

    lr: NonNegative = 1e-6                      # at least 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0

The dataclass of a role that a user registers can use the same types. Names that users can register
(estimators, losses, rewards, trackers, engines) are `str`; they are compared with the registries
before a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from quadriga.config.paths import PathSettings


@dataclass(frozen=True)
class Infinite:
    """Marks a limit that may be infinite, which is none. Other numbers must be finite."""


Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
NonNegativeLimit = Annotated[float, Ge(0), Infinite()]
PositiveLimit = Annotated[float, Gt(0), Infinite()]

BackendName = Literal["ray", "local"]
GenerationBackendName = Literal["auto", "ray", "local"]
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
ProfileTool = Literal["torch", "nsys", "memory", "calls"]
CorrectionMode = Literal["truncate", "mask"]
SpecialTokens = Literal["keep", "neutralise", "refuse"]
FailurePolicy = Literal["zero", "mask", "fail"]
EpisodeHistory = Literal["sampled", "template"]
AlarmAction = Literal["warn", "fail"]
UpdateMode = Literal["pause", "drain", "in_flight"]
LossTurns = Literal["all", "last"]
WeightTransport = Literal["auto", "shared_memory", "collective"]
Checkpointing = bool | Literal["selective"]

Options = dict[str, Any]
"""Keyword arguments for a function of the user's own, which decides on their names and types."""

MISSING_PATH = ""


@dataclass(frozen=True)
class LoraConfig(PathSettings):
    """Adapters (LoRA, arXiv 2106.09685), which are trained in place of the weights.

    Without `rank` and `path` there are none.
    """

    PATHS = REMOTE = ("path",)
    ON_HUB = True

    rank: Count | None = None  # size of the adapters; None: none, or that of `path`
    alpha: Positive | None = None  # scaling × rank; None: 2 × rank, or that of `path`
    dropout: Decay = 0.0  # share of their inputs that adapters drop in an update
    # linear layers by the end of their names, as q_proj, * for any characters; None: all but the
    # output layer, or those of `path`
    target_modules: tuple[str, ...] | None = None
    exclude_modules: tuple[str, ...] = ()  # layers without adapters, in the same way
    path: str | None = None  # an adapter in PEFT's format, to start from; None: new adapters

    @property
    def enabled(self) -> bool:
        """Whether the model has adapters."""
        return self.rank is not None or self.path is not None


@dataclass(frozen=True)
class ModelConfig(PathSettings):
    """A Hugging Face folder or hub name, and how to load it."""

    PATHS = REMOTE = ("path", "tokenizer_path")
    ON_HUB = True

    path: str = MISSING_PATH  # a model folder, also a remote one, or hf://owner/name
    tokenizer_path: str | None = None  # None: the folder of the model
    trust_remote_code: bool = False  # run code of the model's folder
    # attention of padded rows and of the rollout engine hf, a name of transformers such as sdpa or
    # eager; that of packed rows is engine.attention
    attn_implementation: str = "sdpa"
    # recompute activations in the backward pass; selective: all but matrix products and attention
    gradient_checkpointing: Checkpointing = False
    use_shm: bool = False  # the ranks of a node read the weights once and share that memory
    freeze: tuple[str, ...] = ()  # weights that are not trained, by patterns: model.embed_tokens.*
    lora: LoraConfig = field(default_factory=LoraConfig)

    def frozen(self) -> ModelConfig:
        """Return the settings of the same model without what is trained of it."""
        return replace(self, lora=LoraConfig(), freeze=())


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the schedule of its learning rate."""

    lr: NonNegative = 1e-6  # largest learning rate
    betas: tuple[Decay, Decay] = (0.9, 0.999)  # decay rates of the two moments of AdamW
    eps: Positive = 1e-8  # added to the denominator of the step
    weight_decay: NonNegative = 0.01  # decoupled from the gradient
    lr_scheduler: LrSchedulerName = "constant"  # form after the warm-up
    lr_warmup_steps: Natural = 0  # optimizer steps of linear warm-up
    lr_warmup_ratio: Share = 0.0  # the same as a part of all optimizer steps, if that is 0
    min_lr_ratio: Share = 0.0  # learning rate of the last step, relative to lr
    total_steps: Count | None = None  # None: the number of optimizer steps of the run
    grad_clip: PositiveLimit = 1.0  # largest norm of the gradient
    # optimizer steps in a row that may be skipped because the gradient is not finite; None: any
    max_skipped_steps: Natural | None = 10


@dataclass(frozen=True)
class EngineConfig:
    """The training engine of a role."""

    name: str = "fsdp"  # fsdp or megatron
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
    # ranks that split each layer's weights, and compute the same rows; 1: none
    tensor_parallel_size: Count = 1
    # fsdp: ranks that split the tokens of the same rows, and in attention its heads (Ulysses)
    sequence_parallel_size: Count = 1
    # ranks that split the tokens of the same rows also in attention, for which they gather keys and
    # values; for long rows, and for sizes that do not divide the heads; 1: none
    context_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1  # megatron: stages, each with a part of the layers; 1: none
    # megatron: parts of a stage's layers, computed in turns (interleaved schedule); 1: 1F1B
    virtual_pipeline_parallel_size: Count = 1
    # megatron: context- and data-parallel ranks over which the experts of a layer are divided; 1:
    # none
    expert_parallel_size: Count = 1
    # megatron: ranks that split each expert: tensor_parallel_size or 1; null: tensor_parallel_size
    expert_tensor_parallel_size: Count | None = None
    sequence_parallel: bool = False  # megatron: tensor-parallel ranks split tokens between layers
    # megatron: divide optimizer state and its step over the context- and data-parallel ranks
    distributed_optimizer: bool = True
    # limit the tokens of a micro-batch, and not only its sequences
    use_dynamic_bsz: bool = True
    # tokens on one rank, if use_dynamic_bsz; ranks that split tokens compute a multiple together
    max_tokens_per_micro_batch: Count = 16384
    fused_head: bool | None = None  # log-probs without full logits; None: if they would be large
    attention: AttentionName = "auto"  # kernel of packed rows; auto: the fastest that is exact

    @property
    def model_parallel_size(self) -> int:
        """Ranks that compute the same rows together."""
        return math.prod(self._parts().values())

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch, over the ranks that split its tokens."""
        of_tokens = self.context_parallel_size  # tensor-parallel ranks of Megatron-core have all
        ranks = of_tokens if self.name == "megatron" else self.model_parallel_size
        return self.max_tokens_per_micro_batch * ranks

    def model_parallel_text(self) -> str:
        """Return the arithmetic: "tensor_parallel_size × sequence_parallel_size = 2 × 2 = 4"."""
        used = {name: size for name, size in self._parts().items() if size > 1}
        used = used or {"tensor_parallel_size": 1}
        names, sizes = " × ".join(used), " × ".join(map(str, used.values()))
        return f"{names} = {sizes}" + (f" = {self.model_parallel_size}" if len(used) > 1 else "")

    def _parts(self) -> dict[str, int]:
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "sequence_parallel_size": self.sequence_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }

    def forward_rows(self, size: int | None) -> int | None:
        """Return the most sequences of a micro-batch without gradients; None: any number.

        `size`: the `ppo_micro_batch_size_per_gpu` of the role. It always limits the micro-batches
        with gradients. Without them more sequences fit, so it is used only without a limit of
        tokens.
        """
        return None if self.use_dynamic_bsz else size


@dataclass(frozen=True)
class PolicyLossConfig:
    """The policy loss. `quadriga algorithms` shows which loss reads which setting."""

    name: str = "ppo_clip"  # a name of `quadriga algorithms`
    clip_ratio_low: NonNegativeLimit = 0.2  # the ratio is clipped below 1 - this
    clip_ratio_high: NonNegativeLimit = 0.2  # the ratio is clipped above 1 + this
    clip_ratio_c: Annotated[float, Gt(1), Infinite()] = 3.0  # dual clip, above 1
    options: Options = field(default_factory=dict)  # keyword arguments of the loss


@dataclass(frozen=True)
class ActorConfig:
    """The update of the policy."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    # prompts per optimizer step, over all ranks; None: data.train_batch_size, one optimizer step
    ppo_mini_batch_size: Count | None = None
    ppo_micro_batch_size_per_gpu: Count | None = None  # most sequences; see engine.use_dynamic_bsz
    ppo_epochs: Count = 1  # passes over the sequences of a step
    # take the old log-probabilities from the update itself, without a pass of their own; needs one
    # optimizer step per step, and adapters without dropout; None: if that is so and nothing reads
    # them before the update
    old_log_probs_from_update: bool | None = None
    # shuffle the sequences of each rank in each epoch of a step; whole prompt groups stay together
    shuffle: bool = False
    # compute no rows whose advantages are all 0; needs a loss without terms beside the policy's;
    # None: if that is so. The loss is the same; the metrics are those of the other rows
    skip_zero_advantages: bool | None = None
    loss_agg_mode: AggregationName = "token-mean"  # how token losses become one loss
    loss_scale_length: Count | None = None  # of seq-mean-token-sum-norm; None: max_response_length
    entropy_coeff: float = 0.0  # weight of the entropy bonus
    use_kl_loss: bool = False  # add KL to the reference to the loss
    kl_loss_coef: NonNegative = 0.001  # weight of this KL
    kl_loss_type: KLName = "k3"  # estimator; full: over the vocabulary, reference in actor worker

    @property
    def reads_full_kl(self) -> bool:
        """Whether the update computes the logits of the reference together with the policy's."""
        return self.use_kl_loss and self.kl_loss_type == "full"


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled, and what ends a response beside the end tokens of the model."""

    temperature: NonNegative = 1.0  # 0: greedy decoding
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # nucleus sampling; 1: all tokens
    top_k: int = -1  # -1: all tokens
    min_p: Share = 0.0  # leave out tokens below this share of the likeliest one's; 0: none
    # tokens of a response before it can end; at most max_response_length
    min_new_tokens: Natural = 0
    stop: tuple[str, ...] = ()  # texts that end a response, which includes them: ["</answer>"]
    stop_token_ids: tuple[Natural, ...] = ()  # tokens that end a response, also with ignore_eos
    ignore_eos: bool = False  # the end tokens of the model do not end a response


@dataclass(frozen=True)
class ReplicasConfig:
    """A rollout of replicas, each of which is asked for rows by itself. In training they need ranks
    of their own."""

    enable: bool = False  # false: all ranks of the rollout are one group and get equal parts
    request_rows: Count | None = None  # sequences of one request; None: a quarter of an equal part
    requests_in_flight: Count = 2  # requests that a replica has at once
    # lost replicas that are started again in a run: at the next weight sync, or for the next batch
    # of `quadriga generate` and `quadriga eval`
    restarts: Natural = 0
    # replicas join where the cluster has free resources; lost ones come back beside `restarts`
    elastic: bool = False
    min_count: Count = 1  # elastic: fewer working replicas end the run
    max_count: Count | None = None  # elastic: most replicas; None: twice as many as at the start


@dataclass(frozen=True)
class RolloutEngineConfig:
    """The rollout engine by itself, as `quadriga generate` and `quadriga eval` use it too."""

    name: str = "hf"  # hf, vllm or sglang
    micro_batch_size: Count = 256  # sequences that one rank generates at once
    dtype: DtypeName = "auto"  # of weights and computation; auto: as engine.dtype
    options: Options = field(default_factory=dict)  # keyword arguments of the engine
    # seconds that one call of the engine may take on a rank, such as the generation of its part of
    # a batch; None: no limit but that of the call to the worker group (call_timeout_s)
    deadline_s: Positive | None = None
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    # with trainer.max_staleness or agent.path: tokens of a response that are sampled in one call.
    # Between two calls other responses may join, and weights are updated
    slice_tokens: Count = 128

    def rows_at_once(self, rows: int, ranks: int) -> int:
        """Return how many rows of a batch a rank generates at once, at most."""
        of_rank = -(-rows // ranks)
        if self.replicas.enable and self.replicas.request_rows is not None:
            of_rank = min(rows, self.replicas.request_rows)
        return min(of_rank, self.micro_batch_size)


@dataclass(frozen=True)
class MismatchConfig:
    """The watch over the difference between rollout and training log-probabilities."""

    # nats; a token whose log-probabilities differ by more is beyond the bound
    bound: PositiveLimit = 0.5
    max_share: Share = 0.05  # share of the response tokens of a step that may be beyond the bound
    on_alarm: AlarmAction = "warn"  # more tokens than that: log a warning, or end the run


@dataclass(frozen=True)
class RolloutConfig(RolloutEngineConfig):
    """The rollout engine, which generates the responses, and how training uses it."""

    n: Count = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_n: Count = 1  # responses per prompt in validation
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    # MiB of memory on each rank for weights in flight from the actor to the rollout
    weight_bucket_mb: Count = 256
    # how weights go to a rollout in other processes (`placement`). shared_memory: through the store
    # of the backend. collective: of a process group that joins both. auto: shared_memory
    weight_transport: WeightTransport = "auto"
    # rollout and training engines of the policy take turns in device memory: while one side works,
    # the weights and the optimizer state of the other are in host memory
    take_turns: bool = False
    # engine hf in the processes of the actor: use the actor's tensors as weights without a copy, if
    # they are whole there and have the dtype of the rollout. Each update then needs a weight sync
    share_weights: bool = True
    # with model.lora: the engine computes with the adapters, which alone are sent after the first
    # weight sync; false: they are merged into the weights; None: if the engine can
    load_adapters: bool | None = None
    # mixture of experts: keep which experts compute each token in the rollout, and let the actor
    # compute its log-probabilities and its update with the same ones (R3, arXiv 2510.11370)
    replay_routes: bool = False
    # with trainer.max_staleness: prompts that are generated, scored or ready at once, as a multiple
    # of data.train_batch_size; None: max_staleness + 1. A smaller factor has younger responses
    oversample: Annotated[float, Ge(1)] | None = None
    # with trainer.max_staleness: what a weight update waits for. pause: the calls in flight, and
    # later tokens of a response come from the new weights; drain: the ends of the responses that
    # have begun, so all tokens of a response come from the same weights; in_flight, on ranks
    # of its own: nothing, new weights are copied to other memory while the rank generates
    update: UpdateMode = "pause"
    # with trainer.max_staleness, on ranks of its own: a weight update frees the keys and values of
    # responses that go on, which the new weights compute again; false: responses go on with those
    # of earlier weights (PipelineRL, arXiv 2509.19128)
    reset_caches: bool = True
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)


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
    ppo_mini_batch_size: Count | None = None  # None: that of the actor
    ppo_micro_batch_size_per_gpu: Count | None = None  # most sequences; see engine.use_dynamic_bsz
    ppo_epochs: Count | None = None  # None: that of the actor
    cliprange_value: PositiveLimit | None = 0.5  # None: no clipping
    loss_agg_mode: AggregationName = "token-mean"  # how token losses become one loss
    warmup_steps: Natural = 0  # first steps, in which only the critic is updated


@dataclass(frozen=True)
class RewardConfig(PathSettings):
    """Rule rewards. `path` and `name` select a function in a Python file of the user."""

    PATHS = ("path", "parts")

    path: str | None = None  # None: the function registered for the data_source of each row
    name: str = "compute_score"  # function in the file `path`
    # several rewards: name → {weight, path, name}; without a path the function of the data_source
    parts: Options = field(default_factory=dict)
    # processes that call it; 0: called in the controller, without deadline
    num_processes: Natural = 2
    timeout_s: Positive = 10.0  # deadline of one sample in a process
    # GiB that one process can allocate; None: no limit
    memory_gb: Annotated[float, Ge(0.25)] | None = 8.0
    spread: bool = False  # these processes are on all nodes of the Ray cluster in turn
    on_failure: FailurePolicy = "zero"  # a failed sample: score 0, mask its row, or end the run


@dataclass(frozen=True)
class AgentConfig(PathSettings):
    """Episodes of several turns: an environment answers each turn of the policy.

    `path` and `name` select a class in a Python file of the user (`agents.environments`), or a
    coroutine function (`agents.program`). Its rewards score the episodes, in place of `reward`.
    """

    PATHS = ("path",)

    path: str | None = None  # None: a response is one turn
    name: str = "Environment"  # class or coroutine function in the file `path`
    options: Options = field(default_factory=dict)  # arguments of it
    reset_tokens: Natural = 0  # the most tokens that `reset` adds to a prompt
    # sampled: earlier turns stay as the policy has sampled them. template: where the chat template
    # would write them in another way, the row begins a context with the text of the template
    history: EpisodeHistory = "sampled"
    max_turns: Count = 8  # after so many turns of the policy an episode ends
    # a turn with so many tokens has ended, rounded up to rollout.slice_tokens; None: only
    # data.max_response_length bounds it, which holds all turns and observations
    max_turn_tokens: Count | None = None
    max_seconds: Positive | None = None  # an episode that has lasted so long ends with its turn
    concurrency: Count = 256  # episodes at once
    processes: Count = 2  # that host the environments
    spread: bool = False  # these processes are on all nodes of the Ray cluster in turn
    step_timeout_s: Positive = 60.0  # deadline of one call of an environment
    # GiB that one of these processes can allocate; None: no limit
    process_memory_gb: Annotated[float, Ge(0.25)] | None = 8.0
    # an episode whose environment fails: score 0, mask its row, or end the run
    on_error: FailurePolicy = "zero"


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model, whose score is added to that of the rules in training.

    Validation is scored by the rules alone.
    """

    enable: bool = False  # score the responses of a step with `model`
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    micro_batch_size_per_gpu: Count | None = None  # most sequences; see engine.use_dynamic_bsz
    # arguments of its chat template; those of the policy's are data.chat_template_kwargs
    chat_template_kwargs: Options = field(default_factory=dict)
    weight: float = 1.0  # of its score in the reward
    rule_weight: float = 1.0  # of the score of the rules; 0: they are not called in training


@dataclass(frozen=True)
class KLControlConfig:
    """The coefficient of the KL penalty in the reward."""

    type: KLControlType = "fixed"  # adaptive: kl_coef follows target_kl
    kl_coef: NonNegative = 0.001  # coefficient, or its first value
    horizon: Positive = 10000.0  # adaptive: sequences over which kl_coef adapts
    target_kl: Positive = 0.1  # adaptive: nats per token


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv 2503.14476).

    A prompt group whose rewards are all equal has zero advantage and gives no gradient.
    """

    enable: bool = False  # mask or refill zero-variance prompt groups
    mode: FilterMode = "mask"  # mask: zero-variance groups get weight 0; refill: generate others
    max_num_gen_batches: Count = 3  # refill: limit of the batches generated for one step
    under_filled: UnderFilled = "proceed"  # refill: what to do if groups are missing at this limit

    @property
    def refills(self) -> bool:
        """Whether more prompts are drawn in place of zero-variance prompt groups."""
        return self.enable and self.mode == "refill"


@dataclass(frozen=True)
class OverlongConfig:
    """Soft over-long penalty (DAPO, arXiv 2503.14476, eq. 13)."""

    enable: bool = False  # penalise responses near max_response_length
    buffer_length: Count = 64  # tokens before max_response_length in which the penalty grows
    penalty_factor: NonNegative = 1.0  # size of the full penalty
    drop_truncated: bool = False  # exclude truncated responses from the update and the groups


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance correction for the difference of rollout and training log-probabilities."""

    # what one weight covers; none: no correction; None: token with trainer.max_staleness, but none
    # without it and for losses that have the weight themselves (decoupled_ppo)
    level: CorrectionLevel | None = None
    mode: CorrectionMode = "truncate"  # outside [lower, upper]: clamp the weight, or set it to 0
    upper: PositiveLimit = 2.0  # largest weight
    lower: Positive | None = None  # smallest weight; None: 1 / upper in mode mask, else 0
    normalise: bool = False  # divide weights by their mean over the batch


@dataclass(frozen=True)
class AlgorithmConfig(PathSettings):
    """Advantages, rewards and KL."""

    PATHS = ("user_files",)

    adv_estimator: str = "gae"  # a name of `quadriga algorithms`
    gamma: Share = 1.0  # discount factor
    lam: Share = 1.0  # λ of GAE
    norm_adv_by_std: bool = True  # divide group advantages by the standard deviation
    whiten_advantages: bool | None = None  # None: as in the paper of the estimator
    use_kl_in_reward: bool = False  # subtract a KL penalty from the rewards
    kl_penalty: SampledKLName = "k1"  # its estimator; "full" is only in kl_loss_type
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    reward_clip: PositiveLimit | None = None  # clamp rewards to ± this; None: no clamping
    whiten_rewards: bool = False  # scale rewards to unit variance
    reward_components: list[str] = field(default_factory=list)  # keys that reward functions return
    options: Options = field(default_factory=dict)  # keyword arguments of the estimator
    # files that register estimators, losses or roles with sections of their own
    user_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MachineConfig(PathSettings):
    """The ranks, their devices and their memory."""

    device: DeviceName = "auto"  # auto: an accelerator if there is one
    nnodes: Count = 1  # nodes
    n_gpus_per_node: Count = 1  # ranks per node, on CPU machines too
    num_cpus: Count | None = None  # CPUs that a new Ray cluster may use; None: all
    threads_per_worker: Count | None = None  # None: CPUs of the node / ranks per node
    call_timeout_s: Positive | None = 3600.0  # deadline of one call to a worker group; None: none
    check_memory: bool = True  # refuse a run that does not fit by the plan of its memory
    # GiB that a rank's device has, or on CPUs all ranks of a node; None: as this machine has
    device_memory_gb: Positive | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nnodes * self.n_gpus_per_node


@dataclass(frozen=True)
class ProfileConfig:
    """Traces of some steps, in the folder `profile` of the run folder."""

    # steps that are profiled; empty: none, and with tool=calls all
    steps: list[Count] = field(default_factory=list)
    # torch: PyTorch's profiler, also without a GPU; memory: the same with all allocations; nsys:
    # Nsight Systems, under which the ranks are started; calls: no trace, only when each method of
    # each rank began and ended
    tool: ProfileTool = "torch"


@dataclass(frozen=True)
class RunConfig(MachineConfig):
    """Machines, number of steps, validation, checkpoints and the run folder."""

    PATHS: ClassVar[tuple[str, ...]] = (
        "default_local_dir", "resume_mode", "stop_file", "remote_dir", "callbacks",
    )  # fmt: skip
    REMOTE = ("remote_dir",)
    INSTEAD: ClassVar[Mapping[str, str]] = {
        "default_local_dir": "set trainer.remote_dir={}, where the run folder is copied to",
        "resume_mode": "set trainer.remote_dir to the run that holds it, and resume_mode=auto",
    }

    backend: BackendName = "ray"  # local: one process, in which breakpoints work
    total_epochs: Count = 1  # passes over the training data
    total_training_steps: Count | None = None  # None: epochs × batches per epoch
    seed: Natural = 0  # of sampling, shuffling and new weights
    test_freq: Natural = 0  # steps between validations; 0: only after the last step
    # A checkpoint is saved after the last step, every `save_freq` steps, and after the first step
    # that ends `save_interval_s` seconds after the last checkpoint. A crash in a run with these
    # defaults therefore loses half an hour and one step.
    save_freq: Natural = 0  # steps between checkpoints; 0: by time and after the last step
    save_interval_s: Positive | None = 1800.0  # seconds between checkpoints; None: not by time
    # a step that saves waits only for a copy of the states in host memory, and the copy is written
    # beside the next steps; false: it waits until all is written, and there is no copy
    async_save: bool = True
    # steps between snapshots: copies of the states in the memory of another node, or of another
    # process, to which a run goes back after the loss of a rank; 0: there are none
    snapshot_freq: Natural = 0
    max_ckpt_to_keep: Count | None = 3  # the newest ones; older ones are deleted; None: keep all
    save_on_stop: bool = True  # on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, end the step and save
    # moment before which the run saves and stops, such as 2026-11-27T06:00 in local time or
    # 2026-11-27T06:00+00:00; no step begins that would not end before it; None: there is none
    deadline: str | None = None
    stop_file: str | None = None  # when this file exists, end the step, save a checkpoint and stop
    stop_grace_s: Positive = 60.0  # seconds for that; then the run stops without a new checkpoint
    # disable, auto (the newest complete checkpoint; without one, from step 1) or its folder
    resume_mode: str = "disable"
    resume_override: bool = False  # resume although data or model differ from the checkpoint's
    # after the loss of a rank, a node or an engine: how often the run goes on from its newest
    # checkpoint; 0: the loss ends the run
    max_restarts: Natural = 3
    restart_window_s: Positive = 3600.0  # a restart with progress counts for this many seconds
    # seconds that a restart waits for missing nodes; then the run goes on with fewer, if it can
    restart_wait_s: NonNegative = 600.0
    project_name: str = "quadriga"  # of the learning curve and of trackers
    experiment_name: str = "run"  # name of the run there
    default_local_dir: str = "runs/run"  # run folder
    # files with functions on_start, on_step, …, or mine.py:Name for a class, called in the run
    callbacks: list[str] = field(default_factory=list)
    # where the run folder is copied to while the run goes on: s3://bucket/run, another remote
    # folder, or a mounted one; resume_mode=auto finds its checkpoints on a new machine
    remote_dir: str | None = None
    max_remote_ckpt_to_keep: Count | None = None  # there; None: max_ckpt_to_keep
    # keep only the newest checkpoint in the run folder, and those that are not in remote_dir
    remove_local_after_upload: bool = False
    # repository of the hub, owner/name, to which the finished run pushes its model; the token is
    # HF_TOKEN; None: none
    push_to_hub: str | None = None
    overwrite: bool = False  # replace a run that is already in the folder
    # console, jsonl, tensorboard, wandb, mlflow, trackio, swanlab, or a tracker of your own
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    # seconds in which a tracker starts, takes a row or ends; then the run goes on without it
    logger_timeout_s: Positive = 60.0
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass(frozen=True)
class DatasetClassConfig(PathSettings):
    """A dataset class of the user, in place of the one that reads the files."""

    PATHS = ("path",)

    path: str | None = None  # Python file; None: the built-in class
    name: str = "Dataset"  # class in this file


@dataclass(frozen=True)
class SamplerConfig(PathSettings):
    """A class of the user that chooses the rows of each batch, such as a curriculum."""

    PATHS = ("path",)

    path: str | None = None  # Python file; None: the seeded order
    name: str = "Sampler"  # class in this file
    options: Options = field(default_factory=dict)  # keyword arguments of the class


@dataclass(frozen=True)
class DataConfig(PathSettings):
    """The prompts: files, batch sizes, lengths in tokens."""

    PATHS = REMOTE = ("train_files", "val_files")
    KEPT = ("cache_dir",)

    train_files: list[str] = field(default_factory=list)  # .parquet or .jsonl files
    # share of each training file in the prompts; None: every row once in an epoch
    train_weights: list[float] | None = None
    val_files: list[str] = field(default_factory=list)  # files for validation; empty: no validation
    prompt_key: str = "prompt"  # column of the prompts
    # arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: Options = field(default_factory=dict)
    special_tokens: SpecialTokens = "keep"  # what happens to special tokens in texts of messages
    image_key: str | None = "images"  # column of the images of a prompt; None: there are none
    train_batch_size: Count = 64  # prompts per step, over all ranks
    val_batch_size: Count = 256  # prompts generated at once in validation
    max_prompt_length: Count = 512  # tokens
    max_response_length: Count = 512  # tokens
    filter_overlong_prompts: bool = True  # false: a prompt that is too long is an error
    shuffle: bool = True  # shuffle the prompts in each epoch
    seed: Natural | None = None  # seed of the row order; None: trainer.seed
    # folder for the token ids of large files, whose rows stay on disk; None: all rows in memory
    cache_dir: str | None = "~/.cache/quadriga/prompts"
    dataset: DatasetClassConfig = field(default_factory=DatasetClassConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """Machines, number of steps, validation, checkpoints, the run folder, and balancing."""

    PATHS: ClassVar[tuple[str, ...]] = (*RunConfig.PATHS, "replay_order")

    val_before_train: bool = True  # validate before the first step
    test_freq: Natural = 10  # steps between validations; 0: only after the last step
    # training steps by which the weights that sampled a response may be behind; 0: a step waits for
    # its own responses; above 0: generation goes on while the policy is trained
    max_staleness: Natural = 0
    # a run folder with its own max_staleness: repeat the order of its calls to the rollout, and so
    # its tokens and its model; None: responses are taken as they come
    replay_order: str | None = None
    samples_per_step: Natural = 8  # responses written to the run folder in each step
    tokens_per_sample: Natural = 128  # tokens of each that are written with log-probabilities
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
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
