"""The memory of a training engine, known before a weight is loaded.

States are arithmetic: `fsdp_memory` and `megatron.memory`. The activations of one micro-batch are
counted on the meta device by the code that trains. Both engines have one function
`(model, engine, use) -> EngineMemory`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.base import EntropyUse, HeadKind
from quadriga.engines.micro_batches import plan_micro_batches, select_rows
from quadriga.engines.token_model import TokenModel
from quadriga.errors import QuadrigaError
from quadriga.models.log_probs import ACCELERATOR_TILE, CPU_TILE
from quadriga.models.memory import (
    META,
    AllocationCounter,
    failure,
    gradients_set_aside,
    kernels_of,
    run_backward,
)
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.protocol import fields

_MANY = 16  # micro-batches


@dataclass(frozen=True)
class Rows:
    """The rows of one rank in one call. All have full length.

    Attributes:
        count: rows.
        prompt, response: tokens of each.
        samples: rows that share a prompt and are neighbours.
        micro_batch: most rows of a micro-batch, within the engine's budget of tokens. None: any
            number.
        entropy: what is computed of the entropies; "gradient" in an update only.
    """

    count: int
    prompt: int
    response: int
    samples: int = 1
    micro_batch: int | None = None
    entropy: EntropyUse = "unused"

    def batch(self, vocabulary: int) -> dict[str, Tensor]:
        """Return the fields that a forward pass needs, with prompt + response columns."""
        ids = torch.zeros(self.count, self.prompt + self.response, dtype=torch.int64)
        # Different prompts begin with different tokens: the digits of the prompt's number. With 5
        # words, prompt 7 begins with 2 1, because 7 = 2 + 1 · 5.
        number = torch.arange(self.count) // self.samples
        for column in range(min(self.prompt, 4)):
            ids[:, column] = number % vocabulary
            number = number // vocabulary
        return {
            fields.INPUT_IDS: ids,
            fields.ATTENTION_MASK: torch.ones_like(ids),
            fields.RESPONSE_MASK: torch.ones_like(ids[:, self.prompt :]),
        }

    def for_micro_batches(self, tokens: int | None) -> Rows:
        """Return fewer rows if these are certainly many micro-batches of at most `tokens`."""
        # Micro-batches have about equal costs. 18 rows, at most 16 in a micro-batch, are 9 and 9,
        # and 64 rows are 16 in each. So few rows show the size only if they are many micro-batches.
        # A shared prompt is computed once, so a row adds at least its response.
        by_tokens = self.count if tokens is None else tokens // self.response + self.samples + 1
        most = min(by_tokens, self.micro_batch or by_tokens)
        return replace(self, count=min(self.count, _MANY * most))


@dataclass(frozen=True)
class TrainingUse:
    """How a run uses a training engine.

    Attributes:
        ranks: ranks of the worker group.
        device_type: "cpu", or the type of an accelerator.
        update: the rows of one rank in an optimizer step. None: the engine is not trained.
        evaluate: the rows of one rank in a pass without gradients. None: there is none.
    """

    head: HeadKind
    ranks: int
    device_type: str
    update: Rows | None
    evaluate: Rows | None
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def device(self) -> torch.device:
        """A device on which `compute_dtype` chooses the same dtypes."""
        return torch.device("cpu") if self.device_type == "cpu" else META


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one micro-batch on one rank, without parameters.

    Attributes:
        rows, tokens: of the micro-batch; a shared prompt counts once.
        several: whether a call has more than one micro-batch.
        forward: most bytes in the forward pass.
        inside: most bytes until the model has returned, before its outputs are computed.
        saved: bytes after the forward pass, which the backward pass needs.
        activations: most bytes in both passes, without complete gradients of parameters.
        with_gradients: most bytes in both passes, with the gradients of this micro-batch.
        logits: bytes of the logits, a part of `activations`.
        problem: why the other numbers are 0; "" if they are counted.
    """

    rows: int
    tokens: int = 0
    several: bool = True
    forward: int = 0
    inside: int = 0
    saved: int = 0
    activations: int = 0
    with_gradients: int = 0
    logits: int = 0
    problem: str = ""


_COUNTED: dict[Hashable, PassMemory] = {}
"""Passes of the plans of this process: plans with another optimizer, or with states in host memory,
have equal passes."""


def count_pass(
    module: PreTrainedModel,
    model: ModelConfig,
    engine: EngineConfig,
    use: TrainingUse,
    *,
    backward: bool,
    stages: int = 1,
) -> PassMemory | None:
    """Return the memory of the update, or of the pass without gradients; None if there is none.

    Args:
        module: a model on the meta device; `model` are its settings.
        stages: least micro-batches, if there are as many rows.
    """
    rows = use.update if backward else use.evaluate
    if rows is None:
        return None
    same = replace(engine, param_offload=False, optimizer_offload=False, offload_policy=False)
    if not backward:  # nothing is kept that could be computed again
        model = replace(model, gradient_checkpointing=False)
    config = module.config.to_json_string()
    key = (config, model, same, use.head, use.device_type, stages, rows, backward)
    if key not in _COUNTED:
        try:
            found = pass_memory(
                module, engine, rows, head=use.head, device_type=use.device_type,
                backward=backward, stages=stages,
            )  # fmt: skip
        except QuadrigaError:
            raise
        except Exception as error:  # a model whose code reads numbers fails in any way; reported
            return PassMemory(rows.count, problem=failure(error))
        if len(_COUNTED) > 64:
            _COUNTED.clear()
        _COUNTED[key] = found
    return _COUNTED[key]


def pass_memory(
    module: PreTrainedModel,
    engine: EngineConfig,
    rows: Rows,
    *,
    head: HeadKind,
    device_type: str,
    backward: bool,
    stages: int = 1,
) -> PassMemory:
    """Compute the largest micro-batch of `rows` with a model on the meta device."""
    with kernels_of(device_type, entropies_have_gradients=rows.entropy == "gradient"):
        model = TokenModel(
            module,
            head,
            META,
            fused=engine.fused_head,
            micro_batch_tokens=engine.max_tokens_per_micro_batch,
            attention=engine.attention,
            dtype=next(module.parameters()).dtype,
            device_type=device_type,
            ranks=ModelRanks.simulated(engine),
        )
        micro, several = _largest_micro_batch(model, engine, rows, stages)
        counter, inside = AllocationCounter(), []
        hook = module.register_forward_hook(lambda *_: inside.append(counter.peak))
        with (
            gradients_set_aside(counter, list(module.parameters())),
            counter,
            torch.set_grad_enabled(backward),
        ):
            outputs = model(micro, temperature=1.0, entropy=rows.entropy != "unused")
            forward, saved = counter.peak, counter.live
            if backward:
                run_backward(torch.stack([v.sum() for v in outputs.values()]).sum())
            del outputs
        hook.remove()
    count = len(micro[fields.INPUT_IDS])
    prompts = math.ceil(count / rows.samples) if model.packed else count
    return PassMemory(
        rows=count,
        tokens=prompts * rows.prompt + count * rows.response,
        several=several,
        forward=forward,
        inside=inside[0],
        saved=saved,
        activations=counter.peak,
        with_gradients=counter.peak_with_kept,
        logits=_logits(model, micro, engine.model_parallel_size),
    )


def _largest_micro_batch(
    model: TokenModel, engine: EngineConfig, rows: Rows, stages: int
) -> tuple[dict[str, Tensor], bool]:
    """Return the first micro-batch, which is the largest, and whether there are others."""
    tokens = engine.micro_batch_tokens if engine.use_dynamic_bsz else None
    few = rows.for_micro_batches(tokens)
    batch = few.batch(model.model.config.get_text_config().vocab_size)
    micro_batches = plan_micro_batches(
        batch,
        size=rows.micro_batch,
        max_tokens=tokens,
        share_prompts=model.packed,
        stages=stages,
    )
    first = select_rows(batch, micro_batches[0], torch.device("cpu"))
    return first, len(micro_batches) > 1


def _logits(model: TokenModel, micro: dict[str, Tensor], ranks: int) -> int:
    """Return the bytes of the logits of a micro-batch; with a fused head, those of its tiles.

    `ranks`: that split the tokens.
    """
    if model.head != "lm":
        return 0
    vocabulary: int = model.model.config.get_text_config().vocab_size
    logits = int(micro[fields.RESPONSE_MASK].sum()) * vocabulary // ranks
    if model.fused:
        # The forward pass has one tile, the backward pass another one for its weights.
        tile = CPU_TILE if model.device_type == "cpu" else ACCELERATOR_TILE
        return 2 * min(logits, tile) * torch.float32.itemsize
    return logits * next(model.model.parameters()).dtype.itemsize
