"""The files of the package that one call of a worker method passes, controller and worker together.

    python benchmarks/call_path.py             # prints JSON
    python benchmarks/call_path.py --max 20    # exit code 1 if the call passes more files

The call is `group.update_actor(batch)` on Ray with two ranks: its dispatch mode splits the batch by
the data-parallel ranks of a mesh, the fields of the batch are remote, and the method reads two of
them. A file is counted if one of its functions runs during the call, in any thread. Imports are not
counted: the same call runs once before.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict

import quadriga
from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

ROWS, TOKENS = 512, 512  # 512 KiB per field and rank: large enough to be stored as a remote field
RANKS = 2
QUIET_S = 0.3
"""Seconds before and after the call in which the ranks finish other work."""


class FileTrace:
    """Records when functions of the package are called in this process, from now on."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, str]] = []
        self._package = f"{Path(quadriga.__file__).parent}/"
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def files(self, start_ns: int, stop_ns: int) -> list[str]:
        """Return the files between two times of the monotonic clock, in the order of first calls.

        Processes of one machine share that clock. Paths are relative to the package.
        """
        return list(dict.fromkeys(name for ns, name in self._calls if start_ns <= ns <= stop_ns))

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(self._package):
            self._calls.append((time.monotonic_ns(), name.removeprefix(self._package)))


class Actor(Worker):
    """A worker with an `update_actor` that only reads its fields."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", self.rank, True)
        self.trace = FileTrace()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files(self, start_ns: int, stop_ns: int) -> list[str]:
        """Return the files that this rank passed between two times."""
        return self.trace.files(start_ns, stop_ns)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return `old_log_probs` and `advantages` [B, T]."""
        rows = len(data)
        return DataProto.from_dict(
            {"old_log_probs": torch.zeros(rows, TOKENS), "advantages": torch.ones(rows, TOKENS)}
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_actor(self, data: DataProto) -> DataProto:
        """Read both fields and return metrics."""
        loss = float((data.batch["old_log_probs"] * data.batch["advantages"]).sum())
        return DataProto(meta_info={"metrics": {"loss": loss}})


def call_path() -> dict[str, list[str]]:
    """Return the files that the call passes: {"controller": …, "worker": …}, in call order."""
    trace = FileTrace()
    backend = get_backend("ray")
    backend.start(num_cpus=RANKS, object_store_memory=200 * 2**20)
    group = backend.worker_group(
        backend.resource_pool([RANKS], use_gpu=False), backend.class_with_args(Actor)
    )
    batch = group.compute_log_prob(DataProto.from_dict({"prompts": torch.zeros(ROWS, 8)}))
    if isinstance(batch.batch, TensorDict):
        raise SystemExit("The fields of the batch are local; this benchmark needs remote fields.")
    group.update_actor(batch)
    # On a busy machine a call may take so long that its wait goes on in slices: the shortest path.
    paths = [_files_of_call(trace, group, batch) for _ in range(3)]
    group.shutdown()
    backend.shutdown()
    return min(paths, key=lambda path: len(set(chain(*path.values()))))


def _files_of_call(trace: FileTrace, group: Any, batch: DataProto) -> dict[str, list[str]]:
    time.sleep(QUIET_S)
    start_ns = time.monotonic_ns()
    group.update_actor(batch)
    stop_ns = time.monotonic_ns()
    time.sleep(QUIET_S)
    of_ranks = group.files(start_ns, stop_ns + int(QUIET_S * 1e9))
    worker = list(dict.fromkeys(chain.from_iterable(of_ranks)))
    return {"controller": trace.files(start_ns, stop_ns), "worker": worker}


def main() -> None:
    """Print the files and their number as JSON. Exit with 1 if there are more than `--max`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--max", type=int, help="largest number of files that is accepted")
    options = parser.parse_args()
    path = call_path()
    total = len({name for names in path.values() for name in names})
    print(json.dumps({**path, "total": total}, indent=2))
    if options.max is not None and total > options.max:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
