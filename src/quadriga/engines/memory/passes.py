"""The activations of one micro-batch, counted on the meta device by the code that trains.

Shapes: P prompt columns, R response columns, K targets, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.base import EntropyUse, HeadKind
from quadriga.engines.micro_batches import plan_micro_batches, select_rows
from quadriga.engines.token_model import TokenModel
from quadriga.errors import QuadrigaError
from quadriga.models.log_probs.linear_log_prob import ACCELERATOR_TILE, CPU_TILE
from quadriga.models.log_probs.log_prob import meta_entropies_have_gradients
from quadriga.models.simulated.allocations import AllocationCounter, gradients_set_aside
from quadriga.models.simulated.kernels import kernels_of, run_backward
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.parallel.token_exchange import counting_sent_bytes
from quadriga.protocol import fields

META = torch.device("meta")
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
        """Return the fields that a forward pass needs, with P + R columns."""
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
        logits: bytes of the logits. They are a part of `activations`.
        exchanged: bytes that the rank sends to others of its model-parallel group.
    """

    rows: int
    tokens: int
    several: bool
    forward: int
    saved: int
    activations: int
    with_gradients: int
    logits: int
    exchanged: int = 0
    inside: int = 0


def pass_memory(
    module: PreTrainedModel,
    engine: EngineConfig,
    rows: Rows,
    *,
    head: HeadKind,
    device_type: str,
    backward: bool,
    entropy: EntropyUse = "unused",
    stages: int = 1,
) -> PassMemory:
    """Compute the largest micro-batch of `rows` with a model on the meta device.

    Args:
        backward: whether the pass computes gradients.
        entropy: whether it computes entropies too, and in the backward pass their gradients.
        stages: least micro-batches, if there are as many rows.
    """
    with kernels_of(device_type), meta_entropies_have_gradients(entropy == "gradient"):
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
        parameters = list(module.parameters())
        with (
            counting_sent_bytes() as sent,
            gradients_set_aside(counter, parameters),
            counter,
            torch.set_grad_enabled(backward),
        ):
            outputs = model(micro, temperature=1.0, entropy=entropy != "unused")
            forward, saved = counter.peak, counter.live
            if backward:
                run_backward(torch.stack([v.sum() for v in outputs.values()]).sum())
            del outputs
        hook.remove()
    return PassMemory(
        rows=len(micro[fields.INPUT_IDS]),
        tokens=computed_tokens(rows, len(micro[fields.INPUT_IDS]), shared=model.packed),
        several=several,
        forward=forward,
        saved=saved,
        activations=counter.peak,
        with_gradients=counter.peak_with_kept,
        logits=_logits(model, micro, engine.model_parallel_size),
        exchanged=sent.total,
        inside=inside[0],
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


def computed_tokens(rows: Rows, count: int, *, shared: bool) -> int:
    """Return the tokens of `count` rows. With `shared`, each prompt counts once."""
    prompts = math.ceil(count / rows.samples) if shared else count
    return prompts * rows.prompt + count * rows.response


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


_COUNTED: ContextVar[dict[Hashable, PassMemory] | None] = ContextVar("_COUNTED", default=None)


@contextmanager
def passes_counted_once() -> Iterator[None]:
    """Within this block, or a function with this decorator, equal passes are counted once.

    Plans with another optimizer, or with states in host memory, have equal passes.
    """
    token = _COUNTED.set({})
    try:
        yield
    finally:
        _COUNTED.reset(token)


@dataclass
class Passes:
    """Counts passes of one model; after a failure, `problem` says why there is no count.

    `model`: the settings of `module`.
    """

    module: PreTrainedModel
    model: ModelConfig
    engine: EngineConfig
    head: HeadKind
    device_type: str
    problem: str = ""
    stages: int = 1

    def count(self, rows: Rows | None, *, backward: bool) -> PassMemory | None:
        """Return the memory of a pass, without activations if the model cannot be simulated."""
        if rows is None:
            return None
        counted, key = _COUNTED.get(), self._key(rows, backward=backward)
        if counted is None:
            return self._count(rows, backward=backward)
        if key not in counted:
            found = self._count(rows, backward=backward)
            if self.problem:
                return found
            counted[key] = found
        return counted[key]

    def _key(self, rows: Rows, *, backward: bool) -> Hashable:
        """Return all that the memory of a pass depends on."""
        engine, model = self.engine, self.model
        engine = replace(engine, param_offload=False, optimizer_offload=False, offload_policy=False)
        if not backward:  # nothing is kept that could be computed again
            model = replace(model, gradient_checkpointing=False)
        config = self.module.config.to_json_string()
        return (config, model, engine, self.head, self.device_type, self.stages, rows, backward)

    def _count(self, rows: Rows, *, backward: bool) -> PassMemory:
        try:
            return pass_memory(
                self.module,
                self.engine,
                rows,
                head=self.head,
                device_type=self.device_type,
                backward=backward,
                entropy=rows.entropy,
                stages=self.stages,
            )
        except QuadrigaError:
            raise
        except Exception as error:  # a model whose code reads numbers fails in any way; reported
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            return PassMemory(rows.count, 0, True, 0, 0, 0, 0, 0)
