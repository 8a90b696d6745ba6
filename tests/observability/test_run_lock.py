"""Two runs cannot write into one folder; the lock of a run that has ended is taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, InputError
from quadriga.observability import run_folder as run_lock
from quadriga.observability.run_folder import (
    LOCK,
    STALE_AFTER_S,
    LockOwner,
    RunFolder,
    RunLock,
    check_lock,
)


def lock_of(folder):
    return folder / LOCK, folder, "trainer.default_local_dir"


def write_lock(folder, age_s=0.0, **changes):
    """Write the lock of another run, renewed `age_s` seconds ago."""
    owner = replace(LockOwner.this_run(), **changes)
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_a_second_run_in_a_folder_is_refused(tmp_path, how):
    first = RunFolder.open(tmp_path, TrainConfig())
    first.metrics.write_text('{"step": 1}\n')
    for attempt in (lambda: RunFolder.open(tmp_path, TrainConfig(), **how),
                    lambda: RunFolder(tmp_path).check(**how)):  # fmt: skip
        with pytest.raises(ConfigError, match=r"in use by another run \(process \d+ of .* since"):
            attempt()
    assert first.metrics.read_text() == '{"step": 1}\n'
    first.close()
    RunFolder.open(tmp_path, TrainConfig(), overwrite=True).close()


def test_a_start_that_fails_releases_the_lock(tmp_path):
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "config.yaml" / "x").touch()
    with pytest.raises(ConfigError, match="yaml is no file"):
        RunFolder.open(tmp_path, TrainConfig())
    assert not (tmp_path / LOCK).exists()


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("age_s", "changes", "stale"),
    [
        (0, lambda: {"pid": ended_process()}, True),
        (0, lambda: {"started": 1e9}, True),  # the number of the process was used again
        (STALE_AFTER_S * 2, lambda: {}, False),  # renewing failed, but the process is there
        (0, lambda: {"host": "other:1"}, False),
        (STALE_AFTER_S - 30, lambda: {"host": "other:1", "pid": 1}, False),
        (STALE_AFTER_S + 30, lambda: {"host": "other:1"}, True),
    ],
)
def test_which_locks_are_stale(tmp_path, age_s, changes, stale):
    write_lock(tmp_path, age_s, **changes())
    if stale:
        check_lock(*lock_of(tmp_path))
        RunLock.acquire(*lock_of(tmp_path)).release()
        assert list(tmp_path.iterdir()) == []
    else:
        for attempt in (check_lock, RunLock.acquire):
            with pytest.raises(ConfigError, match="in use by another run"):
                attempt(*lock_of(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"user": 1}', "[" * 5000, "\x00"])
def test_a_damaged_lock_is_stale(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    check_lock(*lock_of(tmp_path))
    RunLock.acquire(*lock_of(tmp_path)).release()


def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RunLock.acquire(*lock_of(tmp_path / "run"))
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.timeout(60)  # a read that does not end
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", [LOCK, "config.yaml", "metrics.jsonl", "samples.jsonl"])
def test_what_is_no_file_in_place_of_a_file_of_the_run_is_not_read(tmp_path, name, kind):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    make = {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero")}
    make.get(kind, os.mkdir)(path)
    refused = "is no file|is a symbolic link|already holds a run|cannot write"
    for how in ({}, {"resume": True}):
        with pytest.raises(InputError, match=refused):
            RunFolder.open(tmp_path / "run", TrainConfig(), **how)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "samples.jsonl"])
def test_a_link_in_place_of_a_file_of_the_run_is_not_written_through(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        RunFolder.open(tmp_path / "run", TrainConfig())
    RunFolder.open(tmp_path / "run", TrainConfig(), overwrite=True).close()
    assert not (tmp_path / "outside").exists()


def test_one_of_many_runs_gets_a_stale_lock(tmp_path, monkeypatch):
    write_lock(tmp_path, pid=ended_process())
    original = run_lock._age

    def slow(*args):
        time.sleep(0.05)  # between reading the owner and writing the new one
        return original(*args)

    monkeypatch.setattr(run_lock, "_age", slow)
    start, outcomes = threading.Barrier(8), []

    def attempt():
        start.wait()
        try:
            outcomes.append(RunLock.acquire(*lock_of(tmp_path)))
        except ConfigError:
            outcomes.append(None)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (held,) = filter(None, outcomes)
    held.release()
    assert not (tmp_path / LOCK).exists()


def test_the_owner_renews_its_lock_and_leaves_that_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEW_S", 0.02)
    lock = RunLock.acquire(*lock_of(tmp_path))
    os.utime(tmp_path / LOCK, (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / LOCK).stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    write_lock(tmp_path)
    lock.release()
    assert (tmp_path / LOCK).exists(), "another run has taken the lock over"
