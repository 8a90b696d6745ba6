"""A data-parallel forward pass on two ranks: split by hand, then split by the dispatch mode.

Run: python examples/controller/data_parallel.py [ray]
"""

from __future__ import annotations

import sys

import torch

from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register


class Linear(Worker):
    """A linear layer with the same weights on every rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(width, 1)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def forward_part(self, data: DataProto) -> DataProto:
        """Run the layer on one part. The caller passes one part per rank."""
        return self._forward(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def forward(self, data: DataProto) -> DataProto:
        """Run the layer on a batch, which the dispatch mode splits and joins."""
        return self._forward(data)

    def _forward(self, data: DataProto) -> DataProto:
        with torch.no_grad():
            return DataProto.from_dict(tensors={"y": self.layer(data.batch["x"]).squeeze(-1)})


def main(backend_name: str = "local") -> tuple[torch.Tensor, torch.Tensor]:
    backend = get_backend(backend_name)
    backend.start(num_cpus=2)
    pool = backend.resource_pool([2], use_gpu=False)
    group = backend.worker_group(pool, backend.class_with_args(Linear, 3))
    batch = DataProto.from_dict(tensors={"x": torch.arange(12.0).reshape(4, 3)})

    parts = batch.chunk(2)
    by_hand = DataProto.concat(group.forward_part(parts)).batch["y"]
    as_method = group.forward(batch).batch["y"]
    print("split by hand:", by_hand.tolist())
    print("split by mode:", as_method.tolist())
    group.shutdown()
    backend.shutdown()
    return by_hand, as_method


if __name__ == "__main__":
    main(*sys.argv[1:])
