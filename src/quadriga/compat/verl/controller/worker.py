"""verl's `Worker`, the place of a rank in a tp × dp × pp × cp layout, addresses and ports."""

from __future__ import annotations

import os
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from quadriga import single_controller
from quadriga.backends.ray.cluster import node_address, this_node
from quadriga.backends.ray.start import join_register_center
from quadriga.compat.verl.functional import get_visible_devices_keyword
from quadriga.single_controller import Dispatch, RankLayout, register
from quadriga.single_controller.environment import RankEnvironment, ReservedPort


class WorkerHelper:
    """Address of this node, and a port that is free on it."""

    @staticmethod
    def _get_node_ip() -> str:
        return node_address()

    @staticmethod
    def _get_free_port() -> int:
        reserved = ReservedPort.choose()
        reserved.release()
        return reserved.port

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return (address of this node, free port)."""
        return self._get_node_ip(), str(self._get_free_port())

    get_availale_master_addr_port = get_available_master_addr_port  # verl's spelling


def get_random_string(length: int) -> str:
    """Return a random string of letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=length))


def get_master_addr_port(master_port_range: Sequence[int] | None = None) -> tuple[str, str]:
    """Return (address of this node, free port).

    `master_port_range`: (first, last + 1), the ports to choose from; None: any port. Raises
    `PlacementError` if none of them is free.
    """
    reserved = ReservedPort.choose(master_port_range)
    reserved.release()
    return node_address(), str(reserved.port)


DISABLED = "DISABLE_WORKER_INIT"
"""With the value 1, a worker that is started by hand does not look for the other ranks."""


@dataclass
class DistRankInfo:
    """Coordinates of a rank in a tp × dp × pp × cp layout."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Sizes of a tp × dp × pp × cp layout."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


@dataclass
class WorkerMeta:
    """The variables of `Worker.env_keys`, by their names in lower case with an underscore."""

    store: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        """Return the variables, None for one that is not known."""
        return {key: self.store.get(key) for key in (f"_{k.lower()}" for k in Worker.env_keys())}


class Worker(single_controller.Worker, WorkerHelper):
    """A worker in verl's spelling.

    A worker group tells its ranks where rank 0 is. A worker that Ray alone has started
    (`ray.remote(MyWorker).remote()`, with RANK, WORLD_SIZE, WG_PREFIX and WG_BACKEND=ray in its
    environment) finds out through an actor: rank 0 starts the register center of the prefix, and
    the other ranks ask it.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        env = os.environ
        by_hand = env.get("WG_BACKEND") == "ray" and "RANK" in env and "WG_PREFIX" in env
        known = env.get("MASTER_ADDR") and env.get("MASTER_PORT")
        if by_hand and not known and env.get(DISABLED, "0") != "1":
            place = RankEnvironment.read()
            self = super().__new__(cls)
            self._configure_before_init(f"{place.group_prefix}_register_center", place.rank)
            return self
        return super().__new__(cls)

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that `_configure_with_store` sets."""
        return [*super().env_keys()[:-1], get_visible_devices_keyword()]

    def _configure_before_init(self, register_center_name: str, rank: int) -> None:
        """Find the address and the port of rank 0, and set MASTER_ADDR and MASTER_PORT."""
        joined = join_register_center(register_center_name, rank, self.world_size)
        self.register_center = joined
        os.environ.update(MASTER_ADDR=joined.master_address, MASTER_PORT=joined.master_port)
        self._environment = RankEnvironment.read()

    def get_node_id(self) -> str:
        """Return Ray's id of the node of this rank."""
        return this_node()


class MegatronWorker(Worker):
    """A worker with a rank layout, for the MEGATRON dispatch modes.

    The layout is that of Megatron-core's groups, once the worker has made them
    (`parallel_state.initialize_model_parallel`). A worker without Megatron-core calls
    `register_layout`.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_rank_layout(self) -> RankLayout:
        """Return the rank layout. Raises `MeshError` if there is none."""
        if self._rank_layout is None and "megatron.core.parallel_state" in sys.modules:
            from quadriga.engines.megatron.ranks import layout_of_process

            found = layout_of_process()
            if found is not None:
                self._register_rank_layout(found)
        return super()._query_rank_layout()

    def register_layout(self, tp: int = 1, cp: int = 1, pp: int = 1) -> None:
        """Register the layout of this rank. The data-parallel size is what remains of the ranks."""
        dp = self.world_size // (tp * cp * pp)
        self._register_rank_layout(RankLayout.of_rank(self.rank, tp=tp, cp=cp, dp=dp, pp=pp))

    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return the coordinates of this rank. Raises `MeshError` if it has no layout."""
        at = self._query_rank_layout()
        return DistRankInfo(at.tp_rank, at.dp_rank, at.pp_rank, at.cp_rank)

    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of the layout. Raises `MeshError` if this rank has none."""
        at = self._query_rank_layout()
        return DistGlobalInfo(at.tp_size, at.dp_size, at.pp_size, at.cp_size)
