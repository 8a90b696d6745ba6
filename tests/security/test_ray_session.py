"""The folder of a Ray session that a run starts, with its sockets and logs, is its user's alone."""

import fcntl
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray

from quadriga.backends.ray import cluster, session
from quadriga.errors import InputError


@pytest.fixture
def base(monkeypatch) -> Path:
    """A folder for temporary files with a short path."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    shutil.rmtree(folder)


def given_to_ray(monkeypatch, **options) -> dict[str, object]:
    seen: dict[str, object] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **settings: seen.update(settings))
    cluster.ensure_ray(**options)
    return seen


@pytest.mark.parametrize("long", [False, True])
def test_a_session_has_a_private_folder(long, base, monkeypatch) -> None:
    """Below /tmp, if the paths of sockets would be too long elsewhere."""
    if long:
        (base / ("a" * 60)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base / ("a" * 60)))
    folder = Path(str(given_to_ray(monkeypatch)["_temp_dir"])).parent
    assert folder.parent == (Path("/tmp") if long else base)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    socket = f"{folder}/r/session_2026-11-26_07-58-14_123456_4194304/sockets/plasma_store"
    assert len(socket) <= 107
    shutil.rmtree(folder)


@pytest.mark.parametrize("free", [0, 2**30])
def test_a_session_on_a_full_disk_is_refused_by_name(free, base, monkeypatch) -> None:
    """Ray itself says after 30 s that its processes start too late."""
    late = RuntimeError("The current node timed out during startup.")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", Mock(side_effect=late))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=free))
    with pytest.raises((InputError, RuntimeError)) as caught:
        cluster.ensure_ray()
    text = str(caught.value)
    assert text.startswith(f"cannot write {base}/quadriga-ray-") == (free == 0), text
    assert free or "No space left on device; free some space there or choose another" in text


@pytest.mark.parametrize("given", ["RAY_TMPDIR", "_temp_dir", "address", "RAY_ADDRESS"])
def test_the_users_choice_stays(given, base, monkeypatch) -> None:
    options = {} if given.isupper() else {given: str(base / "own")}
    if given.isupper():
        monkeypatch.setenv(given, str(base / "own"))
    settings = given_to_ray(monkeypatch, **options)
    assert settings.get("_temp_dir") == options.get("_temp_dir") and not list(base.iterdir())


def test_folders_of_ended_sessions_are_removed(base, monkeypatch) -> None:
    """A folder stays while its controller lives, while a process of Ray names it, and if it is of
    something else."""
    ended, alive, used, other, link = (base / f"{session.PREFIX}{n}" for n in "abcde")
    for folder in (ended, alive, used, other):
        (folder / "r").mkdir(parents=True)
    for folder in (ended, alive, used):
        (folder / "lock").touch()
    link.symlink_to(other)
    raylet = subprocess.Popen([sys.executable, "-c", "input()", f"--temp_dir={used}/r"],
                              stdin=subprocess.PIPE)  # fmt: skip
    with open(alive / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = Path(str(given_to_ray(monkeypatch)["_temp_dir"])).parent
    assert set(base.iterdir()) == {made, alive, used, other, link}
    raylet.communicate(b"\n")
    again = Path(str(given_to_ray(monkeypatch)["_temp_dir"])).parent
    assert set(base.iterdir()) == {made, again, other, link}
