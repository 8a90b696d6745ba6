"""Small functions of verl's utility modules."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from quadriga import protocol
from quadriga.errors import ConflictError
from quadriga.single_controller.ranks.environment import environment


def temp_env_var(key: str, value: str) -> AbstractContextManager[None]:
    """Set an environment variable for the length of a `with` block."""
    return environment({key: value})


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every key with the prefix in front, unless it has it already."""
    return {key if key.startswith(prefix) else f"{prefix}{key}": v for key, v in data.items()}


def append_to_dict(
    data: dict[str, list[Any]], new_data: Mapping[str, Any], prefix: str = ""
) -> None:
    """Append each value to the list under its key, or extend the list by a list."""
    for key, value in new_data.items():
        name = key if not prefix or key.startswith(prefix) else f"{prefix}/{key}"
        entries = data.setdefault(name, [])
        entries.extend(value) if isinstance(value, list) else entries.append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """`dict1`, with what `dict2` adds. Raises ConflictError where they differ."""
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise ConflictError(
                f"Both dicts hold {key!r}, with different values: {dict1[key]!r} and {value!r}.",
                field=key,
            )
        dict1[key] = value
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dicts of equal keys, turned inside out."""
    keys: Iterable[str] = list_of_dict[0] if list_of_dict else ()
    return {key: [entry[key] for entry in list_of_dict] for key in keys}


def convert_to_regular_types(obj: Any) -> Any:
    """Mappings and sequences of any kind as dicts and lists."""
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [convert_to_regular_types(value) for value in obj]
    return obj


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Put objects into the store from threads; gives Ray references where Ray keeps them."""
    from quadriga.backends.ray.calls.store import RayStore

    with protocol.use_store(RayStore()):
        handles = protocol.parallel_put(data_list, max_workers)
    return [getattr(handle, "ref", handle) for handle in handles]


def get_event_loop() -> asyncio.AbstractEventLoop:
    """This thread's event loop, a new one if it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def auto_await(func: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function that may be called from anywhere: inside a running loop it gives the
    coroutine, elsewhere it runs it to its end."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not inspect.iscoroutine(result):
            return result
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, result).result()
        return result

    return call


def all_gather_data_proto(data: Any, process_group: Any) -> None:
    """Every rank's rows in every rank, in place, in the order of ranks."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data.to("cpu"), group=process_group)
    joined = protocol.DataProto.concat(gathered)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch
