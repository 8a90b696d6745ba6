"""AdamW (arXiv 1711.05101) over parameter shards.

AdamW is elementwise, so each rank updates its own parameter shards as plain tensors. The numbers
are the same, and there is no DTensor dispatch for each operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers.rule import Named, local_shard, sharded_like

MomentName = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[MomentName, ...] = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Torch's AdamW, fused where the device has the kernel. See `UpdateRule`."""

    def __init__(self, named: Named, config: OptimConfig) -> None:
        self.named = named
        self._shards = [nn.Parameter(local_shard(p.detach())) for _, p in named]
        self._adamw = torch.optim.AdamW(
            self._shards,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=all(s.device.type in ("cpu", "cuda") for s in self._shards),
        )

    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        for shard, (_, parameter), gradient in zip(
            self._shards, self.named, gradients, strict=True
        ):
            # FSDP may replace a parameter's storage before its first forward pass, so the
            # optimizer's view of it is renewed before every step.
            shard.data = local_shard(parameter.detach())
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for shard in self._shards:
            shard.grad = None

    def tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for (name, parameter), shard in zip(self.named, self._shards, strict=True):
            # `get`: torch's dict would make an entry without moments for a missing shard.
            moments = self._adamw.state.get(shard)
            for key in MOMENTS:
                moment = moments[key] if moments else torch.zeros_like(shard.detach())
                state[f"{key}.{name}"] = sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        # AdamW's own step count of a parameter drives its bias correction. The fused kernel needs
        # that count on the device of the shard, the other one on the CPU.
        on_device = bool(self._adamw.defaults["fused"])
        for (name, _), shard in zip(self.named, self._shards, strict=True):
            moments = {key: local_shard(state[f"{key}.{name}"]) for key in MOMENTS}
            self._adamw.state[shard] = {
                "step": torch.tensor(
                    float(updates[name]), device=shard.device if on_device else "cpu"
                ),
                **moments,
            }

    def existing(self) -> Iterator[Tensor]:
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in MOMENTS)
