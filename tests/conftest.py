"""Fixtures of all tests: no test leaves state of the process to the next one.

The whole suite runs in one process, so a process group, a variable of a rank or an entry of a
table that one test leaves behind changes the result of another.
"""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from quadriga.backends import BACKENDS

RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip


def _process_state() -> dict[str, object]:
    tables = [
        getattr(sys.modules.get(f"quadriga.algorithms.{module}"), table, {})
        for module, table in (("advantages", "ADVANTAGES"), ("policy_losses", "POLICY_LOSSES"))
    ]
    return {
        "rank variables": {k: os.environ[k] for k in RANK_VARIABLES if k in os.environ},
        "backends": dict(BACKENDS),
        "working directory": os.getcwd(),
        "profile function": sys.getprofile(),
        "algorithms of users": {
            name for table in tables for name, entry in table.items() if entry.origin != "built-in"
        },
    }


@pytest.fixture(autouse=True)
def _state_of_the_process_is_restored() -> Iterator[None]:
    before = _process_state()
    yield
    after = _process_state()
    left = {name: after[name] for name in before if after[name] != before[name]}
    assert not left, f"the test left {left}; it was {[before[name] for name in left]} before"


@pytest.fixture
def own_roles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the roles and files that a test adds."""
    from quadriga.algorithms import user_files
    from quadriga.trainer.roles import registry
    from quadriga.trainer.roles.registry import _ROLES, Role

    monkeypatch.setattr(registry, "_ADDED", {})
    monkeypatch.setattr(user_files, "_LOADED", dict(user_files._LOADED))
    known = set(_ROLES)
    yield
    for name in set(_ROLES) - known:
        del _ROLES[name]
        delattr(Role, name)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    """A Llama model with a few ten thousand parameters."""
    from quadriga.models.tiny import TinyModel, write_tiny_model

    shape = TinyModel(hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=48)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, ["one two three"], shape)
    return str(folder)


@pytest.fixture
def restored_tables() -> Iterator[None]:
    """Remove the estimators, losses and files that a test adds."""
    from quadriga.algorithms import advantages, policy_losses, user_files

    with (
        mock.patch.dict(advantages.ADVANTAGES),
        mock.patch.dict(policy_losses.POLICY_LOSSES),
        mock.patch.dict(user_files._LOADED),
    ):
        yield


@pytest.fixture
def replace_training(monkeypatch):
    """replace_training(action): `quadriga train` calls `action(config)`, and checks no files."""

    def _replace(action):
        module = SimpleNamespace(run_training=action)
        monkeypatch.setitem(sys.modules, "quadriga.trainer.main", module)
        monkeypatch.setattr("quadriga.trainer.checks.early.check_early", lambda *_, **__: None)

    return _replace


@pytest.fixture(autouse=True, scope="module")
def _process_group_of_the_module_ends() -> Iterator[None]:
    """Destroy the group of one rank that engines keep for the lifetime of their process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _placement_groups() -> set[str]:
    """Return the ids of the placement groups on Ray, without groups of the session (`shared`)."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return set()
    from ray.util import placement_group_table

    return {
        key
        for key, entry in placement_group_table().items()
        if entry["state"] != "REMOVED" and not entry["name"].startswith("shared_")
    }


@pytest.fixture(autouse=True, scope="module")
def _placement_groups_of_the_module_are_removed() -> Iterator[None]:
    """Release what pools of the module still reserve: folders may share one cluster of 16 CPUs."""
    before = _placement_groups()
    yield
    for left in _placement_groups() - before:
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(left))))


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[object]:
    from s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def memory_store(tmp_path, monkeypatch) -> Iterator[None]:
    """Empty stores `memory://…`, and an empty cache of remote files in `tmp_path`."""
    import fsspec

    from quadriga.config import stores

    monkeypatch.setattr(stores, "CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stores, "_fetched", {})
    monkeypatch.setattr(stores, "BACKOFF_S", 0.01)
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def s3(_s3_server, monkeypatch):
    """An S3 server with an empty bucket, whose clients give up soon; see `S3Server.faults`."""
    import fsspec
    from s3fs import S3FileSystem

    from quadriga.config import stores
    from s3_server import BUCKET

    for name, value in {
        "AWS_ENDPOINT_URL": _s3_server.url, "AWS_ACCESS_KEY_ID": "of-tests",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    _s3_server.faults, _s3_server.delay_s = [], 0.0
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    if files.exists(BUCKET):
        files.rm(BUCKET, recursive=True)
    files.mkdir(BUCKET)
    once = {"read_timeout": 2.0, "retries": {"total_max_attempts": 1}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": once})
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    monkeypatch.setattr(stores, "BACKOFF_S", 0.01)
    monkeypatch.setattr(stores, "_fetched", {})
    yield _s3_server
    S3FileSystem.clear_instance_cache()
