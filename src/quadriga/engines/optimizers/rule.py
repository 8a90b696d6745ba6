"""The protocol of an update rule: how gradients change some of the parameters.

A rule works on the parameter shards of this rank as plain tensors. It updates them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from quadriga.parallel.model_parallel.model_ranks import TENSOR

Named = Sequence[tuple[str, nn.Parameter]]
"""(name, parameter) pairs. A parameter is a DTensor after sharding."""


class UpdateRule(Protocol):
    """Updates the parameters that it was built with, in their order."""

    @property
    def named(self) -> Named:
        """The parameters of this rule."""
        ...

    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """Update the parameters. All ranks that share a copy of the parameters call it together.

        Args:
            gradients: of this rank's shards, in the order of `named`. None: a parameter that the
                loss does not depend on, which does not change.
            rate: the learning rate of this step.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `<kind>.<parameter>`, sharded like the parameters; zeros at first."""
        ...

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Set the state, as `tensors` returns it.

        `updates`: parameter -> the number of its updates, those without a gradient left out.
        """
        ...

    def existing(self) -> Iterator[Tensor]:
        """Yield the tensors of the state that exist on this rank: none before the first update."""
        ...


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
