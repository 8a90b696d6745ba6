"""A worker that Ray alone starts. Its process has the modules of verl from the first import on."""

import quadriga.compat.verl  # noqa: F401

# isort: split
import os

import ray
from verl.single_controller.base import Worker


class Counted(Worker):
    def place(self):
        return self.rank, self.world_size, self.get_master_addr_port()

    def center(self):
        center = ray.get_actor(f"{os.environ['WG_PREFIX']}_register_center")
        return ray.get(center.get_rank_zero_info.remote())
