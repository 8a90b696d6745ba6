"""The policy in its three uses (actor, rollout, reference), and the critic."""

from __future__ import annotations

from dataclasses import dataclass, field

from quadriga.config.schema.choices import (
    AggregationName,
    AlarmAction,
    DtypeName,
    KLName,
    Options,
    WeightTransport,
)
from quadriga.config.schema.model import EngineConfig, ModelConfig, OptimConfig


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
    ppo_micro_batch_size_per_gpu: int | None = None  # most sequences; see engine.use_dynamic_bsz
    ppo_epochs: int = 1  # passes over the sequences of a step
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
    """How tokens are sampled, and what ends a response beside the end tokens of the model."""

    temperature: float = 1.0  # 0: greedy decoding
    top_p: float = 1.0  # nucleus sampling; 1: all tokens
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0  # leave out tokens below this share of the likeliest one's; 0: none
    min_new_tokens: int = 0  # tokens of a response before it can end; at most max_response_length
    stop: tuple[str, ...] = ()  # texts that end a response, which includes them: ["</answer>"]
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response, also with ignore_eos
    ignore_eos: bool = False  # the end tokens of the model do not end a response


@dataclass(frozen=True)
class ReplicasConfig:
    """A rollout of replicas, each of which is asked for rows by itself. In training they need ranks
    of their own."""

    enable: bool = False  # false: all ranks of the rollout are one group and get equal parts
    request_rows: int | None = None  # sequences of one request; None: a quarter of an equal part
    requests_in_flight: int = 2  # requests that a replica has at once
    # a prompt goes to the replica that has computed at least this share of its tokens before, since
    # the last weight sync: the next turn of a conversation
    prefix_share: float = 0.5
    # lost replicas that are started again in a run: at the next weight sync, or for the next batch
    # of `quadriga generate` and `quadriga eval`
    restarts: int = 0


@dataclass(frozen=True)
class RolloutEngineConfig:
    """The rollout engine by itself, as `quadriga generate` and `quadriga eval` use it too."""

    name: str = "hf"  # hf, vllm or sglang
    micro_batch_size: int = 256  # sequences that one rank generates at once
    dtype: DtypeName = "auto"  # of weights and computation; auto: as engine.dtype
    options: Options = field(default_factory=dict)  # keyword arguments of the engine
    # seconds that one call of the engine may take on a rank, such as the generation of its part of
    # a batch; None: no limit but that of the call to the worker group (call_timeout_s)
    deadline_s: float | None = None
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)

    def rows_at_once(self, rows: int, ranks: int) -> int:
        """Return how many rows of a batch a rank generates at once, at most."""
        of_rank = -(-rows // ranks)
        if self.replicas.enable and self.replicas.request_rows is not None:
            of_rank = min(rows, self.replicas.request_rows)
        return min(of_rank, self.micro_batch_size)


@dataclass(frozen=True)
class MismatchConfig:
    """The watch over the difference between rollout and training log-probabilities."""

    bound: float = 0.5  # nats; a token whose log-probabilities differ by more is beyond the bound
    max_share: float = 0.05  # share of the response tokens of a step that may be beyond the bound
    on_alarm: AlarmAction = "warn"  # more tokens than that: log a warning, or end the run


@dataclass(frozen=True)
class RolloutConfig(RolloutEngineConfig):
    """The rollout engine, which generates the responses, and how training uses it."""

    n: int = 1  # responses per prompt
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_n: int = 1  # responses per prompt in validation
    val_sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    # MiB of memory on each rank for weights in flight from the actor to the rollout
    weight_bucket_mb: int = 256
    # how weights go between processes. shared_memory: of a node with weights in host memory; the
    # store of the backend if the rollout is in other processes (`placement`). collective: of a
    # process group. auto: shared_memory where it is possible
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
    ppo_mini_batch_size: int | None = None  # None: that of the actor
    ppo_micro_batch_size_per_gpu: int | None = None  # most sequences; see engine.use_dynamic_bsz
    ppo_epochs: int | None = None  # None: that of the actor
    cliprange_value: float | None = 0.5  # None: no clipping
    loss_agg_mode: AggregationName = "token-mean"  # how token losses become one loss
    warmup_steps: int = 0  # first steps, in which only the critic is updated
