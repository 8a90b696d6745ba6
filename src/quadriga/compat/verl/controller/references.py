"""Ray's own calls, for programs that mix them with worker groups.

The only module outside of `backends.ray` that imports ray. Calls of a group return references whose
values `ray.get` gives: numbers, tensors, batches of remote fields.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError

from quadriga.backends.ray import start
from quadriga.backends.ray.calls import RayPending, pending_of, send_to_ranks
from quadriga.backends.ray.cluster import cluster_nodes, kill_actor
from quadriga.backends.ray.pickling import send_code_of_loaded_files
from quadriga.errors import CallTimeoutError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.dispatch import Call
from quadriga.single_controller.environment import preloaded
from quadriga.single_controller.worker import plain_class

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import ActorFactory, Ref


def init_parameters() -> frozenset[str]:
    """Return the names of the arguments that `ray.init` documents."""
    parameters = inspect.signature(ray.init).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


def is_reference(value: object) -> TypeGuard[Ref]:
    """Return whether a value is a reference of Ray."""
    return isinstance(value, ray.ObjectRef)


def all_references(values: object) -> TypeGuard[list[Ref]]:
    """Return whether a value is a list of references, and not empty."""
    return isinstance(values, list | tuple) and bool(values) and all(map(is_reference, values))


def values_of(refs: Sequence[Ref], timeout: float | None = None, source: str = "") -> list[object]:
    """Wait for references and return their objects, as `ray.get`.

    `source`: what they are, for messages. Raises `CallTimeoutError` after `timeout` seconds. None
    is for calls whose length is the user's choice: a whole training, a group without a deadline.
    """
    try:
        return list(ray.get(list(refs), timeout=timeout))
    except GetTimeoutError as error:
        raise CallTimeoutError(
            f"{source or 'a reference of Ray'} exceeded its deadline of {timeout:g} s. Give the "
            "group a larger timeout.",
            method=source,
        ) from error


def stored(value: object) -> Ref:
    """Put an object into Ray's store and return its reference, as `ray.put`."""
    return ray.put(value)


def actor_method(actor: object, name: str) -> Callable[..., Ref]:
    """Return the function that starts a method of an actor of any class."""
    return cast("Callable[..., Ref]", getattr(actor, name).remote)


WorkerGroupRegisterCenter: Any = ray.remote(num_cpus=0)(start.WorkerGroupRegisterCenter)  # untyped


def create_worker_group_register_center(name: str, info: object) -> Any:
    """Start a register center of a program's own as the actor `name`. Return its handle."""
    return WorkerGroupRegisterCenter.options(name=name).remote(info)


class ProgramActor:
    """Runs one method of a user's class, in a process that finds the modules of the controller."""

    def run(self, search_path: Sequence[str], preload: Sequence[str], sent: bytes) -> object:
        """Build the class and call its method.

        Args:
            search_path: where the controller finds modules.
            preload: modules to import first.
            sent: (function to call first, class, name of the method, arguments), pickled.
        """
        sys.path.extend(path for path in search_path if path not in sys.path)
        for module in preload:
            importlib.import_module(module)
        # Unpickled here and not by Ray, because it imports the user's modules.
        first, cls, method, args = pickle.loads(sent)
        if first is not None:
            first()
        return getattr(cls(), method)(*args)


def run_in_actor(
    cls: object, method: str, *args: object, first: Callable[[], object] | None = None
) -> object:
    """Build a class in an actor, call one method, end the actor, and return the method's value.

    `cls`: a class, or the result of `ray.remote(cls)`, whose options are the actor's. `first`: a
    function that the actor calls before it builds the class. Raises what the method raised.

    The actor needs no CPU, unless a node has none: that node, a head node as a rule, is kept free
    of it by asking for one.
    """
    send_code_of_loaded_files()
    sent = cloudpickle.dumps(  # type: ignore[no-untyped-call]  # untyped in Ray
        (first, plain_class(cls), method, args)
    )
    given: Mapping[str, object] = getattr(cls, "_default_options", None) or {}
    factory = cast("ActorFactory", ray.remote(ProgramActor))
    cpus = int(any(not node.resources.get("CPU") for node in cluster_nodes() if node.alive))
    actor = factory.options(**{"num_cpus": cpus, **given}).remote()
    search_path = [path for path in sys.path if os.path.isdir(path)]
    try:
        return values_of([actor_method(actor, "run")(search_path, preloaded(), sent)])[0]
    finally:
        kill_actor(actor)


def write_timeline(path: str) -> None:
    """Write a trace of all tasks, in Chrome's format, to a file."""
    ray.timeline(filename=path)


def submit_values(ranks: RankSet, targets: Sequence[int], calls: Sequence[Call]) -> list[Ref]:
    """Send `calls[i]` to rank `targets[i]`. Return the references to their values.

    The tasks are named "role.method". Calls of one controller start in the order in which they were
    sent, whichever function has sent them. Raises as `send_to_ranks`.
    """
    label, key = calls[0].label, f"value of {calls[0].label}"

    def send(handle: RankHandle, *arguments: object) -> Ref:
        if key not in handle.methods:
            handle.methods[key] = handle.native.quadriga_invoke_value.options(name=label).remote
        method: Callable[..., Ref] = handle.methods[key]
        return method(*arguments)

    return send_to_ranks(ranks, [ranks.handles[target] for target in targets], calls, send)


def pending_values(refs: Sequence[Ref]) -> list[RayPending]:
    """Return what a `DataProtoFuture` waits for, for the references of batches."""
    return [pending_of(ref, "a reference of Ray") for ref in refs]
