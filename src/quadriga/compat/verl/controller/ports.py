"""verl's functions for addresses, ports and random names."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from quadriga.backends.ray.cluster import node_address
from quadriga.single_controller.environment import ReservedPort


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
