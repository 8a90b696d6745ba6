"""Small functions of verl's utility modules: dicts, the accelerator, files, tokenizers."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from quadriga import protocol
from quadriga.compat.verl.controller.references import stored
from quadriga.compat.verl.controller.worker import get_visible_devices_keyword
from quadriga.config.hub import HUB_PREFIX
from quadriga.config.paths import is_remote, local_path
from quadriga.config.stores import CACHE, fetched
from quadriga.errors import ConfigError, ConflictError, FieldError, LengthError, ModelError
from quadriga.parallel.device import get_device_name
from quadriga.single_controller import ray_noset_visible_devices
from quadriga.single_controller.environment import environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedTokenizerBase

__all__ = ["get_visible_devices_keyword", "ray_noset_visible_devices"]

ValueT = TypeVar("ValueT")

# verl.utils.py_functional, verl.utils.ray_utils and verl.protocol


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
        if dict1.setdefault(key, value) != value:
            raise ConflictError(
                f"Both dicts have the key {key!r}, with different values: {dict1[key]!r} and "
                f"{value!r}. Remove or rename one of them.",
                field=key,
            )
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
                text = f"entry {number} has the key {key!r}, which the first entry lacks"
                raise FieldError(text, field=key)
            lists[key].append(value)
    return lists


class DynamicEnumMeta(type):
    """`member in Own`, `Own["NAME"]`, and the members in order of a `DynamicEnum`."""

    _registry: dict[str, DynamicEnum]

    def __iter__(cls) -> Iterator[DynamicEnum]:
        return iter(cls._registry.values())

    def __contains__(cls, item: object) -> bool:
        return item in (cls._registry if isinstance(item, str) else cls._registry.values())

    def __getitem__(cls, name: str) -> DynamicEnum:
        return cls._registry[name]

    def names(cls) -> list[str]:
        """Return the name of every member."""
        return list(cls._registry)

    def values(cls) -> list[DynamicEnum]:
        """Return every member."""
        return list(cls)


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration that grows: `class Own(DynamicEnum)`, `Own.register("a")` makes `Own.A`."""

    _registry: ClassVar[dict[str, DynamicEnum]] = {}
    _next_value = 0

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls._registry = dict(vars(cls).get("_registry", {}))  # not that of the base class

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (type(self), self.name)

    @classmethod
    def register(cls, name: str) -> DynamicEnum:
        """Add a member under its name in capital letters. Raises `ConfigError` if it exists."""
        key = name.upper()
        if key in cls._registry:
            raise ConfigError(f"{cls.__name__}.{key} is registered already; choose another name")
        member = cls._registry[key] = cls(key, cls._next_value)
        setattr(cls, key, member)
        cls._next_value += 1
        return member

    @classmethod
    def remove(cls, name: str) -> DynamicEnum:
        """Remove a member and return it. Raises KeyError if it does not exist."""
        member = cls._registry.pop(name.upper())
        delattr(cls, member.name)
        return member

    @classmethod
    def from_name(cls, name: str) -> DynamicEnum | None:
        """Return the member of that name in any case, None if there is none."""
        return cls._registry.get(name.upper())


def parallel_put(data_list: Sequence[object], max_workers: int | None = None) -> list[object]:
    """Put objects into Ray's object store from threads. Return their references, in order.

    `max_workers`: the number of threads; None: one per object, 16 at most. Raises `LengthError` for
    an empty list and for fewer than one thread.
    """
    if not data_list:
        raise LengthError("parallel_put: got an empty list, expected at least one object")
    workers = min(16, len(data_list)) if max_workers is None else max_workers
    if workers < 1:
        raise LengthError(f"parallel_put: expected max_workers of 1 or more, got {max_workers}")
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(stored, data_list))


def all_gather_data_proto(data: protocol.DataProto, process_group: ProcessGroup) -> None:
    """Replace the rows of `data`, in place, by those of all ranks, in the order of ranks."""
    import torch.distributed as dist

    # On the CPU, because objects are gathered as pickled bytes.
    gathered: list[protocol.DataProto] = [data] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data.to("cpu"), group=process_group)
    joined = protocol.DataProto.concat(gathered)
    data.batch, data.non_tensor_batch = joined.batch, joined.non_tensor_batch


# verl.utils.device

_RESOURCES = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
_COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}

is_cuda_available = torch.cuda.is_available()
is_npu_available = get_device_name() == "npu"


def get_torch_device() -> ModuleType:
    """Return the torch module of the device type: `torch.cuda`, `torch.npu` or `torch.cpu`."""
    return cast(ModuleType, getattr(torch, get_device_name()))


def get_device_id() -> int:
    """Return the index of the current device, 0 on a CPU."""
    return 0 if get_device_name() == "cpu" else int(get_torch_device().current_device())


def get_nccl_backend() -> str:
    """Return the collective library of the device type: "nccl", "hccl" or "gloo"."""
    return _COLLECTIVES[get_device_name()]


def get_resource_name() -> str:
    """Return Ray's resource name of the device type: "GPU", "NPU" or "CPU"."""
    return _RESOURCES[get_device_name()]


def set_expandable_segments(enable: bool) -> None:
    """Set `expandable_segments` of the CUDA allocator. Other device types ignore it."""
    if get_device_name() == "cuda":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{enable}"


def auto_set_device(config: object) -> None:
    """Set `config.trainer.device` to the device type of this process, unless it is "cpu"."""
    trainer: Any = getattr(config, "trainer", None)  # a section of any kind
    if trainer is not None and getattr(trainer, "device", "auto") != "cpu":
        trainer.device = get_device_name()


# verl.utils.fs and verl.utils.tokenizer

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of a model folder that describe a processor."""
_SIDES = ("padding_side", "truncation_side")
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
OPTIONS = (*_SIDES, *_TOKENS, "model_max_length", "chat_template")
"""Attributes of a tokenizer that `hf_tokenizer` sets."""


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: object) -> str:
    """Return the path of a file or folder of this machine, unchanged; `~` is replaced. A remote one
    (`hdfs://…`, `s3://…`) is fetched into the cache of `quadriga.config.stores`.

    Raises `ConfigError` for a `cache_dir` of a remote path, and for an unknown scheme.
    """
    path = local_path(src, "src", hub=True, remote=True)
    if not is_remote(path) or path.startswith(HUB_PREFIX):
        return path
    if cache_dir is not None:
        text = (
            f"copy_to_local: cache_dir={cache_dir!r}; remote files are cached in {CACHE}: remove it"
        )
        raise ConfigError(text, key="cache_dir")
    return str(fetched(path))


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    *,
    trust_remote_code: bool = False,
    **options: object,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or a model of the hub. It has a padding token.

    Args:
        name_or_path: the folder, or `hf://owner/name`.
        correct_pad_token: True, because batches are padded.
        correct_gemma2: the end token of gemma-2-2b-it is that of a turn, as in verl.
        trust_remote_code: run code of the folder.
        options: `padding_side` ("left" by default) and the other names in `OPTIONS`.

    Raises:
        ModelError: the folder has no tokenizer, or `correct_pad_token` is False.
        ConfigError: there is no such option, or the tokenizer cannot have its value.
    """
    from quadriga.models import load_tokenizer

    if not correct_pad_token:
        text = "correct_pad_token=False leaves no padding token, but batches are padded; leave it"
        raise ModelError(f"hf_tokenizer: {text} True", path=name_or_path)
    tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    if correct_gemma2 and "gemma-2-2b-it" in name_or_path:
        options = {"eos_token": "<end_of_turn>", **options}
    for name, value in options.items():
        problem = ""
        if name not in OPTIONS:
            problem = f"is no option; the options are {', '.join(OPTIONS)}"
        elif name in _SIDES and value not in ("left", "right"):
            problem = "is neither left nor right"
        elif name in _TOKENS and value not in tokenizer.get_vocab():
            # A tokenizer would take the id of the unknown token for one that it does not have.
            problem = "is no token of the vocabulary"
        if problem:
            raise ConfigError(f"hf_tokenizer: {name}={value!r} {problem}", key=name)
        setattr(tokenizer, name, value)
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: object) -> None:
    """Return None: a model of text has no processor. The other arguments are for processors.

    Raises `ModelError` for a model folder with a processor of images, video or audio.
    """
    for name in _PROCESSORS:
        if (Path(name_or_path).expanduser() / name).is_file():
            raise ModelError(
                f"hf_processor: {name_or_path} has a {name}, and Quadriga loads the image "
                "processor of a model itself; remove the call (docs/concepts/images.md)",
                path=name_or_path,
            )
