"""Workers with dispatch and execute modes that this file adds. See the fixture `mode_workers`."""

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    dispatch_dp_compute_data_proto,
    dispatch_one_to_all,
    register,
    register_dispatch_mode,
)
from verl.single_controller.base.worker_group import WorkerGroup

FIRST_HALF = Execute.register("FIRST_HALF")


def dispatch_to_half(worker_group, *args, **kwargs):
    assert isinstance(worker_group, WorkerGroup)
    assert len(worker_group.workers) == worker_group.world_size
    half = worker_group.world_size // 2
    return tuple([arg] * half for arg in args), {k: [v] * half for k, v in kwargs.items()}


def collect_half(worker_group, output):
    assert worker_group.name_prefix
    return output


HALF = {"dispatch_fn": dispatch_to_half, "collect_fn": collect_half}


class Half(Worker):
    """A method that runs on half of the ranks."""

    @register(dispatch_mode=HALF, execute_mode=FIRST_HALF)
    def where(self, x):
        return self.rank + x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everywhere(self):
        return self.rank


REVERSED = Dispatch.register("REVERSED")


def reverse_dispatch(worker_group, *args, **kwargs):
    return tuple(list(reversed(arg)) for arg in args), kwargs


REVERSE = {"dispatch_fn": reverse_dispatch, "collect_fn": collect_all_to_all}
DISPATCH_MODE_FN_REGISTRY[REVERSED] = REVERSE


def padded_dispatch(worker_group, data):
    return dispatch_dp_compute_data_proto(worker_group, data)


COMPOSED = {"dispatch_fn": padded_dispatch, "collect_fn": collect_dp_compute_data_proto}
register_dispatch_mode("SUMMED", dispatch_one_to_all, lambda group, output: sum(output))


class Modes(Worker):
    @register(dispatch_mode=Dispatch.REVERSED)
    def mine(self, x):
        return x

    @register(dispatch_mode=Dispatch.SUMMED)
    def summed(self, x):
        return x + self.rank

    @register(dispatch_mode=COMPOSED)
    def composed(self, data):
        return data

    @register(dispatch_mode=COMPOSED, blocking=False)
    def composed_later(self, data):
        return data
