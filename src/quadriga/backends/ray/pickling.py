"""Pickling of calls that are more than plain data.

They are pickled by cloudpickle. Code of the user's files that workers cannot import by name is sent
with what uses it.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import sysconfig
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import ray
from ray import cloudpickle

from quadriga.errors import DispatchError
from quadriga.protocol.storage import Transport, importable_spec, transports
from quadriga.single_controller.dispatch import Call, SharedArgument
from quadriga.single_controller.rank_host import private

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from quadriga.backends.ray.cluster import Ref

    Counted: TypeAlias = Ref | ActorHandle[object]

BIG = 100 * 1024
"""Bytes. Ray sends a smaller argument inside the call and stores a larger one once per call."""
_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "")
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_seen: weakref.WeakSet[ModuleType] = weakref.WeakSet()
_latest: tuple[int, ModuleType | None] = (0, None)
"""At the last look: how many modules there were, and which had been loaded last."""


def send_code_of_loaded_files() -> None:
    """Have functions and classes of modules that were loaded by path pickled by value from now on.

    If the name of a module leads the importers to another file, or to none, the module exists in
    this process only, and a worker could not look up its functions and classes. The function looks
    again whenever modules have been loaded since, and at no module twice.
    """
    global _latest
    modules = sys.modules
    newest = len(modules), modules[next(reversed(modules))]
    if _latest == newest:
        return
    _latest = newest
    for name, module in list(modules.items()):
        # Not `isinstance`: the libraries of cffi say that they are modules, and cannot be weakly
        # referenced.
        if not issubclass(type(module), ModuleType) or module in _seen:
            continue
        _seen.add(module)
        file = module.__dict__.get("__file__")
        if not file or not _is_users(name, file):
            continue
        if getattr(importable_spec(name), "origin", None) != file:
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # untyped


def _is_users(name: str, file: str) -> bool:
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "quadriga":
        return False  # cloudpickle pickles what `__main__` defines by value without our help
    return os.path.isabs(file) and file.endswith(".py") and not file.startswith(_INSTALLED)


@dataclass(slots=True)
class RayShared(SharedArgument):
    """A value in Ray's store. `label`: (role, method) if the value is a call."""

    ref: Ref
    label: tuple[str, str] = ("", "")

    def open(self) -> object:
        """Return the value. Arrays of the user's object are read-only: a method gets copies."""
        value: object = ray.get(self.ref)
        return value if isinstance(value, SharedArgument) else private(value)


@dataclass(slots=True)
class PickledCall(SharedArgument):
    """A call, or one argument, that was pickled here. The rank unpickles it, and not Ray.

    `buffers` are the large arrays of the call, which Ray sends without copying them. `refs` are the
    references and actor handles in it, which are not in the bytes. Ray must see them: it keeps an
    object or actor while a call needs it. One that it does not see being sent exists until this
    process ends.
    """

    label: tuple[str, str]
    """(role, method), for the error if the call cannot be unpickled."""
    data: bytes
    buffers: Sequence[pickle.PickleBuffer]
    refs: Sequence[Counted]

    @property
    def nbytes(self) -> int:
        """The size of the bytes and buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def open(self) -> object:
        """Return the call."""
        _thread.refs = self.refs
        # Buffers that Ray has received are read-only, and the method may write into its arrays.
        buffers = [b.raw() if isinstance(b, pickle.PickleBuffer) else b for b in self.buffers]
        try:
            return pickle.loads(self.data, buffers=map(bytearray, buffers))
        finally:
            _thread.refs = ()


class _Thread(threading.local):
    """What this thread pickles or unpickles."""

    refs: Sequence[Counted] = ()
    """The references and actor handles of the call that is unpickled."""
    pickles = False
    """Whether a call is pickled."""


_thread = _Thread()
# A batch inside an object of the user is sent as its references, and not as its bytes.
transports.append(Transport((), lambda: _thread.pickles))


def _reference(index: int) -> Counted:
    return _thread.refs[index]


class _CallPickler(cloudpickle.Pickler):
    """Pickle a call. Its references and actor handles are collected in `refs` and replaced by their
    numbers."""

    refs: list[Counted]

    def reducer_override(self, value: object) -> Any:  # as cloudpickle returns it
        """Return how `value` is pickled. Called for every object that is not of a builtin type."""
        if isinstance(value, ray.ObjectRef | ray.actor.ActorHandle):
            self.refs.append(value)
            return _reference, (len(self.refs) - 1,)
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # the rank may write into it
        return super().reducer_override(value)  # type: ignore[no-untyped-call]  # cloudpickle


def pickled_call(call: Call) -> PickledCall:
    """Return a call that holds objects or code of the user, or much data.

    Raises `DispatchError` if an argument cannot be pickled.
    """
    send_code_of_loaded_files()
    call = replace(
        call,
        args=tuple(map(_top_level, call.args)),
        kwargs={name: _top_level(value) for name, value in call.kwargs.items()},
    )
    try:
        return _pickled(call, (call.role, call.method))
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DispatchError(
            f"{call.label}: an argument cannot be sent to the workers: {first_line}. Pass data "
            "that can be pickled, or let the worker build the object itself."
        ) from error


def _pickled(value: object, label: tuple[str, str]) -> PickledCall:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _CallPickler(file, 5, buffers.append)  # type: ignore[no-untyped-call]  # cloudpickle
    pickler.refs = []
    _thread.pickles = True
    try:
        pickler.dump(value)  # type: ignore[no-untyped-call]  # cloudpickle has no types
    finally:
        _thread.pickles = False
    return PickledCall(label, file.getvalue(), buffers, pickler.refs)


def shared_value(value: object) -> object:
    """Return a reference to an argument in the store, the argument if it is small or cannot be
    pickled. In the last case `pickled_call` raises the error, which names the call."""
    send_code_of_loaded_files()
    try:
        pickled = _pickled(value, ("", ""))
    except Exception:  # anything that the user's objects may raise when they are pickled
        return value
    return RayShared(ray.put(pickled)) if pickled.nbytes > BIG else value


def _top_level(value: object) -> object:
    """Return an argument for a reference among the arguments that is opened by the rank.

    As in Ray itself, a method receives the object of a reference that is an argument, and the
    reference of one inside another argument.
    """
    return RayShared(value) if isinstance(value, ray.ObjectRef) else value
