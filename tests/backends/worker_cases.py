"""Workers that the tests of this folder start."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import resource
import sys
import time
import weakref

from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Adder(Worker):
    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = base

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return self.base + x + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, x, scale=1):
        return self.rank, x * scale

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def lists(self, x):
        return x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self, seconds):
        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def soon(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self):
        names = "WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT MINE"
        return {name: os.environ.get(name) for name in names.split()}

    def unregistered(self):
        return "here"


class Twice(Worker):
    """Double in place what was received."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice(self, data):
        data.batch["a"] *= 2
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def length(self, data):
        return len(data)


class Neighbour(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask(self, x):
        return self.actor.add(x), self.sibling("actor_rollout").rank, sorted(self._siblings)


class Unreadable:
    """Can be pickled, and raises when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise OSError('no such weights')",)


class Faulty(Worker):
    def __init__(self, fail_on: int = -1) -> None:
        super().__init__()
        if self.rank == fail_on:
            raise ValueError("no such weights")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank):
        if self.rank == rank:
            raise KeyError("reward_model")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_while_others_wait(self, rank, seconds):
        if self.rank == rank:
            raise KeyError("reward_model")
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank):
        if self.rank == rank:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        time.sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stuck_on(self, rank):
        if self.rank == rank:
            time.sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unpicklable(self):
        return (x for x in ())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def unreadable(self):
        return Unreadable()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def say(self, text):
        print(text, file=sys.stderr, flush=True)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, value):
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, value):
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data):
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def lost(self, data):
        return data


class Large(Worker):
    """Return much from rank 0, which is on another node than the controller."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make(self, nbytes):
        return b"x" * nbytes if self.rank == 0 else b"x"


class Unequal(Worker):
    """One rank fails, or none; the others run for five minutes."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data, fails=-1):
        if self.rank == fails:
            raise KeyError("reward_model")
        time.sleep(300)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def items(self):
        time.sleep(300)
        yield self.rank


class Taking(Worker):
    """Take any arguments, and count calls of `each`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, value, other=None):
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, value):
        self.calls += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self):
        return self.calls


class Slow(Worker):
    """Sleep, or wait for ever."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, rank, seconds):
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_and_fail(self, seconds):
        time.sleep(seconds)
        raise KeyError("nothing")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def run(self, function, *args):
        return function(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def await_forever(self, rank):
        if self.rank == rank:
            await self._wait_for_weights()
        return self.rank

    async def _wait_for_weights(self):
        await asyncio.sleep(60)


class Checkpointing(Worker):
    """Write a checkpoint with code of `torch.distributed`, which takes long on a slow disk."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_unless(self, rank, seconds):
        if self.rank == rank:
            raise OSError("no space left")
        path = "/site-packages/torch/distributed/checkpoint/filesystem.py"
        code = "def write_items(seconds):\n    import time; time.sleep(seconds)\n"
        names: dict = {}
        exec(compile(code, path, "exec"), names)
        names["write_items"](seconds)
        return self.rank


class Collective(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect(self):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_world_size()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_unless(self, rank):
        if self.rank == rank:
            raise ValueError("not with me")
        return self._reduce()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_or_die(self, rank):
        if self.rank == rank:
            os._exit(9)
        return self._reduce()

    def _reduce(self):
        import torch

        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item()


class TwiceLater(Twice):
    """The same, and as a coroutine."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def twice_later(self, data):
        await asyncio.sleep(0.001)
        return self.twice(data)


class Mirror(Worker):
    """Call a sibling from a coroutine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ask_later(self, x):
        await asyncio.sleep(0.01)
        return self.sibling("actor").add(x)


class Nested(Worker):
    """A worker inside a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adder(100)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def through(self, x):
        return self.inner.add(x), self.inner.world_size


class Overlap(Worker):
    """Coroutine calls that can only end together."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = 0
        self.all_here = asyncio.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self, how_many):
        self.arrived += 1
        if self.arrived == how_many:
            self.all_here.set()
        await asyncio.wait_for(self.all_here.wait(), timeout=20)
        return self.arrived


class CallOrder(Worker):
    """Wait for files, and make them: one per rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for(self, path, seconds):
        deadline = time.monotonic() + seconds
        while not os.path.exists(f"{path}{self.rank}"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make(self, path):
        open(f"{path}{self.rank}", "w").close()


class Arrays(Worker):
    """Change arguments in place."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil(self, array, numbers, table):
        array += 1
        numbers.append(99)
        table["x"].clear()
        return float(array.sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def length(self, value):
        return len(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def collect_garbage(self):
        gc.collect()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def faults_of_steps(self, blocks):
        """Return the page faults of three steps that fill and free `blocks` × 16 MiB each."""
        faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(3):
            held = [bytearray(b"x") * (16 * 2**20) for _ in range(blocks)]
            del held
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        return [after - before for before, after in itertools.pairwise(faults)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def loaded(self, names):
        return [name for name in names if name in sys.modules]


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.me = self


class Cyclic(Worker):
    """Hold a cycle from its `__init__` on."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Cycle()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self):
        """Drop the cycle. Return how many objects are frozen, and whether the cycle was freed."""
        watched = weakref.ref(self.held)
        del self.held
        gc.collect()
        return gc.get_freeze_count(), watched() is None


def group_on(pool, cls=Adder, *args, **options):
    """Start a group of `cls(*args)` on a pool of Ray."""
    from quadriga.backends.ray import RayClassWithInitArgs, RayWorkerGroup

    return RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), **options)
