"""Data sets of the hub are read, and the model of a run is pushed there with its card."""

import json
import os

import pytest
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import _http

from hub_server import TOKEN, HubServer, Repository
from processes import run_python
from quadriga.config import hub, stores
from quadriga.config.stores import local_file
from quadriga.errors import ModelError, StoreError
from quadriga.models.folder import local_folder
from quadriga.report.card import base_license, write_card

ROWS = b'{"prompt": "1 and 1?"}\n'
NOT_THERE = "the hub has no such repository, or it is private: check the name"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with two data sets, for this process; its client does not wait between attempts."""
    server = HubServer()
    server.repositories |= {
        "datasets/owner/rows": Repository({"train.jsonl": ROWS, "b/x.parquet": b"", "c.txt": b""}),
        "datasets/owner/private": Repository({"train.jsonl": ROWS}, private=True),
    }
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    monkeypatch.setattr(stores, "_fetched", {})
    yield server
    server.close()


def reason(call, *arguments, kind=StoreError) -> str:
    """Return the one line of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text and TOKEN not in text
    return text


def test_a_data_file_is_read_from_the_hub_and_again_where_it_has_changed(server, monkeypatch):
    url = "hf://datasets/owner/rows/train.jsonl"
    assert local_file(url).read_bytes() == ROWS
    asked = len(server.asked)
    assert local_file(url).read_bytes() == ROWS and len(server.asked) == asked
    changed = Repository({"train.jsonl": ROWS * 2}, commits=1)
    server.repositories["datasets/owner/rows"] = changed
    stores._fetched.clear()
    assert local_file(url).read_bytes() == ROWS * 2
    assert local_file(f"hf://datasets/owner/rows@{1:040x}/train.jsonl").read_bytes() == ROWS * 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    stores._fetched.clear()
    assert local_file(url).read_bytes() == ROWS * 2  # from the cache


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("datasets/owner/rows", "it names a data set; add one of its files; it has train.jsonl, b"),
        ("datasets/owner/rows/x.jsonl", "no such file; it has train.jsonl, b/x.parquet"),
        ("datasets/owner/rows@v2/train.jsonl", "the repository has no such revision"),
        ("datasets/owner/row/train.jsonl", NOT_THERE),
        ("owner/rows/train.jsonl", "write hf://datasets/owner/name/file.parquet"),
    ],
)
def test_a_data_file_that_is_not_on_the_hub_is_told(server, path, text):
    assert text in reason(local_file, f"hf://{path}")


def test_what_the_hub_refuses_is_told(server, monkeypatch):
    url = "hf://datasets/owner/private/train.jsonl"
    monkeypatch.delenv("HF_TOKEN")
    assert NOT_THERE in reason(local_file, url)
    assert "there is no token; set HF_TOKEN" in reason(hub.check_repository, "user/new")
    assert NOT_THERE in reason(local_folder, "hf://owner/modle", kind=ModelError)
    server.close()
    assert f"the hub at {server.url} does not answer" in reason(local_file, f"{url}x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in reason(local_file, f"{url}x")


def test_a_repository_that_a_run_cannot_push_to_is_told_before_the_start(server, monkeypatch):
    server.repositories["models/user/old"] = Repository()
    for name in ("user/new", "team/new", "user/old"):
        hub.check_repository(name)
    assert "models/user/new" not in server.repositories  # the check makes nothing
    assert "HF_TOKEN is of user; it may write to user/…, team/…" in reason(
        hub.check_repository, "usr/new"
    )
    for name in ("new", "user/a b", "a/b/c"):
        assert "expected owner/name" in reason(hub.check_repository, name)
    server.role = "read"
    assert "the hub answers 403 Forbidden" in reason(hub.check_repository, "user/old")
    assert "HF_TOKEN may only read" in reason(hub.check_repository, "user/new")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert "the hub answers 401 Unauthorized" in reason(hub.check_repository, "user/new")


def test_a_push_replaces_weights_keeps_other_files_and_survives_faults(
    server, tmp_path, monkeypatch
):
    files = {"model.safetensors": b"weights", "config.json": b"{}"}
    model = tmp_path / "model"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_bytes(content)
    old = Repository({"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"})
    server.repositories["models/user/old"] = old
    monkeypatch.setattr(hub, "_WAITS_S", (0, 0))
    server.faults = {"PUT /lfs/": ["cut", 1], "/commit/": [500, 2]}
    assert "/models/user/old/commit/" in hub.push("user/old", model)
    assert server.repositories["models/user/old"].files == files | {"notes.txt": b"mine"}
    assert [fault[1] for fault in server.faults.values()] == [0, 0]
    server.faults = {"/commit/": [500, 3]}
    assert "the hub answers 500 Internal Server Error" in reason(hub.push, "user/new", model)
    made = server.repositories["models/user/new"]
    assert made.private and made.files == {}


def test_a_name_of_the_hub_trains_on_its_data_and_pushes_a_model_with_a_card(
    server, tiny_task, train_overrides, tmp_path
):
    base = {path.name: path.read_bytes() for path in tiny_task.model.iterdir()}
    card = b"---\nlicense: other\nlicense_name: own\n---\n"
    rows = {"train.parquet": (tiny_task.folder / "data/train.parquet").read_bytes()}
    server.repositories |= {
        "models/owner/tiny": Repository(base | {"README.md": card}),
        "datasets/owner/rows": Repository(rows),
    }
    server.faults = {"/commit/": [500, 1]}
    settings = [
        *train_overrides, "data.train_files=[hf://datasets/owner/rows/train.parquet]",
        "actor_rollout_ref.model.path=hf://owner/tiny", "trainer.push_to_hub=user/sums",
        "trainer.total_training_steps=1",
    ]  # fmt: skip
    hub_of_tests = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    ended = run_python(
        "-m", "quadriga.cli.main", "train", *settings, env=os.environ | hub_of_tests
    )  # fmt: skip
    pushed, folder = server.repositories["models/user/sums"], tmp_path / "run" / "model"
    assert pushed.private
    assert pushed.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert f"pushed: {server.url}/models/user/sums/commit/" in ended.stderr
    head = ModelCard.load(folder / "README.md")
    assert head.data.license_name == "own" and head.data.base_model == "owner/tiny"
    assert "| val/" in head.text and "torch " in head.text and str(tmp_path) not in head.text
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    texts = ended.stdout.encode(), ended.stderr.encode(), *(path.read_bytes() for path in files)
    assert not any(TOKEN.encode() in text for text in texts)


def test_a_card_tells_curves_settings_and_versions_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret-of-tests")
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "learning_curve.png").write_bytes(b"png")
    (run / "config.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\ntrainer: {experiment_name: sums, seed: 7, "
        "default_local_dir: /models/mine/run}\nactor_rollout_ref: {model: {path: 'hf://owner/base'}}\n"
        "data: {train_files: [/models/mine/train.jsonl, 'hf://datasets/owner/rows/a.jsonl']}\n"
        "reward: {path: ~/rule.py, name: secret-of-tests}\n"
    )
    rows = [
        {"step": step, "reward/mean": value} for step, value in ((1, 0.5), (2, 0.25), (3, 0.75))
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    environment = {"torch": "2.13.0", "host": "my-machine"}
    (run / "events.jsonl").write_text(json.dumps({"environment": environment}) + "\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # no card of the base
    write_card(run)
    text = (run / "model/README.md").read_text()
    data = ModelCard(text).data
    assert data.base_model == "owner/base" and data.datasets == ["owner/rows"]
    assert data.license is None and data.pipeline_tag == "text-generation"
    assert "# sums" in text and "| reward/mean | 0.5 | 0.75 | 0.25 | 0.75 |" in text
    assert "    trainer.seed=7\n" in text and "    reward.path=rule.py\n" in text
    assert "    data.train_files=[train.jsonl, hf://datasets/owner/rows/a.jsonl]\n" in text
    assert "torch 2.13.0." in text and (run / "model/learning_curve.png").is_file()
    for private in ("/models", "my-machine", "secret-of-tests"):
        assert private not in text


@pytest.mark.parametrize("damaged", ["", "no card", "---\n[\n---\n", "---\n- 1\n---\n"])
def test_a_base_without_a_card_that_can_be_read_has_no_license(
    tmp_path, damaged, server, monkeypatch
):
    (tmp_path / "base").mkdir()
    if damaged:
        (tmp_path / "base/README.md").write_text(damaged)
    monkeypatch.chdir(tmp_path)
    assert base_license("base") == {}
    assert server.asked == [], "the hub was asked about a folder of this machine"
