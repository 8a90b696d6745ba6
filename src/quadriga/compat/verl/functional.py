"""Small functions from verl's utility modules, under verl's names."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from quadriga import protocol
from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.single_controller.environment import environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

P = ParamSpec("P")
ValueT = TypeVar("ValueT")


def temp_env_var(key: str, value: str) -> AbstractContextManager[None]:
    """Set an environment variable within a `with` block."""
    return environment({key: value})


def rename_dict(data: Mapping[str, ValueT], prefix: str = "") -> dict[str, ValueT]:
    """Return the dict with `prefix` added to every key that does not begin with it."""
    return {key if key.startswith(prefix) else f"{prefix}{key}": v for key, v in data.items()}


def append_to_dict(
    data: dict[str, list[object]], new_data: Mapping[str, object], prefix: str = ""
) -> None:
    """Append each value of `new_data` to the list under its key. A list extends it."""
    for key, value in new_data.items():
        name = key if not prefix or key.startswith(prefix) else f"{prefix}/{key}"
        entries = data.setdefault(name, [])
        entries.extend(value) if isinstance(value, list) else entries.append(value)


def union_two_dict(dict1: dict[str, ValueT], dict2: Mapping[str, ValueT]) -> dict[str, ValueT]:
    """Add the entries of `dict2` to `dict1` in place and return it.

    Raises `ConflictError` if both have different values under one key.
    """
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise ConflictError(
                f"Both dicts have the key {key!r}, with different values: {dict1[key]!r} and "
                f"{value!r}. Remove or rename one of them.",
                field=key,
            )
        dict1[key] = value
    return dict1


def list_of_dict_to_dict_of_list(
    list_of_dict: Sequence[Mapping[str, ValueT]],
) -> dict[str, list[ValueT]]:
    """Return for each key of the first dict the list of the values that the dicts have for it.

    A dict may lack a key; then the list is shorter. Raises `FieldError` for a key that the first
    dict lacks.
    """
    lists: dict[str, list[ValueT]] = {key: [] for key in (list_of_dict[0] if list_of_dict else ())}
    for number, entry in enumerate(list_of_dict):
        for key, value in entry.items():
            if key not in lists:
                raise FieldError(
                    f"list_of_dict_to_dict_of_list: entry {number} has the key {key!r}, which the "
                    f"first entry lacks; it has {', '.join(map(repr, lists)) or 'no key'}. Add the "
                    "key to the first entry.",
                    field=key,
                )
            lists[key].append(value)
    return lists


def convert_to_regular_types(obj: object) -> object:
    """Convert mappings to dicts and sequences to lists, recursively. Strings stay as they are."""
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def parallel_put(data_list: Sequence[object], max_workers: int | None = None) -> list[object]:
    """Put objects into Ray's object store from threads. Return their references, in order.

    `max_workers`: the number of threads; None: one per object, 16 at most. Raises `LengthError` for
    an empty list and for fewer than one thread.
    """
    from quadriga.backends.ray.programs import stored

    if not data_list:
        raise LengthError("parallel_put: expected at least one object, got an empty list")
    workers = min(16, len(data_list)) if max_workers is None else max_workers
    if workers < 1:
        raise LengthError(f"parallel_put: expected max_workers of 1 or more, got {max_workers}")
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(stored, data_list))


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop of this thread, or set and return a new one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def auto_await(
    func: Callable[P, ValueT | Coroutine[object, object, ValueT]],
) -> Callable[P, ValueT | Coroutine[object, object, ValueT]]:
    """Make a coroutine function callable with and without a running event loop.

    Inside a running loop the call returns the coroutine, to be awaited. Without one it runs the
    coroutine to its end and returns the result. Results of plain functions are returned unchanged.
    """

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> ValueT | Coroutine[object, object, ValueT]:
        result = func(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        coroutine = cast("Coroutine[object, object, ValueT]", result)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # no loop runs in this thread
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, coroutine).result()
        return coroutine

    return call


def all_gather_data_proto(data: protocol.DataProto, process_group: ProcessGroup) -> None:
    """Replace the rows of `data`, in place, by those of all ranks, in the order of ranks."""
    import torch.distributed as dist

    # On the CPU, because objects are gathered as pickled bytes.
    gathered: list[protocol.DataProto] = [data] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data.to("cpu"), group=process_group)
    joined = protocol.DataProto.concat(gathered)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
