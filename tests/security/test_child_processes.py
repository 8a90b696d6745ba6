"""Files of the working directory with the names of libraries are not run by child processes."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
from ray.job_config import JobConfig

from quadriga.backends.ray.cluster import DriverConfig
from quadriga.errors import ConfigError
from quadriga.rewards.functions import FunctionRef, Sample
from quadriga.rewards.pool import RewardPool
from quadriga.rollout.sglang.client import HostTransport
from quadriga.rollout.sglang.options import SGLangOptions, check_installed

NAMES = ("psutil", "torch", "json", "numpy", "pickle", "socket", "logging", "quadriga", "ray")


@pytest.fixture
def downloads(tmp_path, monkeypatch) -> Path:
    """The working directory: each of its files writes its name to the file `ran` when it runs."""
    folder, ran = tmp_path / "downloads", tmp_path / "ran"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')")
    monkeypatch.chdir(folder)
    yield folder
    assert not ran.exists(), ran.read_text()


def test_a_reward_process_searches_modules_where_the_controller_does(
    downloads, tmp_path, monkeypatch
) -> None:
    (tmp_path / "own_module.py").write_text("SCORE = 3.0")
    rule = tmp_path / "rule.py"
    rule.write_text("import psutil, torch\nimport own_module\n"
                    "def compute_score(*args, **more):\n    return own_module.SCORE")  # fmt: skip
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with closing(RewardPool(1)) as pool:
        [outcome] = pool.run([Sample(FunctionRef(str(rule), "compute_score"), "src", "", "", None)])
    assert outcome.score == 3.0, outcome.detail


def test_sglang_is_not_searched_in_the_working_directory(downloads, tmp_path) -> None:
    (downloads / "sglang.py").write_text("raise AssertionError")
    with pytest.raises(ConfigError, match="does not find sglang"):
        check_installed(SGLangOptions(python=sys.executable))
    (tmp_path / "host").mkdir()
    host = HostTransport(sys.executable, tmp_path / "host", {}, {"args": {}, "device": "cuda"})
    host._process.wait(30)
    assert "No module named 'sglang'" in (tmp_path / "host" / "log").read_text()


def test_ray_gets_only_folders_of_the_driver(tmp_path, monkeypatch) -> None:
    script, work = tmp_path / "script", tmp_path / "work"
    for folder in (script, work):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "argv", [str(script / "my_train.py")])
    for path, sent in (([], []), ([str(script)], [script]), ([""], [work])):
        monkeypatch.setattr(sys, "path", path)
        config = DriverConfig()
        assert config._runtime_env_has_working_dir(), "Ray adds no folders of its own"
        assert config._py_driver_sys_path == [str(folder) for folder in sent]
    config = DriverConfig(runtime_env={"working_dir": "s3://bucket/code.zip"})
    assert config._runtime_env_has_working_dir() and not config._py_driver_sys_path
    assert issubclass(DriverConfig, JobConfig)
