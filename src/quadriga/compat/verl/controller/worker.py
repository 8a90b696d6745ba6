"""verl's `Worker`, the place of a rank in a tp × dp × pp × cp layout, addresses and ports."""

from __future__ import annotations

import os
import random
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from quadriga import single_controller
from quadriga.backends.ray import RayClassWithInitArgs
from quadriga.backends.ray.cluster import node_address, this_node
from quadriga.backends.ray.start import join_register_center
from quadriga.compat.verl.controller.decorator import attributes_of, register as mark_as_verl
from quadriga.errors import DispatchError
from quadriga.parallel.device import get_device_name
from quadriga.single_controller import ClassWithInitArgs, Dispatch, RankLayout, register
from quadriga.single_controller.environment import RankEnvironment, ReservedPort
from quadriga.single_controller.worker import members_of


class WorkerHelper:
    """Address of this node, and a port that is free on it."""

    @staticmethod
    def _get_node_ip() -> str:
        return node_address()

    @staticmethod
    def _get_free_port() -> int:
        return int(get_master_addr_port()[1])

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


def get_visible_devices_keyword() -> str:
    """Return the environment variable that lists the visible devices."""
    return "ASCEND_RT_VISIBLE_DEVICES" if get_device_name() == "npu" else "CUDA_VISIBLE_DEVICES"


DISABLED = "DISABLE_WORKER_INIT"
"""With the value 1, a worker that is started by hand does not look for the other ranks."""


@dataclass
class WorkerMeta:
    """What `_configure_with_store` reads, as older versions of verl pass it."""

    store: Mapping[str, object]


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


class OfEnvironment:
    """An attribute of the rank's environment. A worker may assign another value to its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, worker: Worker | None, owner: type) -> object:
        return self if worker is None else getattr(worker._environment, self._name)


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
        else:
            self = super().__new__(cls)
        self._name_store_server()
        return self

    fused_worker_attr_name = "fused_worker_dict"
    """The attribute that has the roles of a process."""
    _rank = OfEnvironment("rank")
    _world_size = OfEnvironment("world_size")
    _local_rank = OfEnvironment("local_rank")
    _local_world_size = OfEnvironment("local_world_size")
    _master_addr = OfEnvironment("master_address")
    _master_port = OfEnvironment("master_port")

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that `_configure_with_store` sets."""
        keys = "WORLD_SIZE RANK LOCAL_WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
        return [*keys.split(), get_visible_devices_keyword()]

    def _configure_with_store(self, store: Mapping[str, object]) -> None:
        """Set the variables of `env_keys` that `store` has, and read the position again.

        A variable has the key `_<name in lower case>`, for example `_world_size`.
        """
        found = {name: store.get(f"_{name.lower()}") for name in self.env_keys()}
        os.environ.update({name: str(value) for name, value in found.items() if value is not None})
        self._environment = RankEnvironment.read()
        self._name_store_server()

    def _configure_with_meta(self, meta: WorkerMeta) -> None:
        """Do the same for a `WorkerMeta`. Raises `DispatchError` for anything else."""
        if not isinstance(meta, WorkerMeta):
            raise DispatchError(f"_configure_with_meta expects a WorkerMeta, got {meta!r}")
        self._configure_with_store(meta.store)

    def _name_store_server(self) -> None:
        """Set REDIS_STORE_SERVER_HOST, from which programs read the address of rank 0."""
        if self.master_address:
            os.environ["REDIS_STORE_SERVER_HOST"] = self.master_address.strip("[]")

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return (address, port) of rank 0: `master_address`, `master_port`."""
        return self.master_address, self.master_port

    @property
    def fused_worker_dict(self) -> dict[str, Any]:  # a class of the user's need not be a `Worker`
        """The roles that share this process: role → worker. Empty if the process has one role.

        A class that fuses several roles is a role of its process, but not in this dict.
        """
        fused, all_roles = single_controller.FusedWorker, self._siblings
        roles = {role: w for role, w in all_roles.items() if not isinstance(w, fused)}
        return roles if len(all_roles) > 1 else {}

    def get_fused_worker_by_name(self, worker_name: str) -> object:
        """Return the worker of a role in this process, None if there is no such role."""
        return self.fused_worker_dict.get(worker_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether the result of this rank is collected in a mesh."""
        return self._query_collect_info(mesh_name)

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


class FusedWorker(single_controller.FusedWorker, Worker):
    """A worker that holds the workers of several roles."""

    is_fused_worker = True
    raw_cls_dict: ClassVar[dict[str, type]]
    """role → worker class."""

    def _fuw_execute(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call a method of one role. `method_name`: "<role>_fwmn_<method>".

        Raises `UnregisteredMethodError` for a role that this process does not have.
        """
        role, _, name = method_name.partition("_fwmn_")
        return getattr(self.sibling(role), name)(*args, **kwargs)


FusedWorkerCLSName = "FusedWorker"
"""The first part of the name of a fused class."""


def create_colocated_worker_raw_cls(class_dict: dict[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """Return a class with one attribute per role, for subclasses that use several roles."""
    made = single_controller.create_colocated_worker_raw_cls(class_dict, FusedWorker)
    fused = cast(type[FusedWorker], made)
    fused.__name__ = "_".join((FusedWorkerCLSName, *class_dict))
    fused.raw_cls_dict = {role: member.cls for role, member in class_dict.items()}
    return fused


def _determine_fsdp_megatron_base_class(mros: Sequence[Sequence[type]]) -> type:
    """Return the first `Worker` or `MegatronWorker` among the bases of the first class.

    Raises `DispatchError` if there is none.
    """
    found = next((c for c in mros[0] if c.__name__ in ("Worker", "MegatronWorker")), None)
    if found is None:
        raise DispatchError(f"none of {list(mros[0])} is a Worker; derive the class from Worker")
    return found


def _bind_workers_method_to_parent(cls: type, key: str, user_defined_cls: type) -> None:
    """Give `cls` a method `<key>_<name>` for each registered one of a worker class, with its modes.

    The method calls `self.worker_dict[key].<name>`. A DIRECT_ROLLOUT_METHOD of a role whose key has
    "rollout" in it keeps its name; `DispatchError` if `cls` has a method of this name.
    """
    for name, member in members_of(user_defined_cls).items():
        modes = attributes_of(member)
        if modes is None:
            continue

        def call(self: Any, *args: object, _name: str = name, **kwargs: object) -> object:
            return getattr(self.worker_dict[key], _name)(*args, **kwargs)

        direct = modes["dispatch_mode"] == Dispatch["DIRECT_ROLLOUT_METHOD"] and "rollout" in key
        if direct and hasattr(cls, name):
            text = f"{cls.__name__} has a method {name!r} already; rename that of {key}"
            raise DispatchError(text)
        setattr(cls, name if direct else f"{key}_{name}", mark_as_verl(**modes)(call))


def _is_fused(held: RayClassWithInitArgs) -> bool:
    """Whether the class is one worker that builds a worker per role."""
    return issubclass(held.cls, single_controller.FusedWorker)


def _check_fused(held: RayClassWithInitArgs, used: bool) -> None:
    # Programs set it. It follows from the class here.
    if used != _is_fused(held):
        kind = f"{'' if _is_fused(held) else 'not '}a class of several roles"
        raise DispatchError(
            f"fused_worker_used={used!r} was set for {held.cls.__name__}, which is {kind} "
            "(create_colocated_worker_raw_cls). Do not set it."
        )


# verl's attribute. Programs compare classes, so Quadriga's own class gets it.
setattr(RayClassWithInitArgs, "fused_worker_used", property(_is_fused, _check_fused))  # noqa: B010


def create_colocated_worker_cls_fused(
    class_dict: dict[str, ClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Return a fused class with one attribute per role. Its group offers `fuse`."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
