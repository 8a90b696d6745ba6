"""The layers of this rank, in one chunk or several, and the schedule over micro-batches.

A norm, and attention over packed rows, replace modules of Megatron-core.

Shapes: B rows, R response columns, N packed tokens of the context-parallel rank, k targets that
they predict, K targets of all ranks, D hidden size (in attention: head size), H heads and G key
heads of this rank, T tensor-parallel ranks. Between layers, a stage has [N, 1, D], with sequence
parallelism [N / T, 1, D].

With two stages of two chunks, each rank has two parts of the layers, and a micro-batch passes it
twice (arXiv 2104.04473, §2.2.2):

    layers     0 1       2 3       4 5       6 7
    stage      0         1         0         1
    chunk      0         0         1         1
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quadriga.engines.attention.kernels import AttentionRows, KernelOf, LocalMask, packed_attention
from quadriga.engines.base import ENTROPY, LOG_PROBS, VALUES, HeadKind, Outputs
from quadriga.engines.megatron import families
from quadriga.engines.megatron.ranks import Ranks
from quadriga.engines.micro_batches import TokenSlice
from quadriga.engines.sequence_cost import model_shape
from quadriga.models.log_probs import linear_log_probs
from quadriga.models.routes import take_experts
from quadriga.parallel.packing import PackedBatch

if not hasattr(moe_utils, "te_general_gemm"):
    # Version 0.16.1 asks whether it is None, and does not define it without Transformer Engine.
    moe_utils.te_general_gemm = None


class RowsInFlight:
    """The rows of the last micro-batches, by number.

    Layers receive the number as a tensor in place of an attention mask, because Megatron-core
    keeps tensors only for activations that are computed again.

    Args:
        kept: micro-batches whose layers can be computed again before the backward pass of the first
            of them.
    """

    def __init__(self, kept: int = 1) -> None:
        self._kept = kept
        self._numbers = count()
        self._rows: dict[int, tuple[AttentionRows, Tensor | None]] = {}
        self.routes: Tensor | None = None

    def add(self, rows: AttentionRows, routes: Tensor | None) -> Tensor:
        """Keep the rows of a micro-batch, and return their number, on the CPU.

        Args:
            routes: [n, layers, E], the experts of the n tokens that this rank gives to the routers.
        """
        kept = self._kept if torch.is_grad_enabled() else 1
        for number in list(self._rows)[: max(0, len(self._rows) + 1 - kept)]:
            del self._rows[number]
        number = next(self._numbers)
        self._rows[number] = rows, routes
        return torch.tensor(number)

    def of(self, number: Tensor) -> AttentionRows:
        """Return the rows with this number, and set `routes` to the experts of their tokens."""
        rows, self.routes = self._rows[int(number)]
        return rows

    def clear(self) -> None:
        """Drop all rows, after a step."""
        self._rows.clear()
        self.routes = None


class ReplayedExperts:
    """Gives the router of a layer the experts of the rollout, if the micro-batch has recorded ones.

    It has the place of Megatron-core's `RouterReplay`, which needs the experts of all micro-batches
    in the order of their backward passes. The attention of the layer has just been computed, in the
    forward pass or again before the backward pass, so `RowsInFlight.routes` are of these tokens.

    Args:
        layer: its number in the model.
    """

    def __init__(self, in_flight: RowsInFlight, layer: int) -> None:
        self._in_flight, self._layer = in_flight, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts), [n, E] each, of n tokens with `scores` of all experts."""
        own = choose(scores, topk, groups, group_topk)
        routes = self._in_flight.routes
        return own if routes is None else take_experts(routes[:, self._layer], scores, own[1])


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · weight, computed in float32 (arXiv 1910.07467).

    Megatron-core's own needs Transformer Engine or Apex for sequence parallelism.
    """

    def __init__(self, config: object, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=getattr(config, "params_dtype", None))
        )
        self.eps = eps
        # Each rank has seen its part of the tokens only, so gradients are summed over ranks.
        self.weight.sequence_parallel = (  # type: ignore[attr-defined]  # read by Megatron-core
            getattr(config, "sequence_parallel", False)
        )

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.itemsize < 4 else x
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedAttention(nn.Module):
    """The attention of a layer over packed rows, by the kernels of the FSDP engine."""

    def __init__(
        self,
        in_flight: RowsInFlight,
        of_layers: list[int | None],
        *,
        layer_number: int,
        **_: object,
    ) -> None:
        super().__init__()
        self.in_flight = in_flight
        window = of_layers[layer_number - 1]
        self.mask: LocalMask | None = None
        if window is not None:
            self.mask = LocalMask(sliding_window_causal_mask_function(window), window)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object
    ) -> Tensor:
        """Attend: [N, 1, H, D], twice [N, 1, G, D] -> [N, 1, H · D].

        Args:
            attention_mask: the number of the rows; see `RowsInFlight`.
        """
        rows = self.in_flight.of(attention_mask)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = packed_attention(self, q, k, v, self.mask, attention_rows=rows)[0]
        return out[0].flatten(1)[:, None]  # [1, N, H, D] -> [N, 1, H · D]


def block_parts(
    config: PreTrainedConfig, family: families.Family, in_flight: RowsInFlight, layers: int
) -> object:
    """Return what Megatron-core builds the layers of a stage from.

    Args:
        layers: of the stage.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=families.expert_count(config) or None,
        qk_layernorm=family.qk_norm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = partial(
        PackedAttention, in_flight, list(model_shape(config).windows)
    )
    if family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm)


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch, as every stage has it.

    Attributes:
        own: the tokens of this context-parallel rank.
    """

    packed: PackedBatch
    own: TokenSlice
    temperature: float
    entropy: bool

    def outputs(self, columns_KC: Tensor, head: HeadKind) -> Outputs:
        """Return the outputs [B, R] from one column for each."""
        names = [VALUES] if head != "lm" else [LOG_PROBS, *[ENTROPY] * self.entropy]
        return {name: self.packed.targets.unpack(columns_KC[:, i]) for i, name in enumerate(names)}


class Stage(GPTModel):  # type: ignore[misc]  # Megatron-core has no types
    """The layers of one chunk of a pipeline stage, with the embedding and the head where they
    belong. A stage has one chunk, or several with an interleaved schedule.

    Its parameters have no values yet: `weights` reads them.

    Args:
        transformer: Megatron-core's settings.
        kernel_of: the kernel of each call of attention.
        chunk: the number of the chunk in its stage.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        transformer: TransformerConfig,
        ranks: Ranks,
        head: HeadKind,
        kernel_of: KernelOf,
        device: torch.device,
        chunk: int = 0,
    ) -> None:
        chunks, stages = ranks.chunks, ranks.degrees.pipeline
        # At most (chunks + 1) · stages − 1 micro-batches wait for their backward pass; see
        # `memory.py`. Without recomputation none of them needs its rows.
        recomputed = transformer.recompute_granularity is not None
        self.rows_in_flight = RowsInFlight((chunks + 1) * stages if recomputed else 1)
        layers = config.num_hidden_layers // stages // chunks
        super().__init__(
            transformer,
            block_parts(config, families.family_of(config), self.rows_in_flight, layers),
            families.padded_vocabulary(config, ranks.degrees.tensor),
            config.max_position_embeddings,
            pre_process=ranks.place.stage == 0 and chunk == 0,
            post_process=ranks.last_stage and chunk == chunks - 1,
            share_embeddings_and_output_weights=config.tie_word_embeddings and head == "lm",
            position_embedding_type="none",
            vp_stage=chunk if chunks > 1 else None,
        )
        for layer in self.decoder.layers if families.expert_count(config) else ():
            replayed = ReplayedExperts(self.rows_in_flight, layer.layer_number - 1)
            layer.mlp.router.router_replay = replayed
        self.ranks, self.head, self.kernel_of, self.device = ranks, head, kernel_of, device
        self.padding: int | None = config.pad_token_id
        self.vocabulary: int = config.vocab_size
        self.inverse_frequencies = inverse_frequencies(config).to(device)
        if head != "lm" and self.post_process:
            del self.output_layer
            self.score = nn.Linear(
                config.hidden_size,
                1,
                bias=head == "value",
                device=device,
                dtype=transformer.params_dtype,
            )
        self.to(device)  # norms and routers are made on the CPU

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the layers. The last chunk returns the outputs [K, columns], float32."""
        own = micro.own
        angles = own.position_ids[0, :, None].float() * self.inverse_frequencies
        rows = AttentionRows(
            micro.packed.rows,
            self.device,
            self.kernel_of,
            split=self.device.type == "cpu",
            ranks=own.ranks,
        )
        routes = None if own.routes is None else self._own_tokens(own.routes)
        hidden = self.decoder(
            hidden_states=self._embedded(own.input_ids) if self.pre_process else None,
            attention_mask=self.rows_in_flight.add(rows, routes),
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
        )
        if not self.post_process:
            return hidden  # type: ignore[no-any-return]  # Megatron-core has no types
        if self.ranks.engine.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return own.join(self._columns(hidden[own.predictors, 0], micro))

    def _embedded(self, ids_1N: Tensor) -> Tensor:
        """Look up the embeddings. That of the padding token has no gradient, as in transformers
        (`nn.Embedding(padding_idx=…)`), also where the token is part of a text."""
        hidden: Tensor = self.embedding(ids_1N, None)
        if self.padding is None or not hidden.requires_grad:
            return hidden
        is_padding = self._own_tokens(ids_1N[0] == self.padding)
        return torch.where(is_padding[:, None, None], hidden.detach(), hidden)

    def _own_tokens(self, of_tokens: Tensor) -> Tensor:
        """Return the slice of this tensor-parallel rank, [N, …] -> [N / T, …] or all of it."""
        if not self.ranks.engine.sequence_parallel:
            return of_tokens
        return of_tokens.chunk(self.ranks.degrees.tensor)[self.ranks.place.tensor]

    def _columns(self, hidden_kD: Tensor, micro: MicroBatch) -> Tensor:
        """Compute the outputs of the targets from their hidden states, which all T ranks have."""
        if self.head != "lm":
            values: Tensor = self.score(hidden_kD)
            return values.float() if values.itemsize < 4 else values
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        first = self.ranks.place.tensor * len(weight)
        # Rows behind the vocabulary are padding, and not in the softmax.
        own = max(0, min(len(weight), self.vocabulary - first))
        log_prob, ent = linear_log_probs(
            hidden_kD,
            weight[:own],
            micro.own.labels - first,
            micro.temperature,
            entropy=micro.entropy,
            group=self.ranks.group("tensor"),
        )
        return torch.stack([log_prob, ent] if micro.entropy else [log_prob], -1)


def inverse_frequencies(config: PreTrainedConfig) -> Tensor:
    """Return the angle by which each pair of a head turns per position, float32."""
    kind = families.rope_type(config)
    if kind != "default":
        found: Tensor = ROPE_INIT_FUNCTIONS[kind](config)[0]
        return found
    size = families.head_size(config)
    base: float = config.rope_parameters["rope_theta"]
    return 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32) / size))


def transformer_config(
    config: PreTrainedConfig,
    ranks: Ranks,
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: bool,
) -> TransformerConfig:
    """Return Megatron-core's settings of a model.

    Args:
        recompute: whether the backward pass computes the activations of layers again.
    """
    family = families.family_of(config)
    degrees, engine = ranks.degrees, ranks.engine
    interleaved = ranks.chunks > 1
    flags = families.core_flags(device.type, config)
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=families.head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=family.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        context_parallel_size=engine.context_parallel_size,
        virtual_pipeline_model_parallel_size=ranks.chunks if interleaved else None,
        # Two stages exchange both directions with the same rank, which must not be one batch.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        expert_model_parallel_size=engine.expert_parallel_size,
        expert_tensor_parallel_size=families.ranks_of_expert(engine),
        sequence_parallel=engine.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # ranks have different numbers of tokens
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        # Losses are shares of the whole mini-batch, so gradients are summed, not averaged.
        calculate_per_token_loss=True,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        persist_layer_norm=False,
        **{name: not off for name, off in flags.items() if hasattr(TransformerConfig, name)},
        **_of_experts(config),
    )


def _of_experts(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-core's settings of experts; none if the layers have no experts."""
    experts, normalized = families.expert_count(config), families.family_of(config).normalized_top_k
    if not experts:
        return {}
    if normalized is None:
        normalized = config.norm_topk_prob
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None)
        or config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # The softmax of the chosen logits is the normalized softmax of all.
        "moe_router_pre_softmax": not normalized,
        "moe_router_load_balancing_type": "none",
    }


Finish = Callable[[Tensor, MicroBatch, Tensor | None], tuple[Tensor, Any]]
"""(columns of the outputs, micro-batch, its rows) -> (loss, result), on the last stage."""


class Pipeline:
    """The part of the model that this rank computes.

    Args:
        transformer: Megatron-core's settings.
        trained: whether gradients are computed.

    Attributes:
        parameters: name -> parameter. Layers are numbered from 0 over the chunks.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        transformer: TransformerConfig,
        ranks: Ranks,
        head: HeadKind,
        kernel_of: KernelOf,
        device: torch.device,
        *,
        trained: bool,
    ) -> None:
        self._ranks = ranks
        self._chunks = [
            Stage(config, transformer, ranks, head, kernel_of, device, chunk)
            for chunk in range(ranks.chunks)
        ]
        self.parameters: dict[str, nn.Parameter] = {}
        for chunk, stage in enumerate(self._chunks):
            layers = len(stage.decoder.layers)
            for name, parameter in stage.named_parameters():
                self.parameters[_over_chunks(name, chunk * layers)] = parameter
        self._models: list[Any] = list(self._chunks)
        if not trained:
            for stage in self._chunks:
                stage.requires_grad_(False)
            return
        transformer.finalize_model_grads_func = _finish_gradients
        # Gradients of the last layers are sent while the backward pass computes those before them.
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        self._models = [
            DistributedDataParallel(transformer, settings, stage) for stage in self._chunks
        ]
        own = [model.no_sync for model in self._models]  # only the last micro-batch sends
        transformer.no_sync_func = own if len(own) > 1 else own[0]

    def gradient_buffers(self) -> Iterator[Tensor]:
        """Yield the memory in which gradients are added up."""
        for model in self._models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                yield buffer.grad_data

    def zero_gradients(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()

    def run(
        self,
        micro_batches: list[Tensor | None],
        select: Callable[[Tensor | None], MicroBatch],
        finish: Finish,
        *,
        train: bool,
    ) -> list[Any]:
        """Run the schedule over all micro-batches, whose number the stages divide if there are
        several chunks.

        Returns:
            The results of `finish`, on the last stage; elsewhere nothing.
        """

        def step(
            remaining: Iterator[Tensor | None], model: Callable[[MicroBatch], Tensor]
        ) -> tuple[Tensor, Any]:
            rows = next(remaining)
            micro = select(rows)

            def end(columns: Tensor, non_loss_data: bool = False) -> Any:
                loss, result = finish(columns, micro, rows)
                # The number of tokens is for a division that Megatron-core does not make here.
                return result if non_loss_data else (loss, torch.zeros((), dtype=torch.int), result)

            return model(micro), end

        ranks = self._ranks
        schedule = get_forward_backward_func(
            ranks.degrees.pipeline, ranks.chunks if ranks.chunks > 1 else None
        )
        try:
            results: list[Any] = schedule(
                forward_step_func=step,
                data_iterator=[iter(micro_batches) for _ in self._models],
                model=self._models,
                num_microbatches=len(micro_batches),
                seq_length=1,  # sizes are sent before activations
                micro_batch_size=1,
                forward_only=not train,
                collect_non_loss_data=not train,
            )
        finally:
            for stage in self._chunks:
                stage.rows_in_flight.clear()
        return results


def _over_chunks(name: str, first: int) -> str:
    """Return the name of a parameter with the number of its layer in the stage.

    Args:
        first: layers of the chunks before.
    """
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(first + int(parts[2]))
    return ".".join(parts)


def _finish_gradients(
    model: list[Any], num_tokens: Tensor | None = None, **settings: object
) -> None:
    """Sum gradients over the ranks that have the same parameters.

    `num_tokens` is left out: Megatron-core would divide by it, and losses are shares already.
    """
    finalize_model_grads(model, None, **settings)
