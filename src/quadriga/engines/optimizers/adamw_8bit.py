"""AdamW with moments of 8 bits, by torchao (T. Dettmers et al., arXiv 2110.02861).

A moment is stored as a code of 8 bits for each element, and a scale of 32 bits for each block of
neighbours in a row. A step decodes the moments, updates them in float32 and encodes them again.
Blocks do not cross rows, so they are the same on any number of ranks, and so are the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers.adamw import MOMENTS
from quadriga.engines.optimizers.rule import Named, local_shard, sharded_like

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 64
SMALLEST_PARAMETER = 4096
"""Elements. The moments of smaller parameters are not worth 8 bits (Dettmers et al., section 2)."""

CODES, SCALES = "codes", "scales"


def block_size(shape: Sequence[int]) -> int | None:
    """Return the elements that share a scale. None: the moments stay in the parameter's dtype."""
    # Rows of 896 elements: gcd(896, 256) = 128, so 7 blocks. Rows of 100: gcd 4, too small. A
    # vector has rows of 1 element.
    row = math.prod(shape[1:])
    block = math.gcd(row, LARGEST_BLOCK)
    large = math.prod(shape) >= SMALLEST_PARAMETER
    return block if large and block >= SMALLEST_BLOCK else None


class AdamW8bit:
    """Torchao's AdamW over parameter shards that all have a `block_size`. See `UpdateRule`."""

    def __init__(self, named: Named, config: OptimConfig) -> None:
        from torchao.optim import AdamW8bit as TorchaoAdamW

        self.named = named
        self._shards = [nn.Parameter(local_shard(p.detach())) for _, p in named]
        self._adamw = TorchaoAdamW(
            self._shards,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        for shard, (_, parameter), gradient in zip(
            self._shards, self.named, gradients, strict=True
        ):
            # FSDP may replace a parameter's storage before its first forward pass.
            shard.data = local_shard(parameter.detach())
            # A rank beyond the last row has an empty shard, which torchao cannot cut into blocks.
            if gradient is not None and shard.numel():
                shard.grad = gradient.to(shard.dtype)
                if not self._adamw.state[shard]:
                    self._set_state(shard, self._zeros(shard, parameter), steps=0)
        for group in self._adamw.param_groups:
            group["lr"].fill_(rate)  # torchao requires a tensor
        # Torchao compiles the step of each shape. On a CPU that needs a C++ compiler at run time
        # and takes longer than the steps of a short run.
        on_cpu = all(shard.device.type == "cpu" for shard in self._shards)
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            self._adamw.step()
        for shard in self._shards:
            shard.grad = None

    def _zeros(self, shard: Tensor, parameter: Tensor) -> dict[str, Tensor]:
        """Return moments of 0: for each of them codes [rows, …] uint8 and scales [rows, blocks]."""
        block = block_size(parameter.shape)
        assert block is not None
        blocks = math.prod(shard.shape[1:]) // block
        state: dict[str, Tensor] = {}
        for key in MOMENTS:
            state[f"{key}.{CODES}"] = torch.zeros_like(shard.detach(), dtype=torch.uint8)
            state[f"{key}.{SCALES}"] = torch.zeros(
                len(shard), blocks, dtype=torch.float32, device=shard.device
            )
        return state

    def _set_state(self, shard: Tensor, parts: Mapping[str, Tensor], steps: int) -> None:
        from torchao.optim.subclass_8bit import OptimState8bit

        def quantised(key: str, *, signed: bool) -> Tensor:
            # A moment that torchao makes has its table of the 256 values with it.
            table = OptimState8bit.zeros((1, 1), signed, 1, shard.device).qmap
            codes, scales = parts[f"{key}.{CODES}"], parts[f"{key}.{SCALES}"]
            moment: Tensor = OptimState8bit(codes, scales.view(-1), table, signed, shard.dtype)
            return moment

        first, second = MOMENTS
        self._adamw.state[shard] = {
            "step": torch.tensor(float(steps)),
            first: quantised(first, signed=True),
            second: quantised(second, signed=False),
        }

    def _parts(self, shard: Tensor, parameter: Tensor) -> dict[str, Tensor]:
        """Return codes and scales of a shard, those of the state where it exists."""
        parts = self._zeros(shard, parameter)
        state = self._adamw.state.get(shard)
        for key in MOMENTS if state else ():
            scales = parts[f"{key}.{SCALES}"]
            parts[f"{key}.{CODES}"] = state[key].codes
            parts[f"{key}.{SCALES}"] = state[key].scale.view_as(scales)
        return parts

    def tensors(self) -> dict[str, Tensor]:
        state = {}
        for (name, parameter), shard in zip(self.named, self._shards, strict=True):
            for part, tensor in self._parts(shard, parameter).items():
                shape = (len(parameter), *tensor.shape[1:])
                state[f"{part}.{name}"] = sharded_like(tensor, parameter, shape)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        for (name, parameter), shard in zip(self.named, self._shards, strict=True):
            if shard.numel():
                parts = {
                    part: local_shard(state[f"{part}.{name}"])
                    for part in self._zeros(shard, parameter)
                }
                self._set_state(shard, parts, updates[name])

    def existing(self) -> Iterator[Tensor]:
        for state in self._adamw.state.values():
            for key in MOMENTS:
                yield from (state[key].codes, state[key].scale)
