"""What a backend provides to start worker groups and to run calls. Ray and local implement it.

Every call and every wait tests `broken_groups`, so that a broken group is noticed early.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

from quadriga.errors import DispatchError, WorkerError
from quadriga.single_controller.dispatch import Call, Pending, Ticket
from quadriga.single_controller.keepers import Keeper, KeptValues
from quadriga.single_controller.rank_layout import GroupLayout
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker import ClassWithInitArgs, ColocatedClass

logger = logging.getLogger("quadriga.controller")

LOG_S = 60.0
"""How often a check that fails is logged."""

broken_groups: dict[int, WorkerError] = {}
"""id of a watched rank set → the error that was found. Empty while every watched group works."""
_lock = threading.Lock()


def report(owner: object, error: WorkerError) -> None:
    """Record that a watched group is broken.

    Waits on any group of this controller end with `error`, for as long as `owner` exists.
    """
    with _lock:
        # The first error is the cause; later ones are mostly its consequences.
        if id(owner) not in broken_groups:
            broken_groups[id(owner)] = error
            weakref.finalize(owner, broken_groups.pop, id(owner), None)


def forget(owner: object) -> None:
    """Remove the error of a group that was shut down or whose failure was handled."""
    with _lock:
        broken_groups.pop(id(owner), None)


def raise_if_broken() -> None:
    """Raise the error of a watched group that was found broken, if there is one.

    Test `if broken_groups:` first where each microsecond counts.
    """
    if broken_groups:
        with _lock:
            error = next(iter(broken_groups.values()), None)
        if error is not None:
            raise error


class Watch:
    """A thread that looks every `interval` seconds whether a rank of a group has ended.

    Consumes: nothing. Produces: one `report`, after which the thread ends. Waits for: the interval.
    Unblocked by: `stop`. The thread also ends when `ranks` is deleted. If a look itself raises, the
    thread logs that, and looks again after the interval.
    """

    def __init__(self, ranks: RankSet, interval: float) -> None:
        self._ranks = weakref.ref(ranks)
        self._interval = interval
        self._stopped = threading.Event()
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._run, name="quadriga-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            ranks = self._ranks()
            if ranks is None:
                return
            error = self._find_death(ranks)
            # `stop` may have been called while the ranks were checked.
            if error is not None and not self._stopped.is_set():
                report(ranks, error)
                return
            del ranks  # a reference held while waiting would keep the group alive

    def _find_death(self, ranks: RankSet) -> WorkerError | None:
        """Return the error for the first rank that has ended, None if all are alive."""
        try:
            for handle in ranks.backend.dead(ranks.handles):
                return ranks.backend.death(ranks, handle)
        except Exception as problem:  # a thread that ends here would leave the group unwatched
            now = time.monotonic()
            if now - self._logged >= LOG_S:
                self._logged = now
                logger.warning(
                    "The ranks of a group could not be checked (%s: %s). The check is repeated "
                    "every %g s.", type(problem).__name__, problem, self._interval,
                )  # fmt: skip
        return None


Mesh = tuple[list[int], list[bool]]
"""For each rank its data-parallel rank, and whether its result is collected."""


@dataclass(frozen=True)
class RankFacts:
    """The process of a rank, as the rank itself reports it."""

    rank: int
    world_size: int
    node: str
    """Address of its node."""
    pid: int
    master_address: str
    master_port: str
    group_prefix: str = ""
    log_path: str | None = None
    """File on its node that receives its stderr."""
    node_id: str = ""
    """The backend's identifier of its node."""
    name: str = ""
    """The backend's name of the rank, "" if it has none."""
    devices: str | None = None
    """Accelerators that it may use, in the format of the vendor's variable ("0,1")."""
    stack_path: str = ""
    """File on its node to which it writes its stacks on a signal."""
    interleaves: bool = False
    """Whether it has coroutine methods. Calls to it then carry tickets (`rank_host.CallOrder`)."""
    beside: frozenset[str] = frozenset()
    """The methods ("role.method") that it runs beside the others."""


@dataclass
class RankHandle:
    """One rank, as the controller refers to it.

    A copy in another process is a sender of its own: it numbers its calls from 0.
    """

    native: Any  # an actor handle of Ray, or an object of the local backend
    """The backend's own handle."""
    name: str
    facts: RankFacts
    methods: dict[str, Any] = field(default_factory=dict)  # each backend stores its own type
    """The backend's per-method call objects, by "role.method". Creating one is slow."""
    sender: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Identifies this handle among all handles of the rank, in the tickets of its calls."""
    sent: int = 0
    """The number of calls with tickets that were sent through this handle."""

    def next_ticket(self) -> Ticket:
        """Return the ticket of the next call. Hold `RankSet.lock` until the call is sent."""
        ticket = self.sender, self.sent
        self.sent += 1
        return ticket

    def take_ticket_back(self) -> None:
        """Undo `next_ticket` for a call that was not sent: the next call would wait for it."""
        if self.facts.interleaves:
            self.sent -= 1

    def __reduce__(self) -> tuple[type[RankHandle], tuple[object, str, RankFacts]]:
        return RankHandle, (self.native, self.name, self.facts)


@dataclass(eq=False)
class RankSet:
    """The processes of a group. All views of the group share it."""

    backend: Backend
    handles: list[RankHandle]
    roles: dict[str, type]
    """Every role in a process of this group, with its worker class."""
    name_prefix: str = ""
    timeout: float | None = None
    """Default deadline of a call in seconds. None: no deadline."""
    meshes: dict[tuple[str, str], Mesh] = field(default_factory=dict)
    """(role, mesh name) → mesh, for meshes that were queried."""
    rank_layouts: dict[str, GroupLayout] = field(default_factory=dict)
    """role → layout, for layouts that were queried."""
    broken: str | None = None
    """The reason why every further call fails, None if calls can succeed."""
    watch: Watch | None = None
    in_flight: WeakSet[Any] = field(default_factory=WeakSet)  # each backend stores its own type
    """The submissions whose results may still be waited for."""
    lock: RLock = field(default_factory=RLock)
    """Held while one call is sent to all its ranks.

    Two threads then send their calls in the same order to every rank. Without the lock, rank 0
    could run `a` before `b` and rank 1 `b` before `a`, and collectives in them would deadlock.
    """

    def __len__(self) -> int:
        return len(self.handles)

    def __getstate__(self) -> dict[str, object]:
        # What remains belongs to this process: its thread, its waits, its lock.
        local = ("watch", "in_flight", "lock")
        return {name: value for name, value in vars(self).items() if name not in local}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, watch=None, in_flight=WeakSet(), lock=RLock())


def check_timeouts(owner: str, **timeouts: object) -> None:
    """Raise `DispatchError` unless each option is None or a positive number of seconds.

    `owner`: what has these options, for the message.
    """
    for name, timeout in timeouts.items():
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < float("inf")
        ):
            raise DispatchError(
                f"{owner}({name}=…) expects a number of seconds above 0, or None, got {timeout!r}."
            )


@runtime_checkable
class Backend(Protocol):
    """Places and starts ranks, sends them calls and receives the results.

    The methods with a body are those of a backend of one process, which may inherit them.
    """

    name: str

    @property
    def store(self) -> object:
        """The `protocol.Store` of remote fields."""

    def submit(
        self, ranks: RankSet, targets: Sequence[int], calls: Sequence[Call], timeout: float | None
    ) -> Sequence[Pending]:
        """Send `calls[i]` to rank `targets[i]`. Do not wait for the results.

        Encode all calls before the first is sent: if one cannot be encoded, no rank may run. Hold
        `ranks.lock` while they are sent. If sending to one rank fails, raise WorkerError for
        that rank and treat the others as the peers of a rank that has failed. A wait that is not
        over `timeout` seconds after the submission raises CallTimeoutError.
        """

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Wait for all results of one `submit`. Raises the first failure as soon as it is known."""

    def share(self, packed: object) -> object:
        """Prepare what is sent for an argument that several ranks receive: it is stored once."""
        return packed

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return the ranks whose process has ended. Costs one check per node, not per rank, and
        takes seconds at most."""

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """Return the error for a rank whose process has ended.

        Its `method` is the call that was in flight on the rank, "" if there was none. None: this
        process is disconnected from the backend and knows nothing about its ranks.
        """

    def kill(self, handle: RankHandle) -> None:
        """End the process of a rank."""

    def keepers(self, handles: Sequence[RankHandle]) -> list[Keeper]:
        """Return a keeper for each rank, in a process of another node if there is one. A backend
        of one process keeps values in it."""
        keeper = KeptValues()
        return [keeper] * len(handles)

    def start(self, **options: object) -> None:
        """Connect to the backend and start it if it is not running.

        `num_cpus`: the number of CPUs of a backend that is started here.
        """
        return None

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: object
    ) -> ResourcePool:
        """Create a pool of the backend's type. Messages call it `name`.

        `max_colocate_count` is 1 by default, unlike in the pool classes themselves.
        """

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Raise PlacementError unless all pools fit on the nodes at the same time."""
        return None

    def pool_in_free_room(self, like: ResourcePool) -> ResourcePool | None:
        """Return a new pool as large as `like` if the nodes have the free resources; else None."""
        return None

    def is_placed(self, pool: ResourcePool) -> bool:
        """Return whether all bundles of a pool that was used are on living nodes."""
        return True

    def class_with_args(self, cls: type, *args: object, **kwargs: object) -> ClassWithInitArgs:
        """Combine a worker class with its arguments, in the backend's type."""
        return ClassWithInitArgs(cls, *args, **kwargs)

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
        """Combine several roles that share one process per rank."""
        return ColocatedClass(dict(classes))

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: object
    ) -> Any:  # has the methods that the worker class registered, which no type can name here
        """Start a `WorkerGroup`. Its workers are built when this returns.

        Without a pool, the option `sharing_with` names a group on whose bundles it runs.
        """

    def shutdown(self) -> None:
        """End what this backend started."""
        return None
