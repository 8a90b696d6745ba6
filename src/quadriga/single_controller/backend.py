"""What an engine must offer to run worker groups. Ray and local are the two that exist."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

from quadriga.errors import WorkerError
from quadriga.single_controller.call import Call, Pending
from quadriga.single_controller.placement.rank_layout import GroupLayout
from quadriga.single_controller.placement.resource_pool import ResourcePool
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs
from quadriga.single_controller.watch import Watch


@dataclass(frozen=True)
class RankFacts:
    """Where a rank lives, as it says itself."""

    rank: int
    world_size: int
    node: str
    pid: int
    master_address: str
    master_port: str
    group_prefix: str = ""
    log_path: str | None = None
    """The file on its node that its stderr goes to."""
    node_id: str = ""
    """The engine's own name of that node."""
    name: str = ""
    """What the engine calls it, "" for one without a name."""
    devices: str | None = None
    """The accelerators it may see, as the vendor's variable lists them."""
    stack_path: str = ""
    """The file on its node that it writes its stacks to when asked by a signal."""
    interleaves: bool = False
    """Whether it has coroutine methods: calls then tell their order (`turns`)."""


@dataclass
class RankHandle:
    """One rank, as its group holds it. `native` is the engine's own handle."""

    native: Any
    name: str
    facts: RankFacts
    methods: dict[str, Any] = field(default_factory=dict)
    """The engine's per-method call objects, kept because making one costs time."""
    sender: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    sent: int = 0
    """How many calls with tickets were sent from here."""


@dataclass(eq=False)
class RankSet:
    """The processes of a group and what is known of them; shared by all views on the group."""

    backend: CallBackend
    handles: list[RankHandle]
    roles: dict[str, type]
    """Every role that a process of this group hosts, with its class."""
    name_prefix: str = ""
    timeout: float | None = None
    """Default deadline of a call, in seconds; None: no deadline."""
    meshes: dict[tuple[str, str], tuple[list[int], list[bool]]] = field(default_factory=dict)
    layouts: dict[str, GroupLayout] = field(default_factory=dict)
    watch: Watch[RankSet] | None = None
    broken: str | None = None
    """Why no call can succeed any more."""
    in_flight: WeakSet[Any] = field(default_factory=WeakSet)
    """The submissions that somebody may still wait for, in the engine's own form."""

    def __len__(self) -> int:
        return len(self.handles)


@runtime_checkable
class CallBackend(Protocol):
    """What a group that exists needs of its engine: calls carried to ranks, and answers back."""

    @property
    def store(self) -> Any:
        """Where batches by reference lie: a `protocol.reference.Store`."""
        ...

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Send `calls[i]` to rank `targets[i]`; does not wait.

        Who waits for an answer `timeout` seconds after this gets CallTimeoutError.
        """
        ...

    def gather(self, pendings: Sequence[Pending]) -> list[Any]:
        """Wait for all answers of one `submit`. The first failure is raised at once."""
        ...

    def share(self, packed: Any, value: Any) -> Any:
        """Prepare what several ranks will receive, so that it is sent once. `packed` is what
        would travel, `value` what it was before."""
        ...

    def is_alive(self, handle: RankHandle) -> bool:
        """Whether the rank's process exists; answers within seconds."""
        ...

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """The error for a rank that is gone; its `method` is the call that was in flight there,
        "" if none was. None: this process has left the engine and knows nothing of its ranks."""
        ...

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process."""
        ...


@runtime_checkable
class Backend(CallBackend, Protocol):
    """An engine that places ranks and carries calls to them."""

    name: str

    def start(self, **options: Any) -> None:
        """Connect to the engine, starting it if none runs. `num_cpus`: of a started one."""
        ...

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> ResourcePool:
        """A pool in the engine's own type; `name` is what messages call it.

        Unlike the pool classes themselves, `max_colocate_count` is 1 if not given.
        """
        ...

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Raises PlacementError unless all pools fit on the machines together."""
        ...

    def class_with_args(self, cls: type, *args: Any, **kwargs: Any) -> ClassWithInitArgs:
        """A worker class with its arguments, in the engine's own type."""
        ...

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> ClassWithInitArgs:
        """Several roles in one process."""
        ...

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: Any
    ) -> Any:
        """Start a group: a `WorkerGroup`, complete when this returns.

        Without a pool the option `sharing_with` names a group whose places are used.
        """
        ...

    def shutdown(self) -> None:
        """End what this backend itself has started."""
        ...
