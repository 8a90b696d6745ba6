"""Workers that the tests of this folder start. A rank imports torch when it receives a batch."""

import asyncio
import itertools
import os
import resource
import sys
import threading
import time

from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

ALL = Dispatch.ONE_TO_ALL
WIDTH = 16384
"""Float32 columns of a field: a row has 64 KiB, and two rows are stored."""


def wait_for(path, seconds=60.0):
    """Return whether the file exists within some seconds."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def fields(rows):
    """Return the row numbers in `one` [n, WIDTH], doubled in `two`, times ten in `small` [n]."""
    from quadriga.protocol import DataProto

    one = rows[:, None].float().repeat(1, WIDTH)
    return DataProto.from_dict({"one": one, "two": 2 * one, "small": 10 * rows})


def prompts(count):
    """Return rows with their number in `row` [count]."""
    import torch

    from quadriga.protocol import DataProto

    return DataProto.from_dict({"row": torch.arange(count)})


class Unreadable:
    """Can be pickled, and raises when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise OSError('no such weights')",)


class Adder(Worker):
    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = base

    @register(dispatch_mode=ALL)
    def add(self, x):
        return self.base + x + self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, x, scale=1):
        return self.rank, x * scale

    @register(dispatch_mode=ALL)
    def environment(self):
        names = "WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT MINE"
        return {name: os.environ.get(name) for name in names.split()}

    def unregistered(self):
        return "here"


class Cases(Adder):
    """Methods of every kind, none of which is a coroutine."""

    def __init__(self, base: int = 0, fail_on: int = -1) -> None:
        super().__init__(base)
        if self.rank == fail_on:
            raise ValueError("no such weights")

    # Values

    @register(dispatch_mode=ALL)
    def same(self, value, other=None):
        return value

    @register(dispatch_mode=ALL)
    def run(self, function, *args):
        return function(*args)

    @register(dispatch_mode=ALL)
    def take(self, value, other=None):
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def lists(self, x):
        return x

    @register(dispatch_mode=ALL)
    def spoil(self, array, numbers, table):
        """Change arguments in place."""
        array += 1
        numbers.append(99)
        table["x"].clear()
        return float(array.sum())

    # Failures and waits

    @register(dispatch_mode=ALL)
    def raise_on(self, rank, sign=None):
        """Raise on one rank. The others wait for a file, if there is one to wait for."""
        if self.rank == rank:
            raise KeyError("reward_model")
        if sign:
            wait_for(sign)
        return self.rank

    @register(dispatch_mode=ALL)
    def die_on(self, rank):
        if self.rank == rank:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        time.sleep(60)

    @register(dispatch_mode=ALL)
    def stuck_on(self, rank, sign):
        if self.rank == rank:
            wait_for(sign)

    @register(dispatch_mode=ALL)
    def wait_for(self, sign, seconds):
        return wait_for(f"{sign}{self.rank}", seconds)

    @register(dispatch_mode=ALL)
    def touch(self, sign):
        open(f"{sign}{self.rank}", "w").close()

    @register(dispatch_mode=ALL)
    def sleep(self, rank, seconds):
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=ALL)
    def sleep_and_fail(self, seconds):
        time.sleep(seconds)
        raise KeyError("nothing")

    @register(dispatch_mode=ALL)
    def unpicklable(self):
        return threading.Lock()

    @register(dispatch_mode=ALL)
    def unreadable(self):
        return Unreadable()

    @register(dispatch_mode=ALL)
    def say(self, text):
        print(text, file=sys.stderr, flush=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def lost(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make_late(self, data, sign, fails=-1):
        """Return the rows when a file exists; one rank raises at once."""
        self.raise_on(fails, sign)
        return data

    # Rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice(self, data):
        """Double in place what was received."""
        data.batch["a"] *= 2
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def received(self, data, other=None):
        """Return the rows that arrived."""
        given = [data] if other is None else [data, other]
        found = [(d.batch["small"].tolist(), d.batch["one"][:, -1].tolist()) for d in given]
        return type(data).__name__, *found

    @register(dispatch_mode=ALL)
    def whole(self, data):
        return data.batch["small"].tolist()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def future(self, data):
        return len(data.pending)

    # Rows with fields that are stored

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, prompts):
        return fields(prompts.batch["row"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make_odd_twice(self, prompts):
        rows = prompts.batch["row"]
        return fields(rows.repeat_interleave(1 + rows % 2)).select(["one", "small"])

    @register(dispatch_mode=ALL)
    def several(self, count):
        """Return batches of `count` rows, of one and of no rows."""
        import torch

        return [fields(torch.arange(n)) for n in (count, 1, 0)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data):
        return {key: float(data.batch[key].sum()) for key in data.batch.keys()}  # noqa: SIM118

    @register(dispatch_mode=ALL)
    def fail_or_make(self, fail):
        if fail:
            raise ValueError("asked to fail")
        return self.several(4)[0]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def little(self, prompts):
        """Return a field that is stored, and smaller than a return that Ray stores by itself."""
        made = fields(prompts.batch["row"]).select(["one"])
        made.batch["one"] = made.batch["one"][:, : WIDTH * 5 // 8].contiguous()
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_rows(self, prompts, rows):
        return fields(prompts.batch["row"][:rows])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def one_by_one(self, prompts):
        for row in prompts.batch["row"]:
            yield fields(row.repeat(2)).select(["one"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def joined(self, prompts, data):
        """Return received rows, not read, and new ones."""
        return type(data).concat([data.select(["one"]), self.make(prompts).select(["one"])])

    # Memory and modules

    @register(dispatch_mode=ALL)
    def faults_of_steps(self, blocks):
        """Return the page faults of three steps that fill and free `blocks` × 16 MiB each."""
        faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(3):
            held = [bytearray(b"x") * (16 * 2**20) for _ in range(blocks)]
            del held
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return [after - before for before, after in itertools.pairwise(faults)]

    @register(dispatch_mode=ALL)
    def loaded(self, names):
        return [name for name in names if name in sys.modules]


class Neighbour(Worker):
    @register(dispatch_mode=ALL)
    def ask(self, x):
        return self.actor.add(x), self.sibling("actor_rollout").rank, sorted(self._siblings)


class Coroutines(Cases):
    """The same on an event loop."""

    def __init__(self, base: int = 0) -> None:
        super().__init__(base)
        self.arrived = 0
        self.all_here = asyncio.Event()

    @register(dispatch_mode=ALL)
    async def later(self, seconds):
        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def make(self, prompts):
        return fields(prompts.batch["row"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def received(self, data, other=None):
        return Cases.received(self, data, other)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def twice_later(self, data):
        await asyncio.sleep(0.001)
        return self.twice(data)

    @register(dispatch_mode=ALL, blocking=False)
    async def meet(self, how_many):
        """Calls that can only end together."""
        self.arrived += 1
        if self.arrived == how_many:
            self.all_here.set()
        await asyncio.wait_for(self.all_here.wait(), timeout=20)
        return self.arrived

    @register(dispatch_mode=ALL)
    async def await_forever(self, rank):
        if self.rank == rank:
            await self._wait_for_weights()
        return self.rank

    async def _wait_for_weights(self):
        await asyncio.sleep(60)


class Mirror(Worker):
    """Call a sibling from a coroutine."""

    @register(dispatch_mode=ALL)
    async def ask_later(self, x):
        await asyncio.sleep(0.01)
        return self.sibling("actor").add(x)


class Nested(Worker):
    """A worker inside a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adder(100)

    @register(dispatch_mode=ALL)
    def through(self, x):
        return self.inner.add(x), self.inner.world_size


class Collective(Worker):
    @register(dispatch_mode=ALL)
    def connect(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_world_size()

    @register(dispatch_mode=ALL)
    def reduce_unless(self, rank, dies=False):
        import torch

        if self.rank == rank and dies:
            os._exit(9)
        if self.rank == rank:
            raise ValueError("not with me")
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item()


class Reader(Cases):
    """Makes fields that are stored, and reads rows of them."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data):
        """Return `fields` and `rag` with 16384 numbers in each row, in rows of two lengths."""
        import torch

        rows = data.batch["row"]
        made = fields(rows)
        ragged = [torch.full((8192 * (1 + int(i) % 3),), float(i)) for i in rows]
        made.batch["rag"] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data, keys):
        """Return the numbers of the rows, which all fields must have, and the bytes that were cut
        for this read."""
        from quadriga.protocol.storage import traffic

        traffic.reset()
        data.prefetch(keys)
        cut = traffic.reset().cut_bytes
        one = data.batch["one"][:, -1].tolist()
        assert data.batch["two"][:, 0].tolist() == [2 * row for row in one]
        assert [part.unique().tolist() for part in data.batch["rag"].unbind()] == [[r] for r in one]
        return one, cut


def taken_over(cls=Adder, **named):
    """Attach to the ranks of a group that exists."""
    from quadriga.backends.ray import RayClassWithInitArgs, RayWorkerGroup

    return RayWorkerGroup.from_detached(ray_cls_with_init=RayClassWithInitArgs(cls), **named)


def group_on(pool, cls=Adder, *args, **options):
    """Start a group of `cls(*args)` on a pool of Ray."""
    from quadriga.backends.ray import RayClassWithInitArgs, RayWorkerGroup

    return RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), **options)
