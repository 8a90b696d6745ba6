"""The layers of this rank, in one chunk or several, and the schedule over micro-batches.

With two stages of two chunks, each rank has two parts of the layers, and a micro-batch passes it
twice (arXiv 2104.04473, §2.2.2):

    layers     0 1       2 3       4 5       6 7
    stage      0         1         0         1
    chunk      0         0         1         1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from quadriga.engines.attention.choice import KernelOf
from quadriga.engines.base import HeadKind
from quadriga.engines.megatron.model import MicroBatch, Stage
from quadriga.engines.megatron.ranks import Ranks

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
            for chunk in range(ranks.sizes.chunks)
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
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._models = [
            DistributedDataParallel(transformer, settings, stage) for stage in self._chunks
        ]

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

        sizes = self._ranks.sizes
        schedule = get_forward_backward_func(
            sizes.pipeline, sizes.chunks if sizes.chunks > 1 else None
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
