"""One optimizer step over the parameter shards of a rank: clip, update, count.

`ShardedOptimizer` clips, skips steps that are not finite, follows the schedule, and saves its
state. The learning rate is a pure function of the step, so a resumed run needs only the step. Which
update rule has which parameter, and the bytes of its state for the memory plan, follow from the
shapes.

An update rule works on the parameter shards of this rank as plain tensors. It updates them in
place.

AdamW (arXiv 1711.05101) is elementwise, so each rank updates its own shards. The numbers are those
of whole tensors, and there is no DTensor dispatch for each operator.

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
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from quadriga.config.schema import LrSchedulerName, OptimConfig, OptimizerName
from quadriga.errors import CheckpointError, ConfigError, NonFiniteError
from quadriga.observability.jsonl import JsonObject
from quadriga.parallel.model_ranks import TENSOR

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def sharded_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return `shard` as a DTensor with the mesh and placements of `parameter`, if it is one."""
    if not isinstance(parameter, DTensor):
        return shard
    stride = torch.empty(parameter.shape, device="meta").stride()
    # `DTensor.from_local` would copy a shard in host memory to the device of the mesh.
    meta = TensorMeta(parameter.shape, stride, shard.dtype)
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
        self._adamw = torch.optim.AdamW(
            self._shards,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=all(s.device.type in ("cpu", "cuda") for s in self._shards),
        )

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
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for shard in self._shards:
            shard.grad = None

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
        self._ranks = 1 if shard_group is None else dist.get_world_size(shard_group)
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
        ranks = self._ranks
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

    # Two ranks, matrices P (3 rows) and Q (2 rows), the first rank has the larger half of the rows:
    #
    #              rank 0               rank 1
    #   before     P0 P1, Q0            P2, Q1
    #   exchange   P0 P1 | P2           Q0 | Q1           rank 0 has the whole P, rank 1 the whole Q
    #   compute    f(P)                 f(Q)
    #   exchange   f(P)0 f(P)1, f(Q)0   f(P)2, f(Q)1      each rank has its rows of both again

    def _orthogonal(self, chosen: Sequence[int], shards: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of `newton_schulz(matrix)` for each of the `chosen` parameters.

        `shards` are this rank's rows, divided as FSDP divides them: the same number for each rank,
        rounded up, and fewer or none for the last ranks. Rank i computes matrix i, so there are at
        most as many matrices as ranks. All ranks of the group call it for the same parameters.
        """
        ranks = self._ranks
        if ranks == 1 or shards[0].dim() == 3:
            return [newton_schulz(rows) for rows in shards]
        own = dist.get_rank(self._group)
        assert len(shards) <= ranks
        sent = [rows.numel() for rows in shards] + [0] * (ranks - len(shards))
        received = [0] * ranks
        if own < len(shards):
            total, columns = self.named[chosen[own]][1].shape[0], shards[own].shape[1]
            step = -(-total // ranks)
            received = [max(0, min(step, total - rank * step)) * columns for rank in range(ranks)]
        flat = torch.cat([rows.flatten() for rows in shards])
        whole = flat.new_empty(sum(received))
        dist.all_to_all_single(whole, flat, received, sent, group=self._group)
        if own < len(shards):
            # The rows of the ranks follow each other, so they are the matrix.
            whole = newton_schulz(whole.view(total, columns)).contiguous().flatten()
        dist.all_to_all_single(flat, whole, sent, received, group=self._group)
        parts = torch.split(flat, [rows.numel() for rows in shards])
        return [part.view_as(rows) for part, rows in zip(parts, shards, strict=True)]

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


def newton_schulz(matrices: Tensor) -> Tensor:
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
    for _ in range(STEPS):
        gram = x @ x.mT
        x = x.mul(a) + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


OPTIMIZER = "optimizer"
"""Key of the optimizer's name in a checkpoint."""
SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Key of the steps that were skipped directly before a checkpoint."""
LR_SCALE = "lr_scale"
"""Key of the factor of the learning rate that a callback has set."""
UPDATES = "updates"
"""Key of parameter -> updates, for those that had no gradient in some of the steps."""


class ShardedOptimizer:
    """Update rules with clipping by the global gradient norm and a learning rate schedule.

    If the gradient norm is not finite, the step is skipped: weights and moments do not change,
    `skipped` is incremented, and the schedule continues. More than `max_skipped_steps` of them in a
    row are an error. The norm is the same on all ranks, so all ranks skip, or fail, together.

    Args:
        rules: each updates some of the parameters; no two update the same.
        total_steps: optimizer steps of the run, for the schedule.
        shard_group: the ranks that together hold one copy of the parameters; ranks of tensor
            parallelism can hold equal parts.
        device: the device of the collectives.
    """

    def __init__(
        self,
        rules: Sequence[UpdateRule],
        config: OptimConfig,
        total_steps: int | None,
        *,
        shard_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.rules = rules
        self.step_count = 0
        self.skipped = 0
        self.lr_scale = 1.0  # of the learning rate of the schedule; a callback sets it
        self._skipped_in_a_row = 0
        # A parameter without a gradient in a step is not updated, so each has a count of its own.
        self._updates = {name: 0 for rule in rules for name, _ in rule.named}
        self._shard_group = shard_group
        self._device = device

    def step(self) -> tuple[float, float]:
        """Clip the gradients, update the weights, and clear the gradients.

        Returns:
            (gradient norm before clipping, learning rate).

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        rate = self.lr_scale * learning_rate(self.step_count, self.config, self.total_steps)
        gradients = [
            [None if p.grad is None else local_shard(p.grad) for _, p in rule.named]
            for rule in self.rules
        ]
        existing = [g for of_rule in gradients for g in of_rule if g is not None]
        norm = self._global_norm(list(self._counted(gradients)))
        if norm.isfinite():
            limit = self.config.grad_clip
            if limit > 0 and float(norm) > limit:
                torch._foreach_mul_(existing, float(limit / (norm + 1e-6)))
            for rule, of_rule in zip(self.rules, gradients, strict=True):
                rule.update(of_rule, rate)
                for (name, _), gradient in zip(rule.named, of_rule, strict=True):
                    self._updates[name] += gradient is not None
            self._skipped_in_a_row = 0
        else:
            self.skipped += 1
            self._skipped_in_a_row += 1
        self.step_count += 1
        for rule in self.rules:
            for _, parameter in rule.named:
                parameter.grad = None
        self._check_skipped(float(norm))
        return float(norm), rate

    def _check_skipped(self, norm: float) -> None:
        limit = self.config.max_skipped_steps
        if limit is not None and self._skipped_in_a_row > limit:
            raise NonFiniteError(
                f"the norm of the gradient was not finite in {self._skipped_in_a_row} optimizer "
                f"steps in a row (the last one: {norm}), and optim.max_skipped_steps={limit}; the "
                "weights have not changed since. Lower optim.lr, check the rewards and the loss, "
                "or set max_skipped_steps to null for no bound",
                step=self.step_count,
            )

    def _counted(self, gradients: Sequence[Sequence[Tensor | None]]) -> Iterator[Tensor]:
        """Yield the gradients that this rank adds to the norm.

        Ranks of tensor parallelism that have the same gradient count it once.
        """
        for rule, of_rule in zip(self.rules, gradients, strict=True):
            for (_, parameter), gradient in zip(rule.named, of_rule, strict=True):
                if gradient is not None and is_first_of_tensor_ranks(parameter):
                    yield gradient

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        # Three ranks hold the shards of one gradient, with the local norms 1, 2 and 2:
        #
        #               rank 0   rank 1   rank 2
        #   norm²          1        4        4      all-reduce (sum): 9, so the norm is 3 everywhere
        #   grad_clip 1.5: every rank multiplies its shard by 1.5 / 3 = 0.5
        #
        # Norms cannot be summed (1 + 2 + 2 = 5), and clipping by the local norm would scale ranks
        # 1 and 2 only and turn the gradient. With hybrid sharding every replica holds the reduced
        # gradient, so only the ranks of one replica (`shard_group`) take part. The sum is in
        # float64, so that its rounding does not depend on how the gradient is sharded.
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            wide = torch.promote_types(gradients[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide))
            # Gradients can be in host memory, but collectives are of the device.
            square = norms.double().square().sum().to(self._device)
        if self._shard_group is not None and dist.get_world_size(self._shard_group) > 1:
            dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `exp_avg.<parameter>` and so on, sharded like the parameters.

        Before the first step, the moments are zeros.
        """
        return {name: tensor for rule in self.rules for name, tensor in rule.tensors().items()}

    def scalars(self) -> dict[str, object]:
        """Return what a checkpoint holds beside the tensors: counts, and which optimizer it is."""
        made = self.step_count - self.skipped
        return {
            "step": self.step_count,
            "skipped": self.skipped,
            SKIPPED_IN_A_ROW: self._skipped_in_a_row,
            UPDATES: {name: n for name, n in self._updates.items() if n != made},
            OPTIMIZER: self.config.name,
            LR_SCALE: self.lr_scale,
        }

    def check_scalars(self, scalars: Mapping[str, object], folder: str | Path) -> None:
        """Check that the state in a checkpoint is of this optimizer.

        Raises:
            CheckpointError: it is of another one.
        """
        saved = scalars.get(OPTIMIZER, "adamw")  # before there was a choice
        if saved != self.config.name:
            raise CheckpointError(
                f"the optimizer state in {folder} is of optim.name={saved}, but the settings have "
                f"optim.name={self.config.name}; set optim.name={saved}, or start a new run from "
                "the exported weights",
                path=str(folder),
            )

    def load(self, state: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Set the state, as `tensors` returns it, and the counts, as `scalars` returns them.

        Values of `scalars` that older checkpoints have not are those of a run without skipped
        steps, in which each parameter was updated in every step.
        """
        self.step_count, self.skipped = scalars["step"], scalars["skipped"]
        self._skipped_in_a_row = scalars.get(SKIPPED_IN_A_ROW, 0)
        self.lr_scale = scalars.get(LR_SCALE, 1.0)
        made, updates = self.step_count - self.skipped, scalars.get(UPDATES, {})
        self._updates = {name: updates.get(name, made) for name in self._updates}
        for rule in self.rules:
            rule.load_tensors(state, self._updates)

    def existing_moments(self) -> Iterator[Tensor]:
        """Yield the tensors of the state that exist on this rank: none before the first step."""
        for rule in self.rules:
            yield from rule.existing()


SCHEDULES: dict[LrSchedulerName, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Name -> function from progress in [0, 1] after the warmup to a factor of the peak rate."""


def learning_rate(step: int, optim: OptimConfig, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    During warmup the rate rises linearly. Its first value is above 0, and it reaches the peak
    `optim.lr` at step `lr_warmup_steps`, or after `lr_warmup_ratio` of all steps. Then the schedule
    falls to `min_lr_ratio` of the peak, which it reaches at the last step.
    """
    # lr 1, two warmup steps, six steps in total, min_lr_ratio 0:
    #
    #   step        0     1     2     3     4     5     6 …
    #   warmup     1/3   2/3
    #   progress                0    1/3   2/3    1     1      (step − 2) / (6 − 1 − 2)
    #   linear     .33   .67    1    .67   .33    0     0
    #   cosine     .33   .67    1    .75   .25    0     0
    warmup = optim.lr_warmup_steps or int(optim.lr_warmup_ratio * (total_steps or 0))
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    if optim.lr_scheduler == "constant" or total_steps is None:
        return optim.lr
    progress = (step - warmup) / max(total_steps - 1 - warmup, 1)
    factor = SCHEDULES[optim.lr_scheduler](min(progress, 1.0))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * factor)


def check_schedule(optim: OptimConfig, total_steps: int | None) -> None:
    """Check that the schedule has what it needs.

    Raises:
        ConfigError: the schedule needs the number of steps, and it is not known.
    """
    if (optim.lr_scheduler != "constant" or optim.lr_warmup_ratio) and total_steps is None:
        raise ConfigError(
            f"lr_scheduler {optim.lr_scheduler!r} and lr_warmup_ratio={optim.lr_warmup_ratio:g} "
            "need the number of optimizer steps; set optim.total_steps"
        )


_FITTING: dict[OptimizerName, str] = {
    "adamw": "all of them",
    "muon": "the matrices of hidden layers",
}
"""Optimizer → the parameters that it is for."""
_NOT_HIDDEN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def rule_of_each(model: PreTrainedModel, name: OptimizerName) -> dict[str, OptimizerName]:
    """Return parameter → the rule that updates it, for each trained parameter of `model`.

    With `muon`, the parameters that it is not made for have `adamw`.
    """
    hidden = _hidden_matrices(model) if name == "muon" else set()
    found: dict[str, OptimizerName] = {}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[key] = name if id(parameter) in hidden else "adamw"
    return found


def check_fits_parameters(model: PreTrainedModel, name: OptimizerName, key: str = "optim") -> None:
    """Check that the optimizer fits a trained parameter of `model`. `key`: its section.

    Raises:
        ConfigError: it fits none.
    """
    names = rule_of_each(model, name)
    if name not in names.values():
        model_class = type(model).__name__.removeprefix("FSDP")  # put before it by `fully_shard`
        raise ConfigError(
            f"{key}.name={name} fits none of the {len(names)} trained parameters of "
            f"{model_class} ({_FITTING[name]}); set {key}.name=adamw",
            key=f"{key}.name",
        )


def _hidden_matrices(model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights of hidden linear layers, experts included.

    Embeddings, output layers, norms, convolutions and biases are not among them.
    """
    from quadriga.models.loading import VALUE_HEAD

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not annotated there
    outputs = (head, getattr(model, VALUE_HEAD, None))
    hidden: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        unsuitable = isinstance(module, _NOT_HIDDEN) or any(module is o for o in outputs)
        for name, parameter in module.named_parameters(recurse=False):
            # `weight` [A, B] of a linear layer, or [E, A, B] of E experts under any name. Other
            # parameters with two dimensions are biases of experts, states of a recurrence, …
            matrix = (parameter.dim() == 2 and name == "weight") or (
                parameter.dim() == 3 and "bias" not in name
            )
            suitable = matrix and not unsuitable and min(parameter.shape[-2:]) > 1
            (hidden if suitable else others).add(id(parameter))
    return hidden - others  # a tied output layer is an embedding


def build_optimizer(
    model: PreTrainedModel,
    config: OptimConfig,
    total_steps: int | None,
    *,
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
) -> ShardedOptimizer:
    """Build the optimizer that `config.name` names, for the trained parameters of `model`.

    Raises:
        ConfigError: the optimizer fits no parameter.
    """
    check_fits_parameters(model, config.name)
    names = rule_of_each(model, config.name)
    trained = [(name, p) for name, p in model.named_parameters() if name in names]
    rules: list[UpdateRule] = []
    for rule in dict.fromkeys(names.values()):
        named = [(name, p) for name, p in trained if names[name] == rule]
        if rule == "muon":
            rules.append(Muon(named, config, shard_group=shard_group, device=device))
        else:
            rules.append(AdamW(named, config))
    return ShardedOptimizer(rules, config, total_steps, shard_group=shard_group, device=device)


def state_bytes(rule: OptimizerName, shape: Sequence[int], rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the state of `rows` rows of a parameter.

    Args:
        shape: of the whole parameter.
        dtype: of the parameter.
    """
    # A matrix [1024, 4096] in float32: AdamW has two moments of 16 MiB, Muon one.
    moments = 1 if rule == "muon" else len(MOMENTS)
    return moments * rows * math.prod(shape[1:]) * dtype.itemsize
