"""Modes of one's own: even ranks only, the first half of the ranks, and parts balanced by length.

Run: python examples/controller/own_modes.py [ray]
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from quadriga.backends import get_backend
from quadriga.parallel.balancing import get_seqlen_balanced_partitions
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    Worker,
    register,
    register_dispatch_mode,
    register_execute_mode,
)
from quadriga.single_controller.call import GroupView


def to_even_ranks(group: GroupView, items: list[Any]) -> tuple[Any, dict[str, Any]]:
    """One item for each even rank, None for the others."""
    left = iter(items)
    return ([next(left) if rank % 2 == 0 else None for rank in range(group.world_size)],), {}


def from_even_ranks(group: GroupView, outputs: list[Any]) -> list[Any]:
    """What the even ranks answered."""
    return outputs[::2]


def balance(group: GroupView, data: DataProto) -> tuple[Any, dict[str, Any]]:
    """Equal tokens per rank instead of neighbouring rows."""
    lengths = data.batch["attention_mask"].sum(-1).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, group.world_size, equal_size=True)
    group.memo["order"] = [row for part in partitions for row in part]
    return ([data.select_idxs(part) for part in partitions],), {}


def restore(group: GroupView, outputs: list[DataProto]) -> DataProto:
    """Rows back where the caller had them."""
    joined = DataProto.concat(outputs)
    joined.reorder(torch.tensor(group.memo["order"]).argsort())
    return joined


EVEN = register_dispatch_mode("EVEN_RANKS", to_even_ranks, from_even_ranks)
BALANCED = register_dispatch_mode("BALANCED", balance, restore)
FIRST_HALF = register_execute_mode("FIRST_HALF", lambda group: range(group.world_size // 2))


class Counter(Worker):
    @register(dispatch_mode=EVEN)
    def double(self, x: int | None) -> int | None:
        """Odd ranks have nothing to do."""
        return None if x is None else 2 * x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=FIRST_HALF)
    def who(self) -> int:
        """Ranks 0 and 1 of four."""
        return self.rank

    @register(dispatch_mode=BALANCED)
    def count(self, data: DataProto) -> DataProto:
        """Tokens of each row, and of all rows of this rank."""
        tokens = data.batch["attention_mask"].sum(-1)
        return DataProto.from_dict(
            tensors={"tokens": tokens, "of_rank": torch.full_like(tokens, int(tokens.sum()))}
        )


def main(engine: str = "local") -> tuple[list[int], list[int], DataProto]:
    backend = get_backend(engine)
    backend.start(num_cpus=4)
    pool = backend.resource_pool([4], use_gpu=False)
    group = backend.worker_group(pool, backend.class_with_args(Counter))

    doubled = group.double([10, 20])
    half = group.who()
    lengths = torch.tensor([8, 7, 1, 2, 6, 3, 5, 4])
    mask = (torch.arange(8)[None, :] < lengths[:, None]).long()
    counted = group.count(DataProto.from_dict(tensors={"attention_mask": mask}))
    print("even ranks:", doubled)
    print("first half:", half)
    print("tokens of each row: ", counted.batch["tokens"].tolist())
    print("tokens of its rank: ", counted.batch["of_rank"].tolist())
    group.shutdown()
    backend.shutdown()
    return doubled, half, counted


if __name__ == "__main__":
    main(*sys.argv[1:])
