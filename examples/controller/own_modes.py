"""User-defined modes: even ranks only, the first half of the ranks, and equal tokens per rank.

The first one is written inline, as a dict of two functions; the others are registered by a name.

Run: python examples/controller/own_modes.py [ray]
"""

from __future__ import annotations

import sys

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
from quadriga.single_controller.dispatch import GroupView, Split


def to_even_ranks(group: GroupView, items: list[int]) -> Split:
    """Send one item to each even rank and None to the others."""
    left = iter(items)
    return ([next(left) if rank % 2 == 0 else None for rank in range(group.world_size)],), {}


def from_even_ranks(group: GroupView, outputs: list[int | None]) -> list[int | None]:
    """Return the results of the even ranks."""
    return outputs[::2]


def balance(group: GroupView, data: DataProto) -> Split:
    """Send about the same number of tokens to each rank, and store the order of the rows."""
    lengths = data.batch["attention_mask"].sum(-1).tolist()
    partitions = get_seqlen_balanced_partitions(lengths, group.world_size, equal_size=True)
    group.memo["order"] = [row for part in partitions for row in part]
    return ([data.select_idxs(part) for part in partitions],), {}


def restore(group: GroupView, outputs: list[DataProto]) -> DataProto:
    """Concatenate the results and restore the order of the rows."""
    # order [2, 0, 1]: the joined rows are rows 2, 0 and 1 of the caller. Its argsort [1, 2, 0] is
    # the position of the caller's rows 0, 1 and 2 among the joined rows.
    joined = DataProto.concat(outputs)
    joined.reorder(torch.tensor(group.memo["order"]).argsort())
    return joined


BALANCED = register_dispatch_mode("BALANCED", balance, restore)
FIRST_HALF = register_execute_mode("FIRST_HALF", lambda group: range(group.world_size // 2))


class Counter(Worker):
    @register(dispatch_mode={"dispatch_fn": to_even_ranks, "collect_fn": from_even_ranks})
    def double(self, x: int | None) -> int | None:
        """Double x. Odd ranks receive None."""
        return None if x is None else 2 * x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=FIRST_HALF)
    def who(self) -> int:
        """Return the rank. Runs on ranks 0 and 1 of four."""
        return self.rank

    @register(dispatch_mode=BALANCED)
    def count(self, data: DataProto) -> DataProto:
        """Return the tokens of each row, and of all rows of its rank."""
        tokens = data.batch["attention_mask"].sum(-1)
        return DataProto.from_dict(
            tensors={"tokens": tokens, "of_rank": torch.full_like(tokens, int(tokens.sum()))}
        )


def main(backend_name: str = "local") -> tuple[list[int], list[int], DataProto]:
    backend = get_backend(backend_name)
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
