"""`ResourcePool`: how many processes go on which node."""

from __future__ import annotations

from collections.abc import Sequence

from quadriga.errors import PlacementError


class ResourcePool:
    """`process_on_nodes=[8, 8]`: two nodes with eight processes each.

    `max_colocate_count`: how many worker groups may share one place (a GPU, or a CPU bundle).
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        counts = list(process_on_nodes or [])
        if any(not isinstance(n, int) or n < 1 for n in counts):
            raise PlacementError(
                f"process_on_nodes must hold counts of 1 or more, got {counts}.", wanted=counts
            )
        if max_colocate_count < 1:
            raise PlacementError(
                f"max_colocate_count must be 1 or more, got {max_colocate_count}.",
                wanted=max_colocate_count,
            )
        self._store = counts
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node with that many processes."""
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """Processes on each node."""
        return self._store

    def __call__(self) -> list[int]:
        return self._store

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node has: [2, 3] -> [2, 2, 3, 3, 3]."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node: [2, 3] -> [0, 1, 0, 1, 2]."""
        return [local for count in self._store for local in range(count)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store})"
