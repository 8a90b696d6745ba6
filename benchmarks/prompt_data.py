"""Measure what a million prompts cost the controller: in memory, with a new cache, with a cache.

    python benchmarks/prompt_data.py --out result.json
    python benchmarks/prompt_data.py --quick            # 60,000 prompts

The prompts are word problems in the form of GSM8K in one parquet file. `load` makes the dataset;
`batches` collates 100 batches of 256 prompts in a shuffled order. Each way is in a process of its
own. Memory is resident memory above what the process had before: `private` is the memory of the
process itself, and `mapped` is pages of files, which the system can drop at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig
from quadriga.data import PromptDataset, PromptLoader
from quadriga.models import load_tokenizer

WAYS = ("in memory", "cache is made", "cache exists")
BATCHES, BATCH_SIZE = 100, 256


def memory() -> tuple[int, int]:
    """Return (private, mapped) resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
    return sizes["RssAnon"], sizes["RssFile"]


def measure(way: str, file: str, model: str, cache: str) -> dict[str, float]:
    """Load the prompts in one way, in this process."""
    tokenizer = load_tokenizer(model)
    warm_up = PromptDataset.from_rows([{"prompt": "one"}], tokenizer)
    assert len(warm_up) == 1
    private, mapped = memory()
    began = time.perf_counter()
    cache_dir = None if way == "in memory" else cache
    dataset = PromptDataset([file], tokenizer, max_prompt_length=512, cache_dir=cache_dir)
    loaded = time.perf_counter()
    private_loaded, mapped_loaded = memory()
    loader = iter(PromptLoader(dataset, BATCH_SIZE))
    count = min(BATCHES, len(dataset) // BATCH_SIZE)
    began_batches = time.perf_counter()
    for _ in range(count):
        next(loader)
    seconds = time.perf_counter() - began_batches
    private_end, mapped_end = memory()
    return {
        "rows": len(dataset),
        "load_s": loaded - began,
        "private_mb": (private_loaded - private) / 1e6,
        "mapped_mb": (mapped_loaded - mapped) / 1e6,
        "ms_per_batch": 1e3 * seconds / count,
        "private_after_batches_mb": (private_end - private) / 1e6,
        "mapped_after_batches_mb": (mapped_end - mapped) / 1e6,
    }


def write_prompts(folder: Path, count: int) -> tuple[str, str]:
    """Write a parquet file of `count` prompts and a tokenizer; return the paths."""
    run_make_data(
        ArithmeticDataConfig(
            output=str(folder / "data"), model_output=str(folder / "model"), train_size=512,
            val_size=16, sft_size=16, hidden_size=32, num_layers=1,
        )
    )  # fmt: skip
    rows = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    path = folder / "prompts.parquet"
    writer: pq.ParquetWriter | None = None
    for start in range(0, count, 50_000):
        numbers = range(start, min(start + 50_000, count))
        part = [
            rows[n % len(rows)]
            | {"prompt": [_numbered(m, n) for m in rows[n % len(rows)]["prompt"]]}
            for n in numbers
        ]
        table = pa.Table.from_pylist(part)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return str(path), str(folder / "model")


def _numbered(message: dict[str, str], number: int) -> dict[str, str]:
    return message | {"content": f"Problem {number}. {message['content']}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60,000 prompts")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(*options.way)))
        return
    result: dict[str, object] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        file, model = write_prompts(Path(folder), 60_000 if options.quick else 1_000_000)
        result["file_mb"] = Path(file).stat().st_size / 1e6
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, file, model, f"{folder}/cache"]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result[way] = json.loads(found.splitlines()[-1])
            print(way, result[way], file=sys.stderr)
        result["cache_mb"] = sum(f.stat().st_size for f in Path(folder, "cache").iterdir()) / 1e6
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
