"""Calls that are more than plain data: pickled by cloudpickle, and what is put into the store."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from ray import cloudpickle

from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import DispatchError
from quadriga.protocol.storage import Transport, transports
from quadriga.single_controller.call import Call, SharedArgument

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from quadriga.backends.ray.cluster import Ref

    Counted: TypeAlias = Ref | ActorHandle[object]


class RayShared(SharedArgument):
    """A value in Ray's store. `label`: (role, method) if the value is a call."""

    __slots__ = ("label", "ref")

    def __init__(self, ref: Ref, label: tuple[str, str] = ("", "")) -> None:
        self.ref = ref
        self.label = label

    def open(self) -> object:
        """Return the value."""
        return ray.get(self.ref)

    def __reduce__(self) -> tuple[object, ...]:
        return RayShared, (self.ref, self.label)


class PickledCall(SharedArgument):
    """A call that was pickled here. The rank unpickles it, and not Ray.

    `buffers` are the large arrays of the call, which Ray sends without copying them. `refs` are the
    references and actor handles in it, which are not in the bytes. Ray must see them: it keeps an
    object or actor while a call needs it. One that it does not see being sent exists until this
    process ends.
    """

    __slots__ = ("buffers", "data", "label", "refs")

    def __init__(
        self,
        label: tuple[str, str],
        data: bytes,
        buffers: Sequence[pickle.PickleBuffer],
        refs: Sequence[Counted],
    ) -> None:
        self.label = label
        """(role, method), for the error if the call cannot be unpickled."""
        self.data, self.buffers, self.refs = data, buffers, refs

    @property
    def nbytes(self) -> int:
        """The size of the bytes and buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def open(self) -> object:
        """Return the call."""
        _unpickling.refs = self.refs
        try:
            return pickle.loads(self.data, buffers=self.buffers)
        finally:
            _unpickling.refs = ()

    def __reduce__(self) -> tuple[object, ...]:
        return PickledCall, (self.label, self.data, self.buffers, self.refs)


class _Unpickling(threading.local):
    """The references and actor handles of the call that this thread unpickles."""

    refs: Sequence[Counted] = ()


class _Pickling(threading.local):
    """Whether this thread pickles a call."""

    active = False


_unpickling, _pickling = _Unpickling(), _Pickling()
# A batch inside an object of the user is sent as its references, and not as its bytes.
transports.append(Transport((), lambda: _pickling.active))


def _reference(index: int) -> Counted:
    return _unpickling.refs[index]


class _CallPickler(cloudpickle.Pickler):
    """Pickle a call. Its references and actor handles are collected in `refs` and replaced by their
    numbers."""

    def __init__(
        self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], None]
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # cloudpickle has no types
            file, protocol=5, buffer_callback=buffer_callback
        )
        self.refs: list[Counted] = []

    def reducer_override(self, value: object) -> Any:  # as cloudpickle returns it
        """Return how `value` is pickled. Called for every object that is not of a builtin type."""
        if isinstance(value, ray.ObjectRef | ray.actor.ActorHandle):
            self.refs.append(value)
            return _reference, (len(self.refs) - 1,)
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
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _CallPickler(file, buffers.append)
    _pickling.active = True
    try:
        pickler.dump(call)  # type: ignore[no-untyped-call]  # cloudpickle has no types
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DispatchError(
            f"{call.label}: an argument cannot be sent to the workers: {first_line}. Pass data "
            "that can be pickled, or let the worker build the object itself."
        ) from error
    finally:
        _pickling.active = False
    return PickledCall((call.role, call.method), file.getvalue(), buffers, pickler.refs)


def shared_value(value: object) -> object:
    """Return a reference to an argument in the store, the argument if it cannot be pickled.

    `pickled_call` then raises the error, which names the call.
    """
    send_code_of_loaded_files()
    try:
        return RayShared(ray.put(value))
    except ray.exceptions.RayError:  # of the store
        raise
    except Exception:  # anything that the user's objects may raise when they are pickled
        return value


def _top_level(value: object) -> object:
    """Return an argument for a reference among the arguments that is opened by the rank.

    As in Ray itself, a method receives the object of a reference that is an argument, and the
    reference of one inside another argument.
    """
    return RayShared(value) if isinstance(value, ray.ObjectRef) else value
