"""A model, its optimizer and its training engine: sections that several roles have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from quadriga.config.paths import PathSettings
from quadriga.config.schema.choices import (
    MISSING_PATH,
    AttentionName,
    Checkpointing,
    DtypeName,
    LrSchedulerName,
    OptimizerName,
    ReduceDtypeName,
)


@dataclass(frozen=True)
class LoraConfig(PathSettings):
    """Adapters (LoRA, arXiv 2106.09685), which are trained in place of the weights.

    Without `rank` and `path` there are none.
    """

    PATHS = ("path",)

    rank: int | None = None  # size of the adapters; None: none, or that of `path`
    alpha: float | None = None  # scaling × rank; None: 2 × rank, or that of `path`
    dropout: float = 0.0  # share of their inputs that adapters drop in an update
    # linear layers by the end of their names, as q_proj; None: all but the output layer, or those
    # of `path`
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

    PATHS = ("path", "tokenizer_path")

    path: str = MISSING_PATH  # a model folder, or hf://owner/name
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
    tensor_parallel_size: int = 1
    # fsdp: ranks that split the tokens of the same rows, and in attention its heads (Ulysses)
    sequence_parallel_size: int = 1
    # ranks that split the tokens of the same rows also in attention, for which they gather keys and
    # values; for long rows, and for sizes that do not divide the heads; 1: none
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1  # megatron: stages, each with a part of the layers; 1: none
    # megatron: parts of a stage's layers, computed in turns (interleaved schedule); 1: 1F1B
    virtual_pipeline_parallel_size: int = 1
    # megatron: context- and data-parallel ranks over which the experts of a layer are divided; 1:
    # none
    expert_parallel_size: int = 1
    # megatron: ranks that split each expert: tensor_parallel_size or 1; null: tensor_parallel_size
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False  # megatron: tensor-parallel ranks split tokens between layers
    # megatron: divide optimizer state and its step over the context- and data-parallel ranks
    distributed_optimizer: bool = True
    # limit the tokens of a micro-batch, and not only its sequences
    use_dynamic_bsz: bool = True
    # tokens on one rank, if use_dynamic_bsz; ranks that split tokens compute a multiple together
    max_tokens_per_micro_batch: int = 16384
    fused_head: bool | None = None  # log-probs without full logits; None: if they would be large
    attention: AttentionName = "auto"  # kernel of packed rows; auto: the fastest that is exact

    @property
    def offloads(self) -> tuple[str, ...]:
        """The names of the settings that are on and keep states in host memory."""
        names = ("param_offload", "optimizer_offload", "offload_policy")
        return tuple(name for name in names if getattr(self, name))

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
