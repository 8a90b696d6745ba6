"""Update rules: how gradients change some of the parameters.

A rule works on the parameter shards of this rank as plain tensors. It updates them in place.

AdamW (arXiv 1711.05101) is elementwise, so each rank updates its own shards. The numbers are those
of whole tensors, and there is no DTensor dispatch for each operator.

AdamW with moments of 8 bits, by torchao (T. Dettmers et al., arXiv 2110.02861): a moment is stored
as a code of 8 bits for each element, and a scale of 32 bits for each block of neighbours in a row.
A step decodes the moments, updates them in float32 and encodes them again. Blocks do not cross
rows, so they are the same on any number of ranks, and so are the numbers.

Muon: the update of a hidden matrix is its momentum with all singular values near 1 (K. Jordan et
al., "Muon: An optimizer for hidden layers in neural networks", 2024), with the scale of J. Liu et
al., "Muon is Scalable for LLM Training" (arXiv 2502.16982, section 2.2):

    m ← μ m + (1 − μ) g
    u = (1 − μ) g + μ m                                   Nesterov
    w ← w − η λ w − η · 0.2 √max(A, B) · NewtonSchulz(u)  for w of shape [A, B]

An orthogonal matrix has the root mean square 1 / √max(A, B), so the update has 0.2, which is about
that of AdamW. Learning rate and weight decay of AdamW therefore hold for Muon too. Each rank makes
some of the matrices orthogonal: every row is sent to the rank that computes its matrix, and sent
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from quadriga.config.schema import OptimConfig
from quadriga.parallel.model_ranks import TENSOR

Named = Sequence[tuple[str, nn.Parameter]]
"""(name, parameter) pairs. A parameter is a DTensor after sharding."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's parameter shard of a DTensor (same storage), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_of_tensor_ranks(tensor: Tensor) -> bool:
    """Return whether no lower rank of tensor parallelism has the same elements of a DTensor."""
    if not isinstance(tensor, DTensor):
        return True
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    if TENSOR not in names or not tensor.placements[names.index(TENSOR)].is_replicate():
        return True
    return mesh.get_local_rank(TENSOR) == 0


def sharded_like(shard: Tensor, parameter: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return `shard` as a DTensor with the mesh and placements of `parameter`, if it is one.

    `shape`: of the full tensor, whose rows are those of the parameter. None: that of the parameter.
    """
    if not isinstance(parameter, DTensor):
        return shard
    size = parameter.shape if shape is None else torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    # `DTensor.from_local` would copy a shard in host memory to the device of the mesh.
    meta = TensorMeta(size, stride, shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # of torch


MomentName = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[MomentName, ...] = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Torch's AdamW, fused where the device has the kernel.

    A rule updates the parameters that it was built with, `named`, in their order.
    """

    def __init__(self, named: Named, config: OptimConfig) -> None:
        self.named = named
        self._shards = [nn.Parameter(local_shard(p.detach())) for _, p in named]
        self._adamw = self._optimizer(
            lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )

    def _optimizer(self, **settings: Any) -> torch.optim.Optimizer:
        fused = all(s.device.type in ("cpu", "cuda") for s in self._shards)
        return torch.optim.AdamW(self._shards, fused=fused, **settings)

    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """Update the parameters. All ranks that share a copy of the parameters call it together.

        Args:
            gradients: of this rank's shards, in the order of `named`. None: a parameter that the
                loss does not depend on, which does not change.
            rate: the learning rate of this step.
        """
        for shard, (_, parameter), gradient in zip(
            self._shards, self.named, gradients, strict=True
        ):
            # FSDP may replace a parameter's storage before its first forward pass, so the
            # optimizer's view of it is renewed before every step.
            shard.data = local_shard(parameter.detach())
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        self._step(rate)
        for shard in self._shards:
            shard.grad = None

    def _step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `<kind>.<parameter>`, sharded like the parameters; zeros at first."""
        state: dict[str, Tensor] = {}
        for (name, parameter), shard in zip(self.named, self._shards, strict=True):
            # `get`: torch's dict would make an entry without moments for a missing shard.
            moments = self._adamw.state.get(shard)
            for key in MOMENTS:
                moment = moments[key] if moments else torch.zeros_like(shard.detach())
                state[f"{key}.{name}"] = sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Set the state, as `tensors` returns it.

        `updates`: parameter -> the number of its updates, those without a gradient left out.
        """
        # AdamW's own step count of a parameter drives its bias correction. The fused kernel needs
        # that count on the device of the shard, the other one on the CPU.
        on_device = bool(self._adamw.defaults["fused"])
        for (name, _), shard in zip(self.named, self._shards, strict=True):
            device = shard.device if on_device else "cpu"
            self._adamw.state[shard] = {
                "step": torch.tensor(float(updates[name]), device=device),
                **{key: local_shard(state[f"{key}.{name}"]) for key in MOMENTS},
            }

    def existing(self) -> Iterator[Tensor]:
        """Yield the tensors of the state that exist on this rank: none before the first update."""
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in MOMENTS)


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


class AdamW8bit(AdamW):
    """Torchao's AdamW over parameter shards that all have a `block_size`."""

    def _optimizer(self, **settings: Any) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit as TorchaoAdamW

        optimizer: torch.optim.Optimizer = TorchaoAdamW(self._shards, **settings)
        return optimizer

    def _step(self, rate: float) -> None:
        for shard, (_, parameter) in zip(self._shards, self.named, strict=True):
            # A rank beyond the last row has an empty shard, which torchao cannot cut into blocks.
            if not shard.numel():
                shard.grad = None
            elif shard.grad is not None and not self._adamw.state[shard]:
                self._set_state(shard, self._zeros(shard, parameter), steps=0)
        for group in self._adamw.param_groups:
            group["lr"].fill_(rate)  # torchao requires a tensor
        # Torchao compiles the step of each shape. On a CPU that needs a C++ compiler at run time
        # and takes longer than the steps of a short run.
        on_cpu = all(shard.device.type == "cpu" for shard in self._shards)
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            self._adamw.step()

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
        state = self._adamw.state.get(shard) or {}
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


MOMENTUM = "momentum"
DEFAULT_MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2


class Muon:
    """Muon over parameter shards of hidden matrices; the methods are those of `AdamW`.

    A matrix [A, B] is sharded by rows, and Newton-Schulz needs all of them (`whole_matrices`). The
    parameter [E, A, B] of E experts is E matrices. Its shards hold whole experts, so each rank
    computes its own.

    Args:
        shard_group: the ranks that together hold one copy of the parameters.
        device: where Newton-Schulz runs: in bfloat16 on an accelerator, in the dtype of the
            parameters on a CPU.
    """

    def __init__(
        self,
        named: Named,
        config: OptimConfig,
        *,
        shard_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.named = named
        self._decay = config.weight_decay
        self._momentum = DEFAULT_MOMENTUM if config.momentum is None else config.momentum
        self._group = shard_group
        self._device = device
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        # FSDP reduces the gradients of a unit together, so a gradient exists on all ranks or none.
        changed = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for chosen in self._rounds(changed):
            directions = [self._direction(i, gradients[i]) for i in chosen]
            for index, direction in zip(chosen, self._orthogonal(chosen, directions), strict=True):
                _, parameter = self.named[index]
                shard = local_shard(parameter.detach())
                scale = RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:]))
                shard.mul_(1 - rate * self._decay)
                shard.add_(direction.to(shard.device, shard.dtype), alpha=-rate * scale)

    def _rounds(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Yield parameters that are updated at once: as many matrices as ranks, or the experts of
        one layer. Matrices of about the same size go together, so that the ranks end together."""
        ranks = 1 if self._group is None else dist.get_world_size(self._group)
        matrices = [i for i in indices if self.named[i][1].dim() == 2]
        matrices.sort(key=lambda i: -self.named[i][1].numel())
        yield from (matrices[i : i + ranks] for i in range(0, len(matrices), ranks))
        yield from ([i] for i in indices if self.named[i][1].dim() == 3)

    def _direction(self, index: int, gradient: Tensor | None) -> Tensor:
        """Update the momentum, and return the step before it is made orthogonal."""
        assert gradient is not None
        name, parameter = self.named[index]
        gradient = gradient.to(parameter.dtype)
        moment = self._moments.get(name)
        if moment is None:
            moment = self._moments[name] = torch.zeros_like(gradient)
        moment.lerp_(gradient, 1 - self._momentum)
        dtype = gradient.dtype if self._device.type == "cpu" else torch.bfloat16
        return gradient.lerp(moment, self._momentum).to(self._device, dtype)

    def _orthogonal(self, chosen: Sequence[int], directions: Sequence[Tensor]) -> list[Tensor]:
        if directions[0].dim() == 3:
            return [newton_schulz(direction) for direction in directions]
        totals = [self.named[index][1].shape[0] for index in chosen]
        return apply_to_whole_matrices(newton_schulz, directions, totals, self._group)

    def tensors(self) -> dict[str, Tensor]:
        state = {}
        for name, parameter in self.named:
            moment = self._moments.get(name)
            if moment is None:
                moment = torch.zeros_like(local_shard(parameter.detach()))
            state[f"{MOMENTUM}.{name}"] = sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        for name, _ in self.named:
            self._moments[name] = local_shard(state[f"{MOMENTUM}.{name}"])

    def existing(self) -> Iterator[Tensor]:
        yield from self._moments.values()


UpdateRule = AdamW | Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial in K. Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024). Its slope at 0 is as large as possible, so small singular values grow fast."""
STEPS = 5
EPSILON = 1e-7


def newton_schulz(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """Return each matrix [..., A, B] with its singular values moved to about 1.

    For G = U S Vᵀ the result is U p(p(… p(S / ‖G‖))) Vᵀ with p(s) = a s + b s³ + c s⁵. After five
    steps the singular values are between 0.7 and 1.2, except those that were almost 0. The dtype
    does not change; bfloat16 is precise enough (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    # The products are with the smaller of the two Gram matrices.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # ‖·‖ is the Frobenius norm: it is at least the largest singular value.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div(norm.clamp(min=EPSILON))
    for _ in range(steps):
        gram = x @ x.mT
        x = x.mul(a) + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


# Two ranks, matrices P (3 rows) and Q (2 rows), the first rank has the larger half of the rows:
#
#              rank 0               rank 1
#   before     P0 P1, Q0            P2, Q1
#   exchange   P0 P1 | P2           Q0 | Q1           rank 0 has the whole P, rank 1 the whole Q
#   compute    f(P)                 f(Q)
#   exchange   f(P)0 f(P)1, f(Q)0   f(P)2, f(Q)1      each rank has its rows of both again


def apply_to_whole_matrices(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[Tensor],
    totals: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return this rank's rows of `function(matrix)` for each matrix, which has the same shape.

    `shards` are this rank's rows of matrices with `totals` rows. They are divided as FSDP divides
    them: the same number for each rank, rounded up, and fewer or none for the last ranks.

    Rank i computes matrix i, so there are at most as many matrices as ranks. All ranks of `group`
    call it with the same matrices in the same order. None: the shards are the matrices.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [function(rows) for rows in shards]
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    assert len(shards) <= ranks
    sent = [rows.numel() for rows in shards] + [0] * (ranks - len(shards))
    received = [0] * ranks
    if own < len(shards):
        total, columns = totals[own], shards[own].shape[1]
        step = -(-total // ranks)
        received = [max(0, min(step, total - rank * step)) * columns for rank in range(ranks)]
    flat = torch.cat([rows.flatten() for rows in shards])
    whole = flat.new_empty(sum(received))
    dist.all_to_all_single(whole, flat, received, sent, group=group)
    if own < len(shards):
        # The rows of the ranks follow each other, so they are the matrix.
        whole = function(whole.view(totals[own], -1)).contiguous().flatten()
    dist.all_to_all_single(flat, whole, sent, received, group=group)
    parts = torch.split(flat, [rows.numel() for rows in shards])
    return [part.view_as(rows) for part, rows in zip(parts, shards, strict=True)]
