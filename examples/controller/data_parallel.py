"""A data-parallel forward over two workers: by hand, then as a group's method.

Run: python examples/controller/data_parallel.py [ray]
"""

from __future__ import annotations

import sys

import torch

from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register


class Linear(Worker):
    """The same layer on every rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(width, 1)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def forward_part(self, data: DataProto) -> DataProto:
        """One part per rank, split by the caller."""
        return self._forward(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def forward(self, data: DataProto) -> DataProto:
        """The whole batch, split and joined by the mode."""
        return self._forward(data)

    def _forward(self, data: DataProto) -> DataProto:
        with torch.no_grad():
            return DataProto.from_dict(tensors={"y": self.layer(data.batch["x"]).squeeze(-1)})


def main(engine: str = "local") -> tuple[torch.Tensor, torch.Tensor]:
    backend = get_backend(engine)
    backend.start(num_cpus=2)
    pool = backend.resource_pool([2], use_gpu=False)
    group = backend.worker_group(pool, backend.class_with_args(Linear, 3))
    batch = DataProto.from_dict(tensors={"x": torch.arange(12.0).reshape(4, 3)})

    parts = batch.chunk(2)
    by_hand = DataProto.concat(group.forward_part(parts)).batch["y"]
    as_method = group.forward(batch).batch["y"]
    print("by hand: ", by_hand.tolist())
    print("as group:", as_method.tolist())
    group.shutdown()
    backend.shutdown()
    return by_hand, as_method


if __name__ == "__main__":
    main(*sys.argv[1:])
