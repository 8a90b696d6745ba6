"""Two runs cannot write into one folder; the lock of a run that has ended is taken over."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, InputError
from quadriga.observability import run_folder
from quadriga.observability.run_folder import LOCK, RunFolder, RunLock, check_lock


def lock_of(folder):
    return folder / LOCK, folder, "trainer.default_local_dir"


@pytest.mark.parametrize("how", ["refuse", "resume", "overwrite"])
def test_a_second_run_in_a_folder_is_refused(tmp_path, how):
    first = RunFolder.open(tmp_path, TrainConfig())
    first.metrics.write_text('{"step": 1}\n')
    for attempt in (lambda: RunFolder.open(tmp_path, TrainConfig(), how),
                    lambda: RunFolder(tmp_path).check(how)):  # fmt: skip
        with pytest.raises(ConfigError, match=r"in use by another run \(process \d+ of .* since"):
            attempt()
    assert first.metrics.read_text() == '{"step": 1}\n'
    first.close()
    RunFolder.open(tmp_path, TrainConfig(), "overwrite").close()


def test_a_start_that_fails_releases_the_lock(tmp_path):
    (tmp_path / "config.yaml").mkdir()
    (tmp_path / "config.yaml" / "x").touch()
    with pytest.raises(ConfigError, match="yaml is no file"):
        RunFolder.open(tmp_path, TrainConfig())
    assert not (tmp_path / LOCK).exists()


HOLD = """
import sys, time
from pathlib import Path
from quadriga.observability.run_folder import LOCK, RunLock
folder = Path(sys.argv[1])
lock = RunLock.acquire(folder / LOCK, folder, "key")
print("held", flush=True)
time.sleep(600)
"""


def test_the_lock_of_another_process_is_held_until_it_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        for attempt in (check_lock, RunLock.acquire):
            with pytest.raises(ConfigError, match=rf"in use by another run .process {other.pid} "):
                attempt(*lock_of(tmp_path))
        other.kill()
    assert (tmp_path / LOCK).exists()
    check_lock(*lock_of(tmp_path))
    RunLock.acquire(*lock_of(tmp_path)).release()
    assert list(tmp_path.iterdir()) == []


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
    for how in ("refuse", "resume"):
        with pytest.raises(InputError, match=refused):
            RunFolder.open(tmp_path / "run", TrainConfig(), how)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "samples.jsonl"])
def test_a_link_in_place_of_a_file_of_the_run_is_not_written_through(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        RunFolder.open(tmp_path / "run", TrainConfig())
    RunFolder.open(tmp_path / "run", TrainConfig(), "overwrite").close()
    assert not (tmp_path / "outside").exists()


def test_one_of_many_runs_gets_the_lock_that_a_run_has_left(tmp_path):
    (tmp_path / LOCK).write_text("process 1 of another run")
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


def test_the_lock_of_another_run_is_not_deleted(tmp_path):
    lock = RunLock.acquire(*lock_of(tmp_path))
    (tmp_path / LOCK).unlink()
    other = RunLock.acquire(*lock_of(tmp_path))
    lock.release()
    assert (tmp_path / LOCK).exists()
    other.release()


def test_a_run_whose_lock_was_deleted_takes_it_again_or_ends(tmp_path, caplog):
    first = RunFolder.open(tmp_path, TrainConfig())
    (tmp_path / LOCK).unlink()
    first.renew_lock()
    assert "was deleted while the run" in caplog.text
    with pytest.raises(ConfigError, match=rf"in use by another run .* as {LOCK} there says"):
        check_lock(*lock_of(tmp_path))
    (tmp_path / LOCK).unlink()
    second = RunLock.acquire(*lock_of(tmp_path))
    with pytest.raises(ConfigError, match="in use by another run"):
        first.renew_lock()
    first.close()
    assert (tmp_path / LOCK).exists()
    second.release()


def test_a_file_system_without_locks_is_told(tmp_path, caplog, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    RunLock.acquire(*lock_of(tmp_path)).release()
    assert "cannot be locked (No locks available): nothing keeps a second run out" in caplog.text


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    lock = RunLock.acquire(*lock_of(tmp_path))
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        os.close(lock._file)  # as if this process had been killed
        check_lock(*lock_of(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        run_folder._held.clear()
