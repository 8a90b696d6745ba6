"""Workers of `test_program_splitting`, also with dispatch functions that change no argument."""

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    dispatch_dp_compute_data_proto,
    dispatch_one_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

UNCHANGED = {
    "dispatch_fn": lambda worker_group, *args, **kwargs: (args, kwargs),
    "collect_fn": lambda worker_group, output: output,
    "note": "verl reads only the two functions",
}
REPLICATED = {**UNCHANGED, "dispatch_fn": dispatch_one_to_all}
COMPOSED = {
    **UNCHANGED,
    "dispatch_fn": lambda worker_group, data: dispatch_dp_compute_data_proto(worker_group, data),
}


class Splits(Worker):
    """Methods that return what they receive."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @classmethod
    def class_name(cls, suffix=""):
        return cls.__name__ + suffix

    @register()
    def default(self, x):
        return x

    @register(blocking=False)
    def default_later(self, x):
        return x

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each(self, x):
        return x

    @register(dispatch_mode=UNCHANGED)
    def unchanged(self, *args, **kwargs):
        return (args, kwargs)

    @register(dispatch_mode=UNCHANGED, blocking=False)
    def unchanged_later(self, *args, **kwargs):
        return (args, kwargs)

    @register(dispatch_mode=UNCHANGED, execute_mode=Execute.RANK_ZERO)
    def first(self, x):
        return (self.rank, x)

    @register(dispatch_mode=UNCHANGED, execute_mode=Execute.RANK_ZERO, blocking=False)
    def first_later(self, x):
        return (self.rank, x)

    @register(dispatch_mode=REPLICATED, execute_mode=Execute.RANK_ZERO)
    def first_replicated(self, x):
        return x

    @register(dispatch_mode=REPLICATED)
    def replicated(self, x):
        return x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def counted(self, data):
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scaled(self, data, scale):
        return DataProto.from_dict({"a": data.batch["a"] * scale})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def applied(self, function, data):
        return function(self, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def by_mesh(self, data):
        return data

    @register(dispatch_mode=COMPOSED)
    def composed(self, data):
        return len(data)
