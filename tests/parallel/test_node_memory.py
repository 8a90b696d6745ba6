"""Weights that the ranks of a node read once and share."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, ModelConfig, TrainConfig
from quadriga.engines import build_engine, loading as engine_loading
from quadriga.errors import ModelError
from quadriga.models import load_causal_lm, loading, write_tiny_model
from quadriga.models.folder import weight_file_names
from quadriga.parallel import node_memory
from quadriga.parallel.distributed import gather_over_ranks
from quadriga.rollout import build_rollout
from rank_groups import fork_ranks


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path / "base", ["2 + 3 = 5"])
    return tmp_path / "base"


def mapping_of(address: int) -> list[str]:
    """Inode and name of the memory that is mapped at an address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[4:6]
    return []


def load_on_ranks(rank, ranks, folder) -> None:
    shm = os.listdir("/dev/shm")
    expected = load_causal_lm(folder).get_input_embeddings().weight.sum()
    seen = []
    for _ in range(2):  # as actor and rollout of one process do
        model = load_causal_lm(ModelConfig(path=str(folder), use_shm=True))
        weight = model.get_input_embeddings().weight
        seen += gather_over_ranks(mapping_of(weight.data_ptr()))
        assert weight.sum() == expected and model.config.name_or_path == str(folder)
        gather_over_ranks(None)
        weight.data.zero_()  # a copy of this process
    (first, name), (second, _) = seen[0], seen[ranks]
    assert first != second and name == "/memfd:model.safetensors"
    assert seen == [[first, name]] * ranks + [[second, name]] * ranks

    with pytest.raises(ModelError, match="does not exist"):  # on one rank only
        absent = folder if rank == 0 else folder / "absent"
        load_causal_lm(ModelConfig(path=str(absent), use_shm=True))
    with node_memory.folder_in_memory(folder, weight_file_names) as shared:
        path = shared / "model.safetensors"
        with pytest.raises(PermissionError), path.open("r+b", buffering=0) as file:
            file.write(b"x")
    assert not shared.exists() and set(os.listdir("/dev/shm")) <= set(shm)
    assert not any("/memfd:model" in os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())

    def fail(*_):
        raise OSError("the disk is gone")

    if rank == 0:
        node_memory.shutil.copyfileobj = fail
    with (
        pytest.raises(ModelError, match="the disk is gone"),
        node_memory.folder_in_memory(folder, weight_file_names),
    ):
        pass


def test_the_ranks_of_a_node_map_the_same_memory(folder):
    fork_ranks(load_on_ranks, 2, folder, limit=170)


@pytest.mark.parametrize("use_shm", [True, False])
def test_the_setting_reaches_the_engines(folder, monkeypatch, use_shm):
    seen = []

    def in_memory(path, weight_files):
        seen.append(path)
        return nullcontext(path)

    for module in (loading, engine_loading):
        monkeypatch.setattr(module, "folder_in_memory", in_memory)
    model = load_config(TrainConfig, [f"critic.model.use_shm={use_shm}"]).critic.model
    model = replace(model, path=str(folder))
    build_engine(model, EngineConfig())
    build_engine(model, EngineConfig(), head="value")
    build_rollout("hf", model)
    assert seen == [folder] * 3 * use_shm


def test_one_rank_reads_by_itself(folder, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "local")  # of the local backend, whose ranks share a process
    with node_memory.folder_in_memory(folder, weight_file_names) as own:
        assert own == folder
