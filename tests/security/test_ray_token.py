"""The token of a Ray that a run starts can be read by its user only."""

import os
import stat

import pytest

from processes import run_python
from quadriga.backends.ray import cluster

RAY_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder without a token, and none of Ray's variables for tokens."""
    monkeypatch.setattr(cluster.os, "environ", {**os.environ, "HOME": str(tmp_path)})
    for name in RAY_TOKEN_VARIABLES:
        cluster.os.environ.pop(name, None)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    return tmp_path


def mode(path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def start_with(monkeypatch, write, **options):
    """Connect, with `write` in place of what Ray does."""
    monkeypatch.setattr(cluster.ray, "init", lambda **_: write())
    cluster.ensure_ray(**options)


def test_a_new_token_is_written_into_a_private_file(home, monkeypatch):
    """Ray opens the file for writing, and takes an empty file for a missing token."""
    token = home / ".ray/auth_token"

    def write():
        assert token.read_bytes() == b"" and mode(token) == 0o600
        token.write_text("secret")

    start_with(monkeypatch, write)
    assert mode(token) == 0o600 and token.read_text() == "secret"


WRITE_A_TOKEN = """
from ray._private.authentication import authentication_token_setup as setup
from quadriga.backends.ray.cluster import protect_token
protect_token()
setup.enable_token_auth_by_default()
setup.ensure_token_if_auth_enabled()
"""


def test_ray_takes_an_empty_file_for_a_missing_token_and_keeps_its_mode(home):
    """The behaviour of the installed Ray that the private file relies on."""
    pytest.importorskip("ray._private.authentication.authentication_token_setup")
    run_python("-c", WRITE_A_TOKEN, env=dict(os.environ))
    token = home / ".ray/auth_token"
    assert len(token.read_text()) == 64 and mode(token) == 0o600


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o600), (0o640, 0o640), (0o400, 0o400)])
def test_a_token_that_all_users_can_read_is_made_private(home, monkeypatch, before, after):
    token = home / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(before)
    start_with(monkeypatch, lambda: None)
    assert mode(token) == after and token.read_text() == "secret"


@pytest.mark.parametrize(
    "variable",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "/x"}, {}],
    ids=str,
)
def test_no_file_is_made_where_ray_uses_none(home, monkeypatch, variable):
    """Nor for a cluster that runs already."""
    cluster.os.environ.update(variable)
    start_with(monkeypatch, lambda: None, address=None if variable else "10.0.0.1:6379")
    assert not (home / ".ray").exists()


def test_a_link_in_place_of_the_token_is_left_as_it_is(home, monkeypatch):
    target = home / "elsewhere"
    target.write_text("secret")
    target.chmod(0o644)
    (home / ".ray").mkdir()
    (home / ".ray/auth_token").symlink_to(target)
    start_with(monkeypatch, lambda: None)
    assert mode(target) == 0o644
