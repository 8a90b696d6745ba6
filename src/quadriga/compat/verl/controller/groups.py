"""verl's `RayWorkerGroup`: calls return Ray's object references, and names are bound verl's way."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from quadriga.backends.ray import RayResourcePool
from quadriga.backends.ray.cluster import ensure_ray
from quadriga.compat.verl.controller import decorator
from quadriga.compat.verl.controller.binding import ModeOfMethod, WorkerGroup, mode_of
from quadriga.compat.verl.controller.binding import func_generator as library_functor
from quadriga.compat.verl.controller.columns import columns_of, parts_of
from quadriga.compat.verl.controller.named_calls import GroupOfReferences
from quadriga.compat.verl.controller.options import class_of_ranks, nsight_of
from quadriga.errors import DispatchError
from quadriga.single_controller import ClassWithInitArgs
from quadriga.single_controller.bound_method import Part
from quadriga.single_controller.call import Arguments, CallView, KeywordArguments
from quadriga.single_controller.dispatch import DispatchMode, NotGiven, registered_methods
from quadriga.single_controller.worker_group import bind_all

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor

WorkerT = TypeVar("WorkerT")

IGNORED_OPTIONS = ("master_addr",)
_EXECUTE_FUNCTIONS = (
    "execute_all",
    "execute_all_async",
    "execute_rank_zero",
    "execute_rank_zero_async",
    "_execute_remote_single_worker",
)


class RayWorkerGroup(GroupOfReferences, WorkerGroup):
    """A Ray worker group that accepts verl's keywords and returns Ray's object references.

    A method that waits runs as in Quadriga, unless a subclass replaces `_bind_worker_method` or an
    execute function. A method with `blocking=False` returns what its collect function makes of the
    references: a list of them, or a `DataProtoFuture` for modes that join batches.

    `master_port` asks rank 0 to use that port. `use_gpu` must agree with the pool. With
    `profile_steps`, ranks with a GPU run under `nsys` with the flags `worker_nsight_options`.
    `master_addr` and `ray_wait_register_center_timeout` are accepted and ignored.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankActor] | None = None,
        ray_wait_register_center_timeout: int = 300,
        **kwargs: Any,  # options of the group, typed there
    ) -> None:
        for option in IGNORED_OPTIONS:
            kwargs.pop(option, None)
        ensure_ray()  # as Ray's own functions do, if the program has not called ray.init
        self.use_gpu = bool(kwargs.pop("use_gpu", resource_pool and resource_pool.use_gpu))
        if self.use_gpu and resource_pool is not None and not resource_pool.use_gpu:
            raise DispatchError(
                f"use_gpu=True, but {resource_pool!r} was made with use_gpu=False. Make both equal."
            )
        steps = kwargs.pop("profile_steps", None)
        nsight_options = kwargs.pop("worker_nsight_options", None)
        if steps and nsight_options and self.use_gpu:
            kwargs["profiler"] = nsight_of(nsight_options, len(steps))
        # Rank 0 chooses a port of a range; a range of one port fixes it.
        port = kwargs.pop("master_port", None)
        if port is not None:
            kwargs["master_port_range"] = (int(port), int(port) + 1)
        existing = worker_names is not None or worker_handles is not None
        if existing:  # verl ignores what only a start reads
            detached = False
            for option in ("worker_env", "master_port_range"):
                kwargs.pop(option, None)
        if ray_cls_with_init is None and existing:
            ray_cls_with_init = class_of_ranks(worker_names, worker_handles, kwargs)
        self.ray_cls_with_init = ray_cls_with_init
        self.device_name = kwargs.get("device_name", "cuda")
        self.customized_worker_env = kwargs.get("worker_env") or {}
        self.profile_steps, self.worker_nsight_options = steps, nsight_options
        self._process_dispatch_config = None if resource_pool is None else resource_pool.store
        self.wg_dict: Mapping[str, object] | None = None
        self.method_names: list[str] = []
        self._is_init_with_detached_workers = existing
        super().__init__(
            resource_pool,
            ray_cls_with_init,
            bin_pack,
            name_prefix,
            detached,
            worker_names,
            worker_handles,
            **kwargs,
        )

    # What verl's programs read

    @property
    def _workers(self) -> list[Any]:  # type: ignore[override]  # another group of one's own sets it
        return self.workers

    @property
    def _worker_names(self) -> list[str]:  # type: ignore[override]  # see above
        return self.worker_names

    @property
    def _world_size(self) -> int:
        return self.world_size

    @property
    def _master_addr(self) -> str:
        return self.master_address

    @property
    def _master_port(self) -> str:
        return self.master_port

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh, from `_dispatch_info`."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = super().dispatch_info(mesh_name)
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected in a mesh, from `_collect_info`."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = super().collect_info(mesh_name)
        return self._collect_info[mesh_name]

    @property
    def fused_worker_used(self) -> bool:  # type: ignore[override]  # see above
        """Whether the group was made by `create_colocated_worker_cls_fused`."""
        return self.ray_cls_with_init is not None and self.ray_cls_with_init.fused_worker_used

    @property
    def sub_cls_name(self) -> str:
        """The role of a view of one role of several, "" for other groups."""
        return self._role or "" if len(self._ranks.roles) > 1 else ""

    # Binding

    def _bind(self) -> None:
        """Make each registered method an attribute, through `_bind_worker_method`."""
        self._offered = self._bound_names(self._ranks.roles, self._role, self._binding)
        # Each role has its own meshes. A program's dispatch function may write into the dicts.
        self._dispatch_info, self._collect_info = {}, {}
        bound = self._bind_worker_method(self._class_to_bind(), library_functor)
        if type(self)._bind_worker_method is RayWorkerGroup._bind_worker_method:
            # A method that is overridden without @register keeps the record of the overridden one.
            for name in set(self._offered) - set(bound):
                setattr(self, name, self._native(name))

    @property
    def _names_of_roles(self) -> dict[str, tuple[str, str]]:
        """`<role>_<method>` → (role, method), in a group of several roles and in their views.

        A fused class routes calls by role itself, so the views of its roles have no such names.
        """
        if self.fused_worker_used or len(self._ranks.roles) < 2:
            return {}
        return self._bound_names(self._ranks.roles, None, self._binding)

    def _role_and_method(self, method_name: str) -> tuple[str, str]:
        found = self._names_of_roles.get(method_name)
        return found or super()._role_and_method(method_name)

    def __getattr__(self, name: str) -> Any:  # a registered method, which no type can name here
        # A view of one role also has the methods of the group that it was taken from.
        if not name.startswith("__") and "_offered" in self.__dict__ and self._role is not None:
            role, method = self._names_of_roles.get(name, ("", ""))
            if role:
                return getattr(self._role_view(role), method)
        return super().__getattr__(name)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the view of each role an attribute and an entry of `wg_dict`.

        Also note the group's own methods in `method_names`, which is empty before, as in verl.
        """
        self.wg_dict = self.spawn(prefix_set)
        super().fuse(self.wg_dict)
        self.method_names = list(self._offered)

    def _class_to_bind(self) -> type:
        """Return the class of the role, or a class with the methods that the group offers.

        That is a class with the methods `<role>_<method>` of several roles, or with the methods
        that a binding policy chose.
        """
        if self._role is not None and self._binding is bind_all:
            return self.class_of(self._role)
        members = {
            offered: getattr(self.class_of(role), name)
            for offered, (role, name) in self._offered.items()
        }
        return type("_".join(self._ranks.roles), (), members)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Any) -> list[str]:
        """Make each registered method of a class an attribute of the group. Return their names.

        With the `func_generator` of this library, a method that waits becomes a method of
        Quadriga's groups, which has deadlines and reports the first failure of any rank.
        """
        names = super()._bind_worker_method(user_defined_cls, func_generator)
        if func_generator is library_functor:
            for name in names:
                found = mode_of(getattr(user_defined_cls, name), name)
                if found is not None and found[1] and self._runs_natively(name, found[0]):
                    setattr(self, name, self._native(name))
        return names

    def _mode_of(self, user_defined_cls: type, name: str) -> tuple[ModeOfMethod, bool] | None:
        found = super()._mode_of(user_defined_cls, name)
        if found is not None and self._role is None and name in self._offered:
            found[0].role = self._offered[name][0]
        return found

    def _runs_natively(self, name: str, mode: ModeOfMethod) -> bool:
        if name not in self._offered or isinstance(mode.execute.ranks, NotGiven):
            return False
        return not self._replaces(*_EXECUTE_FUNCTIONS)

    def _native(self, name: str) -> Callable[..., object]:
        """Return the attribute that Quadriga's group has for a method."""
        role, method = self._offered[name]
        record = registered_methods(self.class_of(role))[method]
        return self._method_factory(self, role, record)

    def _parts_of_call(
        self, view: CallView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
    ) -> list[Part]:
        """Return the arguments of each executing rank, as verl's execute functions send them."""
        return parts_of(view, mode, columns_of(view, mode, args, kwargs))

    def _execute_function(self, mode: ModeOfMethod, method: str) -> Callable[..., object]:
        name = decorator.get_predefined_execute_fn(mode.execute)["execute_fn_name"]
        known = isinstance(mode.execute.ranks, NotGiven) or hasattr(type(self), name)
        if known or mode.dispatch.ranks:
            return super()._execute_function(mode, method)
        return functools.partial(self._execute_on_ranks, mode)

    def _execute_on_ranks(
        self, mode: ModeOfMethod, method_name: str, *args: list[object], **kwargs: list[object]
    ) -> list[object]:
        """Call the ranks of an execute mode, with one entry of each argument per rank."""
        view = mode.views[threading.get_ident()]
        parts: list[Part] = [
            (
                tuple(column[i] for column in args),
                {name: column[i] for name, column in kwargs.items()},
            )
            for i in range(len(view.ranks))
        ]
        return self._call_ranks(view.ranks, method_name, parts)


def check_workers_alive(
    workers: Sequence[WorkerT], is_alive: Callable[[WorkerT], bool], gap_time: float = 1.0
) -> None:
    """Check every `gap_time` seconds. Interrupt the main thread once a worker is not alive."""
    import _thread

    # verl calls this in a thread. Only the main thread can be interrupted from another one.
    while all(map(is_alive, workers)):
        time.sleep(gap_time)
    if threading.main_thread().is_alive():
        _thread.interrupt_main()
