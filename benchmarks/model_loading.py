"""Measure how a training engine loads a model: by shards, and whole on every rank.

    python benchmarks/model_loading.py --out result.json
    python benchmarks/model_loading.py --quick          # a small model, one load per way and rank

The model is a Llama of 64 M random parameters, stored in bfloat16 in several files and loaded in
float32, on 2 and on 4 ranks (processes with gloo). Each load is in new processes that have imported
everything; the ways alternate. Figures of one rank, the largest of the ranks, medians over loads:

- peak: the most resident memory during the load, above what the process had before. Pages of the
  files that the process maps count, until the system takes them back.
- kept: the same after the load.
- read: bytes of the weight files that the process reads, or copies from a mapping of them.
- seconds: from the call to the engine, all ranks on the machine's cores together.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, modeling_utils

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import loading
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.weights import TensorReader, WeightNames
from quadriga.parallel.distributed import init_distributed

RANKS = (2, 4)
WAYS = ("sharded", "whole")
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
QUICK = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
Figures = dict[str, float]


class ReadBytes:
    """Counts the bytes that this process reads from weight files, by either way."""

    def __init__(self) -> None:
        self.count = 0
        own_read, counter = TensorReader._fill, self

        def fill(reader: TensorReader, piece: torch.Tensor, file: str, position: int) -> None:
            counter.count += len(piece)
            own_read(reader, piece, file, position)

        class Slice:
            def __init__(self, stored) -> None:
                self._stored = stored

            def __getitem__(self, index):
                tensor = self._stored[index]
                counter.count += tensor.nbytes
                return tensor

            def __getattr__(self, name: str):
                return getattr(self._stored, name)

        class File:
            def __init__(self, *args, **kwargs) -> None:
                self._file = safe_open(*args, **kwargs)

            def get_slice(self, name: str) -> Slice:
                return Slice(self._file.get_slice(name))

            def __getattr__(self, name: str):
                return getattr(self._file, name)

            def __exit__(self, *error) -> None:
                self._file.__exit__(*error)

        TensorReader._fill = fill
        modeling_utils.safe_open = File


def resident(name: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def load(folder: str) -> FSDPEngine:
    # The choice of the head would compute an example, for which parameters are gathered.
    settings = EngineConfig(dtype="float32", fused_head=False)
    return FSDPEngine(ModelConfig(path=folder), settings, OptimConfig())


def measure_rank(rank: int, ranks: int, way: str, folders: list[str], port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if way == "whole":
        loading.match_names = lambda *_, **__: WeightNames(reason="for comparison")
    init_distributed()
    small, folder = folders
    load(small)  # imports what loading needs
    gc.collect()
    counter = ReadBytes()
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = resident("VmRSS"), time.perf_counter()
    engine = load(folder)
    seconds = time.perf_counter() - began
    peak = resident("VmHWM") - before
    gc.collect()
    found = {
        "peak_mb": peak / 1e6,
        "kept_mb": (resident("VmRSS") - before) / 1e6,
        "read_mb": counter.count / 1e6,
        "seconds": seconds,
    }
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    del engine
    torch.distributed.destroy_process_group()


def measure(ranks: int, way: str, folders: list[str], out: Path) -> Figures:
    """Return the largest figures of the ranks in one load."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(measure_rank, args=(ranks, way, folders, port, str(out)), nprocs=ranks)
    found = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return {name: max(figures[name] for figures in found) for name in found[0]}


def write_model(folder: Path, sizes: dict[str, int]) -> int:
    """Write a model in bfloat16; return its number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16384, num_attention_heads=8, num_key_value_heads=4, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, one load per way")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    result: dict[str, object] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root / "small", QUICK)
        parameters = write_model(root / "model", QUICK if options.quick else SIZES)
        result |= {"parameters": parameters, "whole_float32_mb": 4 * parameters / 1e6}
        folders = [str(root / "small"), str(root / "model")]
        for ranks in RANKS:
            loads: dict[str, list[Figures]] = {way: [] for way in WAYS}
            for _ in range(1 if options.quick else 3):
                for way in WAYS:
                    loads[way].append(measure(ranks, way, folders, root / "figures"))
                    print(ranks, way, loads[way][-1], file=sys.stderr)
            result[f"{ranks} ranks"] = {
                way: {name: statistics.median(f[name] for f in found) for name in found[0]}
                for way, found in loads.items()
            }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
