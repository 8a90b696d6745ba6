"""One blocking call of a mesh method passes few files of the package."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import quadriga.single_controller
from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.single_controller import Worker, make_nd_compute_dataproto_dispatch_fn, register

PACKAGE = Path(quadriga.single_controller.__file__).parent


class Actor(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("actor", self.rank, True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_actor(self, data):
        return DataProto(meta_info={"metrics": {"loss": float(data.batch["x"].sum())}})


def test_the_files_of_one_call():
    backend = get_backend("local")
    group = backend.worker_group(backend.resource_pool([2]), backend.class_with_args(Actor))
    batch = DataProto.from_dict({"x": torch.ones(4, 2)})
    group.update_actor(batch)  # asks the workers for the mesh
    files = set()

    def record(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(record)
    try:
        result = group.update_actor(batch)
    finally:
        sys.setprofile(None)
    assert result.meta_info["metrics"] == {"loss": [4.0, 4.0]}
    # The local backend sets the variables of the rank around its call; that of Ray sets them once.
    assert files - {"ranks/environment.py"} == {
        "bound_method.py",
        "call.py",
        "dispatch/batch_modes.py",
        "dispatch/modes.py",
        "ranks/rank_host.py",
        "worker_group.py",
    }
