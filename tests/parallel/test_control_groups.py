"""Limits of control groups count, and the limits of the groups that they lie in."""

import os

import pytest

from quadriga.config.commands import SFTTrainerConfig
from quadriga.parallel import control_groups
from quadriga.parallel.control_groups import MEMORY_FILES, available_cpus, available_memory
from quadriga.trainer.roles.workers import threads_per_rank


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts(version, tmp_path):
    folder = tmp_path / ("memory/job" if version == 1 else "job")
    folder.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n1:cpu:/x\n" if version == 1 else "0::/job\n")
    limit, use, stat = MEMORY_FILES[version == 1]
    (folder / limit).write_text("3000000\n")
    (folder / use).write_text("2000000\n")
    assert available_memory(tmp_path, own) == 1_000_000
    (folder / "memory.stat").write_text(f"cache 5\n{stat} 500000\n")
    assert available_memory(tmp_path, own) == 1_500_000
    (folder / limit).write_text("max\n")
    assert available_memory(tmp_path, own) > 3_000_000


NESTED = "0::/job/step/task\n"
V1 = "4:memory:/job/step\n2:cpu,cpuacct:/job/step\n"
CPUS = {
    "no group": ("", {}, 8),
    "version 2": (NESTED, {"job/step/task/cpu.max": "300000 100000"}, 3),
    "without a quota": (NESTED, {"job/step/task/cpu.max": "max 100000"}, 8),
    "of a parent": (NESTED, {"job/cpu.max": "250000 100000", "job/step/cpu.max": "max 9"}, 2),
    "the smallest": (NESTED, {"job/cpu.max": "4 1", "job/step/task/cpu.max": "6 1"}, 4),
    "less than a CPU": (NESTED, {"job/cpu.max": "50000 100000"}, 1),
    "more than the machine": (NESTED, {"job/cpu.max": "9900000 100000"}, 8),
    "of a container": ("0::/\n", {"cpu.max": "200000 100000"}, 2),
    "path of the host": ("0::/docker/1f\n", {"cpu.max": "200000 100000"}, 2),
    "outside the namespace": ("0::/../job\n", {"job/cpu.max": "1 1", "cpu.max": "2 1"}, 2),
    "of another group": (NESTED, {"job2/cpu.max": "100000 100000"}, 8),
    "version 1": (V1, {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"},
                  3),
    "version 1, both names": (V1, {"cpu,cpuacct/job/step/cpu.cfs_quota_us": "100000",
                                   "cpu,cpuacct/job/step/cpu.cfs_period_us": "50000"}, 2),
    "version 1 without": (V1, {"cpu/job/step/cpu.cfs_quota_us": "-1",
                               "cpu/job/step/cpu.cfs_period_us": "100000"}, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", CPUS)
def test_the_smallest_cpu_quota_of_the_chain_counts(case, tmp_path, monkeypatch):
    own, files, cpus = CPUS[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert available_cpus(tmp_path, tmp_path / "own") == cpus


def test_the_memory_of_a_parent_counts_and_the_use_of_its_other_groups(tmp_path):
    for folder, limit, used in (("job", 8, 5), ("job/step", 6, 1), ("job/step/task", 9, 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(f"{limit}000000\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}000000\n")
    (tmp_path / "own").write_text(NESTED)
    assert available_memory(tmp_path, tmp_path / "own") == 3_000_000


def test_the_threads_of_a_rank_fit_the_quota(monkeypatch):
    monkeypatch.setattr("quadriga.trainer.roles.workers.available_cpus", lambda: 6)
    ranks = SFTTrainerConfig(n_gpus_per_node=2)
    assert threads_per_rank(ranks) == 3
    assert control_groups.available_cpus() <= len(os.sched_getaffinity(0))
