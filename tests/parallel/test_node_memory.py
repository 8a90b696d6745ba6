"""Weights that the ranks of a node read once and share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, TrainConfig
from quadriga.engines import build_engine, loading as engine_loading
from quadriga.errors import ModelError
from quadriga.models import (
    load_causal_lm,
    loading,
    write_tiny_model,
)
from quadriga.parallel import node_memory
from quadriga.rollout.hf.engine import HFRollout
from quadriga.single_controller.environment import LOCAL_PORT

PROGRAM = textwrap.dedent(
    """
    import json, os, sys

    from quadriga.models import load_causal_lm

    model = load_causal_lm(sys.argv[1], use_shm=True)
    weight = model.get_input_embeddings().weight
    address = weight.data_ptr()
    for line in open("/proc/self/maps"):
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            break
    before = float(weight.sum())
    weight.data.zero_()  # a copy of this process
    print(json.dumps([line.split()[4], line.split()[5], before, model.config.name_or_path]))
    sys.stdout.flush()
    sys.stdin.read()  # keeps its mapping until the test has seen all ranks
    """
)


fails = partial(pytest.raises, ModelError)


def load(folder):
    """As one of two ranks of a node."""
    return node_memory.folder_in_memory(folder, 2)


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path / "base", ["2 + 3 = 5"])
    yield tmp_path / "base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_memory, "KEEP_S", 0)  # no other rank is expected any more
        for thread in threading.enumerate():
            if thread.name == node_memory.OFFERS:
                thread.join(timeout=30)
                assert not thread.is_alive()


def version(folder):
    return node_memory._version(folder)


def rank(folder, ranks=2, program=PROGRAM):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ended(process):
    process.stdin.close()
    assert process.wait(timeout=60) == 0, process.stderr.read()
    for stream in (process.stdout, process.stderr):
        stream.close()


def seen_by(process):
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


@pytest.mark.nightly
def test_the_ranks_of_a_node_map_the_same_memory(folder):
    shm = set(os.listdir("/dev/shm"))
    ranks = [rank(folder, 3) for _ in range(3)]
    seen = [seen_by(process) for process in ranks]
    for process in ranks:
        ended(process)
    with torch.no_grad():
        expected = float(load_causal_lm(folder).get_input_embeddings().weight.sum())
    inodes, names, sums, paths = zip(*seen, strict=True)
    assert len(set(inodes)) == 1 and set(names) == {"/memfd:model.safetensors"}
    assert sums == (expected,) * 3  # what one rank writes, no other rank reads
    assert set(paths) == {str(folder)}
    assert (
        set(os.listdir("/dev/shm")) <= shm and not node_memory._record(version(folder), 0).exists()
    )


def test_the_memory_cannot_be_changed(folder):
    with (
        load(folder) as shared,
        pytest.raises(PermissionError),
        (shared / "model.safetensors").open("r+b") as file,
    ):
        file.write(b"x")
        file.flush()


TWICE = textwrap.dedent(
    """
    import json, os, sys, threading
    from pathlib import Path
    from quadriga.parallel import node_memory

    inodes = []
    for number in range(2):
        sys.stdin.readline()
        with node_memory.folder_in_memory(Path(sys.argv[1])) as folder:
            inodes.append(os.stat(folder / "model.safetensors").st_ino)
        print(json.dumps(inodes))
        sys.stdout.flush()
    sys.stdin.read()
    offers = [t for t in threading.enumerate() if t.name == node_memory.OFFERS]
    for thread in offers:
        thread.join(timeout=30)
    print(json.dumps(any(thread.is_alive() for thread in offers)))
    """
)


def test_a_rank_that_loads_twice_before_another_one_shares_both_loads(folder):
    """As actor and rollout of one process do."""
    early, late = (rank(folder, program=TWICE) for _ in range(2))
    for process in (early, early, late, late):
        process.stdin.write("\n")
        process.stdin.flush()
        inodes = seen_by(process)
        if process is early:
            expected = inodes
    assert len(set(expected)) == 2 and inodes == expected
    for process in (early, late):
        process.stdin.close()
        assert seen_by(process) is False  # no memory is kept for a rank that does not come
        assert process.wait(timeout=60) == 0
        for stream in (process.stdout, process.stderr):
            stream.close()


def test_ranks_of_one_process_read_by_themselves(folder, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", LOCAL_PORT)
    with node_memory.folder_in_memory(folder) as own:
        assert own == folder


def test_files_that_loading_does_not_read_are_not_in_memory(folder):
    one = folder / "model.safetensors"
    (folder / "consolidated.safetensors").write_bytes(one.read_bytes())
    assert [path.name for path in node_memory._weight_files(folder)] == ["model.safetensors"]
    one.rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in node_memory._weight_files(folder)] == ["model-1.safetensors"]
    with load(folder) as shared:
        assert (shared / "consolidated.safetensors").resolve().parent == folder.resolve()
    (folder / "model.safetensors.index.json").write_text("{")
    assert len(node_memory._weight_files(folder)) == 2


READS = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from quadriga.parallel import node_memory

    folder = Path(sys.argv[1])
    with node_memory._locked(node_memory._record(node_memory._version(folder), 0), folder):
        print("[]")
        sys.stdout.flush()
        time.sleep(600)  # it reads, and never ends
    """
)


def test_a_reader_that_is_killed_is_replaced(folder, monkeypatch):
    stuck = rank(folder, program=READS)
    assert seen_by(stuck) == []
    with monkeypatch.context() as patch, fails(match="has not ended within 0 s; set use_shm=false"):
        patch.setattr(node_memory, "WAIT_S", 0.1)
        with load(folder):
            pass
    stuck.kill()
    assert stuck.wait(timeout=30) == -signal.SIGKILL
    for stream in (stuck.stdin, stuck.stdout, stuck.stderr):
        stream.close()
    with load(folder) as shared:
        assert (shared / "model.safetensors").resolve() != folder / "model.safetensors"


def test_records_in_a_folder_that_others_can_write_are_refused(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    records = tmp_path / f"{node_memory.OFFERS}-{os.getuid()}"
    records.mkdir()
    records.chmod(0o777)
    with fails(match="not a folder of this user alone"), load(folder):
        pass


def test_a_file_that_cannot_be_read_is_the_error_of_each_rank(folder, monkeypatch):
    def fail(source, copy, length):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(node_memory.shutil, "copyfileobj", fail)
        with pytest.raises(OSError, match="the disk is gone"), load(folder):
            pass
    with load(folder) as shared:  # the lock is free again
        size = (folder / "model.safetensors").stat().st_size
        assert (shared / "model.safetensors").stat().st_size == size


@pytest.mark.parametrize("use_shm", [True, False])
def test_the_setting_reaches_the_engines(folder, monkeypatch, use_shm):
    seen = []

    def in_memory(path):
        seen.append(path)
        return nullcontext(path)

    for module in (loading, engine_loading):
        monkeypatch.setattr(module, "folder_in_memory", in_memory)
    model = load_config(TrainConfig, [f"critic.model.use_shm={use_shm}"]).critic.model
    model = replace(model, path=str(folder))
    build_engine(model, EngineConfig())
    build_engine(model, EngineConfig(), head="value")
    HFRollout(model)
    assert seen == [folder] * 3 * use_shm
