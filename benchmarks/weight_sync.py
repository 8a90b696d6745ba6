"""Measure weight syncs between processes: seconds, memory and bytes of each transport.

    python benchmarks/weight_sync.py --out result.json
    python benchmarks/weight_sync.py --quick          # 8 MB, 2 ranks, one sync after the first

Weights in float32 are sharded over the ranks as FSDP2 does (processes with gloo, or one process for
`one process` and `buckets`). The rollout of each rank needs all of them. Per transport, the slowest
rank and the median over syncs after the first, which makes the plan:

- seconds: of a sync with its digests. `digests`: those of one side alone.
- received: bytes that a rank receives. `formula`: (n - 1) / n · M, or M if the rollout is in other
  processes. They must be equal.
- peak: resident memory above that before the sync, at most; for `gather` too. `bucket`: its bound,
  without the weights that are being put together.

`gather` is the way without a plan: every rank gathers each weight with `DTensor.full_tensor()`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from quadriga.parallel.distributed import init_distributed
from quadriga.rollout.base import RolloutEngine, tensor_digest
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.remote import JoinedReceiver, JoinedSender, WeightReceiver, WeightSender
from quadriga.weight_sync.sync import WeightSync
from quadriga.weight_sync.transport import needs_of

ROWS, COLUMNS = 1024, 512  # 2 MiB each
BUCKET = 8 << 20
Figures = dict[str, float]


class Target(RolloutEngine):
    """A rollout engine without computation."""

    name, version = "benchmark", -1
    generate = score = None  # never called: the weights are compared by digests
    abilities = SimpleNamespace(exposes_weights=True, file_names=False)

    def __init__(self, names: Iterable[str]) -> None:
        self.weights = {name: torch.zeros(ROWS, COLUMNS) for name in names}

    def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: str = "whole"
    ) -> None:
        for name, weight in stream:
            self.weights[name].copy_(weight)
        self.version = version

    def weights_digest(self) -> dict[str, int]:
        return {name: tensor_digest(weight) for name, weight in self.weights.items()}

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        return {name: weight.dtype for name, weight in self.weights.items()}


class Source:
    """A training engine without computation."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def shard_stream(self, part: str = "merged") -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


def resident(name: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(sync: Callable[[int], int], repeats: int) -> Figures:
    """Return seconds, peak memory and received bytes of `sync(version)` after the first."""
    sync(1)
    seconds, peaks, received = [], [], 0
    for version in range(2, 2 + repeats):
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = resident("VmRSS"), time.perf_counter()
        received = sync(version)
        seconds.append(time.perf_counter() - began)
        peaks.append(resident("VmHWM") - before)
    return {
        "seconds": statistics.median(seconds),
        "peak_mb": max(peaks) / 1e6,
        "received_mb": received / 1e6,
    }


def start(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    init_distributed()


def sharded(rank: int, ranks: int, count: int) -> Source:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    weights = {}
    for i in range(count):
        torch.manual_seed(i)
        weights[f"w{i}"] = distribute_tensor(torch.randn(ROWS, COLUMNS), mesh, [Shard(0)])
    return Source(weights)


def together(rank: int, ranks: int, count: int, repeats: int, port: int, out: str) -> None:
    """Rank of a group whose ranks train and generate."""
    start(rank, ranks, port)
    source = sharded(rank, ranks, count)
    found: dict[str, object] = {}
    sync = WeightSync(source, Target(source.weights), bucket_bytes=BUCKET)
    found["collective"] = measured(lambda v: sync.run(v)["group"], repeats)
    target = Target(source.weights)

    def gather(version: int) -> int:
        stream = ((n, w.full_tensor() if isinstance(w, DTensor) else w)
                  for n, w in source.weights.items())  # fmt: skip
        target.update_weights(stream, version)
        target.weights_digest()
        return 0

    found["gather"] = measured(gather, repeats)
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def apart(
    rank: int, half: int, count: int, repeats: int, ports: tuple[int, int], tickets, out: str
):
    """The first half of the processes trains, the second half generates."""
    sends = rank < half
    start(rank % half, half, ports[0 if sends else 1])
    found: dict[str, object] = {}
    if sends:
        source = sharded(rank, half, count)
        sender = JoinedSender(source, bucket_bytes=BUCKET, device="cpu")

        def sync(version: int) -> int:
            own = [sender.offer([needs_of(Target(source.weights))] * half, version)]
            dist.broadcast_object_list(own)
            for _ in range(half if rank == 0 else 0):
                tickets.put(own[0])
            sender.send(own[0])
            return 0
    else:
        guard = GuardedRollout(Target(f"w{i}" for i in range(count)))
        receiver = JoinedReceiver(guard, device="cpu")

        def sync(version: int) -> int:
            receiver.receive(tickets.get(timeout=600))
            return guard.moved["group"]

    found["joined"] = measured(sync, repeats)
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def alone(rank: int, count: int, repeats: int, out: str) -> None:
    """One process: the weights stay in place, are copied, or go through buckets."""
    torch.set_num_threads(1)
    source = Source({f"w{i}": torch.randn(ROWS, COLUMNS) for i in range(count)})
    copying = WeightSync(source, Target(source.weights))
    target = Target(source.weights)
    guard = GuardedRollout(target)
    sender, receiver = WeightSender(source, BUCKET), WeightReceiver(guard)

    def buckets(version: int) -> int:
        for part in sender.send(needs_of(guard), version):
            receiver.receive([part])
        receiver.finish()
        return guard.moved["store"]

    def digests(version: int) -> int:
        return len(target.weights_digest()) * 0

    found = {
        "one process": measured(lambda v: copying.run(v).get("group", 0), repeats),
        "buckets": measured(buckets, repeats),
        "digests": measured(digests, repeats),
    }
    Path(f"{out}.0").write_text(json.dumps(found))


def free_ports(count: int) -> tuple[int, ...]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = tuple(probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    return found


def read(out: Path, ranks: Iterable[int]) -> list[dict]:
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in ranks]


def slowest(found: list[dict], name: str) -> Figures:
    return {key: max(figures[name][key] for figures in found) for key in found[0][name]}


def measure(ranks: int, count: int, repeats: int, folder: Path) -> dict[str, object]:
    whole = count * ROWS * COLUMNS * 4 / 1e6
    mp.spawn(alone, args=(count, repeats, str(folder / "alone")), nprocs=1)
    [single] = read(folder / "alone", [0])
    [port] = free_ports(1)
    out = folder / "together"
    mp.spawn(together, args=(ranks, count, repeats, port, str(out)), nprocs=ranks)
    found = read(out, range(ranks))
    shared = (ranks - 1) / ranks * whole
    result: dict[str, object] = {
        "one process": single["one process"] | {"formula_mb": 0.0},
        "buckets": single["buckets"] | {"formula_mb": whole},
        "digests": single["digests"],
        "collective": slowest(found, "collective") | {"formula_mb": shared},
        "gather": slowest(found, "gather"),
    }
    tickets = mp.get_context("spawn").Queue()
    half, out = max(ranks // 2, 1), folder / "apart"
    arguments = (half, count, repeats, free_ports(2), tickets, str(out))
    mp.spawn(apart, args=arguments, nprocs=2 * half)
    result["joined"] = slowest(read(out, range(half, 2 * half)), "joined") | {"formula_mb": whole}
    return result


def goals(result: dict) -> dict[str, object]:
    """Counted bytes must be those of the formulas. Times are figures without a goal."""
    names = ("one process", "buckets", "collective", "joined")
    return {
        f"bytes of {name}": {
            "value": result[name]["received_mb"],
            "met": result[name]["received_mb"] == result[name]["formula_mb"],
        }
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 MB, 2 ranks, one sync")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    ranks, count, repeats = (2, 4, 1) if options.quick else (4, 64, 5)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(ranks, count, repeats, Path(folder))
    setup = {
        "cpus": os.cpu_count(), "load": os.getloadavg()[0], "ranks": ranks,
        "weights_mb": count * ROWS * COLUMNS * 4 / 1e6, "bucket_mb": BUCKET / 1e6,
    }  # fmt: skip
    text = json.dumps({"setup": setup, "results": result, "goals": goals(result)}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
