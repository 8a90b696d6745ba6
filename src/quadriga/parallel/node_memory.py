"""The weight files of a model folder, read once on each node into memory that its ranks share.

    first rank of a node   reads the files ──► anonymous memory (memfd) ──► loads from it
                                │ its process and the numbers of its descriptors
    other ranks            open /proc/PID/fd/N                          ──► load from it

Loading maps the memory. A tensor that keeps its dtype and its device is a view of it, so the ranks
of a node hold one copy of such weights until they write to them. Without this, each rank reads the
files, which a network file system may send once for each of them.

Nothing is left in /dev/shm: the memory has no name, and the kernel frees it with its last
descriptor and its last mapping, also if the processes are killed.

consumes      the safetensors files of a folder
waits for     all ranks of the process group, which load the same folders in the same order
produces      a folder of links, which is removed at the end of the `with` block
unblocked by  the end of the read on every node
"""

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from quadriga.errors import ModelError
from quadriga.parallel.device import get_device_name
from quadriga.parallel.distributed import gather_over_ranks, init_distributed, on_all_ranks, rank

READ_S = 1800.0
"""Seconds within which the first rank of a node reads the files."""
_READ_ONLY = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""No process can change the weights of another one."""


ValueT = TypeVar("ValueT")


def on_joined_ranks(work: Callable[[], ValueT]) -> ValueT:
    """Join the process group, and return the result of `work` after all ranks have theirs.

    What may fail before `folder_in_memory` is done here: a rank that failed by itself would leave
    the others waiting in it.

    Raises:
        ModelError: `work` raised it on this rank or on another one.
    """
    # Ranks of the local backend share one process. They have no port, and read by themselves.
    if os.environ.get("MASTER_PORT", "0").isdecimal():
        init_distributed(get_device_name())
    return on_all_ranks(work)


@contextmanager
def folder_in_memory(folder: Path, weight_files: Callable[[Path], list[str]]) -> Iterator[Path]:
    """Yield a folder with the files of `folder`, whose weights are in memory shared by the node.

    If no node has several ranks, `folder` itself is yielded.

    Args:
        weight_files: returns the names of the weight files in a folder, or raises `ModelError`.

    Raises:
        ModelError: on all ranks, a file cannot be read or opened on one.
    """
    names = on_joined_ranks(lambda: weight_files(folder))
    nodes = gather_over_ranks(socket.gethostname())
    if len(set(nodes)) == len(nodes):
        yield folder
        return
    reader = nodes.index(nodes[rank()])
    with ExitStack() as stack:
        # A group of its own, because reading can take longer than a collective of training.
        waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=READ_S))
        own_names = names if rank() == reader else []
        own = on_all_ranks(lambda: _read(folder, own_names, stack), group=waiting)
        dist.destroy_process_group(waiting)
        pid, numbers = gather_over_ranks((os.getpid(), own))[reader]
        files = on_all_ranks(lambda: _opened(folder, pid, numbers, stack))
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="quadriga-model-"))
        # With the folder's own name, by which transformers caches the code of a model.
        linked = Path(made) / folder.resolve().name
        linked.mkdir()
        for entry in folder.iterdir():
            held = files.get(entry.name)
            target = entry.resolve() if held is None else Path(f"/proc/self/fd/{held}")
            (linked / entry.name).symlink_to(target)
        yield linked


def _read(folder: Path, names: list[str], stack: ExitStack) -> dict[str, int]:
    """Return descriptors of memory with these files of the folder; `stack` closes them."""
    files: dict[str, int] = {}
    try:
        for name in names:
            held = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, held)
            with (folder / name).open("rb") as source, os.fdopen(os.dup(held), "wb") as copy:
                shutil.copyfileobj(source, copy, 16 * 2**20)
            fcntl.fcntl(held, fcntl.F_ADD_SEALS, _READ_ONLY)
            files[name] = held
    except (OSError, AttributeError) as error:  # a system without memfd_create
        raise _not_shared(folder, error) from error
    return files


def _opened(folder: Path, pid: int, numbers: Mapping[str, int], stack: ExitStack) -> dict[str, int]:
    """Return own descriptors of the files that another process has read; `stack` closes them."""
    files: dict[str, int] = {}
    try:
        for name, number in numbers.items():
            files[name] = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, files[name])
    except OSError as error:
        raise _not_shared(folder, error) from error
    return files


def _not_shared(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"the weights in {folder} cannot be shared by the ranks of a node: {error}; set "
        "model.use_shm=false"
    )
