"""Ten samples on four ranks: padded to twelve for the call, ten are returned.

Run: python examples/controller/padding.py [ray]
"""

from __future__ import annotations

import sys

import torch

from quadriga.backends import get_backend
from quadriga.errors import LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register


class Square(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def square(self, data: DataProto) -> DataProto:
        """Return the squares, and for each row the number of rows of its rank."""
        rows = torch.full((len(data),), len(data))
        return DataProto.from_dict(tensors={"y": data.batch["x"] ** 2, "rows_of_rank": rows})


def main(backend_name: str = "local") -> DataProto:
    backend = get_backend(backend_name)
    backend.start(num_cpus=4)
    pool = backend.resource_pool([4], use_gpu=False)
    group = backend.worker_group(pool, backend.class_with_args(Square))
    ten = torch.arange(10)
    try:
        group.square(DataProto.from_dict(tensors={"x": ten}))
    except LengthError as error:
        print("without padding:", error)
    result: DataProto = group.square(DataProto.from_dict(tensors={"x": ten}, auto_padding=True))
    print("with padding:   ", result.batch["y"].tolist())
    print("rows of a rank: ", result.batch["rows_of_rank"].tolist())
    group.shutdown()
    backend.shutdown()
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
