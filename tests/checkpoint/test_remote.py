"""Remote folders: what is sent is compared, repeated after faults, and found again."""

import json
import os

import pytest

from quadriga.checkpoint.files import SavedFile, digest_file
from quadriga.checkpoint.folders import begin_checkpoint, commit_checkpoint, verify_checkpoint
from quadriga.checkpoint.remote import RemoteRun, fetch_newest
from quadriga.config import stores
from quadriga.config.schema import TrainerConfig
from quadriga.config.stores import MARKER, Store, fetched, local_file
from quadriga.errors import CheckpointError, StoreError
from quadriga.files import remove
from s3_server import Fault

pytestmark = pytest.mark.usefixtures("memory_store")


@pytest.fixture(
    params=["memory://run", "folder", pytest.param("s3://bucket/run", marks=pytest.mark.nightly)]
)
def url(request, tmp_path):
    if request.param.startswith("s3"):
        request.getfixturevalue("s3")
    return str(tmp_path / "store") if request.param == "folder" else request.param


def checkpoint(root, step: int, text: str = "weights"):
    partial = begin_checkpoint(root, step)
    names = ("actor/shard_0.bin", "critic/shard_0.bin", "empty")
    for name in names:
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(f"{text} {name} of {step}" if name != "empty" else "")
    files = [SavedFile(n, (partial / n).stat().st_size, digest_file(partial / n)) for n in names]
    return commit_checkpoint(partial, files, {"loader": {}})


def sent(run: RemoteRun, folder) -> None:
    run.send_checkpoint(folder, lambda: None, lambda _: None)


def test_a_checkpoint_is_the_same_after_its_way_through_a_store(url, tmp_path):
    run, order = RemoteRun(url), []
    assert run.steps() == [] and not run.fetch_checkpoint(5, tmp_path / "new")
    run.store.write("checkpoints/global_step_10/stream/rows", b"of an upload that was cut")
    for step in (2, 10, 11):
        run.send_checkpoint(checkpoint(tmp_path / "own", step), lambda: order.append("m"),
                            order.append)  # fmt: skip
    assert len(order) == 12 and order[3::4] == ["m"] * 3  # the marker's turn, after three files
    assert RemoteRun(url).steps() == [2, 10, 11]
    assert not any("stream/rows" in name for name in run.store.files())
    assert run.fetch_checkpoint(10, tmp_path / "new")
    folder = tmp_path / "new" / "global_step_10"
    assert verify_checkpoint(folder) == {"loader": {}}
    assert (folder / "actor/shard_0.bin").read_text() == "weights actor/shard_0.bin of 10"
    run.forget([2, 11])
    assert run.steps() == [10] and not run.fetch_checkpoint(2, tmp_path / "new")
    assert [n for n in run.store.files() if "step_2/" in n or "step_11/" in n] == []
    run.store.write("metrics.jsonl", b"{}")
    run.delete(["checkpoints", "metrics.jsonl", "samples.jsonl"])
    assert run.store.files().keys() <= {"checkpoints/steps.json"} and run.steps() == []


@pytest.mark.parametrize(
    "kind", ["error", pytest.param("hang", marks=pytest.mark.nightly), "cut", "flip"]
)
def test_a_fault_that_passes_is_not_seen_and_one_that_stays_is_named(s3, tmp_path, kind):
    run, folder = RemoteRun("s3://bucket/run"), checkpoint(tmp_path / "own", 1)
    s3.faults = [Fault(kind, "PUT", "actor/", 2), Fault("error", "GET", "list-type", 1)]
    sent(run, folder)
    assert run.steps() == [1] and run.fetch_checkpoint(1, tmp_path / "new")
    assert [fault.times for fault in s3.faults] == [0, 0]
    folder = checkpoint(tmp_path / "own", 2)
    s3.faults = [Fault(kind, "PUT", "critic/", 99)]
    with pytest.raises(
        StoreError, match=r"cannot write s3://bucket/run/checkpoints/global_step_2/c"
    ):
        sent(run, folder)
    assert s3.faults[0].times == 99 - stores.ATTEMPTS and run.steps() == [1]


def test_a_failure_that_only_the_first_attempt_explains_is_named(monkeypatch):
    said = iter(["Unable to load libjvm\ndlopen(…) failed", *["Prior attempt failed"] * 9])
    monkeypatch.setattr(stores, "BACKOFF_S", 0.0)

    def opened(*_, **__):
        raise OSError(next(said))

    monkeypatch.setattr("fsspec.core.url_to_fs", opened)
    text = "^cannot open hdfs://n/run: Unable to load libjvm; Prior attempt failed$"
    with pytest.raises(StoreError, match=text):
        Store("hdfs://n/run")


def test_a_listing_that_is_behind_hides_no_checkpoint(s3, tmp_path):
    run = RemoteRun("s3://bucket/run")
    sent(run, checkpoint(tmp_path / "own", 3))
    s3.faults = [Fault("behind", "GET", "list-type", 1)]
    assert run.steps() == [3] and s3.faults[0].times == 0
    run.store.remove([f"checkpoints/global_step_3/{MARKER}"])  # still listed: it is not read
    assert not run.fetch_checkpoint(3, tmp_path / "new")


def test_names_in_a_store_lead_to_no_file_outside_the_run_folder(tmp_path):
    run = RemoteRun("memory://run")
    sent(run, checkpoint(tmp_path / "own", 3))
    run.store.write("checkpoints/steps.json", b"[3, " + b"9" * 5000 + b"]")
    trainer = TrainerConfig(
        default_local_dir=str(tmp_path / "new" / "run"), remote_dir="memory://run"
    )
    assert run.steps() == [3] and fetch_newest(trainer) == []
    remove(tmp_path / "new")
    run.store.write("tensorboard/../../evil", b"x")
    with pytest.raises(StoreError, match=r"a file named 'tensorboard/\.\./\.\./evil', which leads"):
        fetch_newest(trainer)
    assert not (tmp_path / "new" / "evil").exists()


def test_damage_in_the_store_or_before_it_is_found(url, tmp_path):
    run, own = RemoteRun(url), tmp_path / "own"
    shard = "checkpoints/global_step_1/actor/shard_0.bin"
    marker = f"checkpoints/global_step_1/{MARKER}"
    for name, content, message in (
        (shard, b"weights actor/shard_0.bin of 9", "SHA-256"),
        (shard, b"short", "has 5 bytes, expected 30"),
        (shard, None, "does not exist"),
        (marker, b"{", "is damaged"),
        (marker, b"[]", "is damaged"),
        (marker, None, "../../evil"),
    ):
        sent(run, checkpoint(own, 1))
        if name == marker and content is None:
            value = json.loads((own / "global_step_1" / MARKER).read_text())
            value["files"]["../../evil"] = {"size": 1, "digest": ""}
            content = json.dumps(value).encode()
        run.store.remove([name]) if content is None else run.store.write(name, content)
        with pytest.raises(CheckpointError) as caught:
            run.fetch_checkpoint(1, tmp_path / "new")
        assert message in str(caught.value) and url in str(caught.value)
        assert [*(tmp_path / "new").iterdir()] == []
    (own / "global_step_1" / "actor/shard_0.bin").write_text("weights actor/shard_0.bin of X")
    with pytest.raises(StoreError, match="it is damaged, and not uploaded"):
        sent(run, own / "global_step_1")


def test_a_remote_file_is_fetched_once_and_again_after_a_change(url, tmp_path, monkeypatch):
    store = Store(url)
    store.write("in/train.jsonl", b"first")
    store.write("model/sub/weights.bin", b"w" * 9)
    store.write("model/config.json", b"{}")
    monkeypatch.setattr(Store, "read", lambda *_: None)
    if url.startswith("/"):
        assert local_file(f"file://{url}/in/train.jsonl").read_bytes() == b"first"
        return
    file = local_file(f"{url}/in/train.jsonl")
    assert file.name == "train.jsonl" and file.is_relative_to(tmp_path / "cache")
    assert file.read_bytes() == b"first"
    assert (fetched(f"{url}/model") / "sub/weights.bin").read_bytes() == b"w" * 9
    gets = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda *given: gets.append(given[1]) or get(*given))
    for content, fetches in ((b"first", []), (b"cargo", [""]), (b"again", ["", ""])):
        stores._fetched.clear()
        if content == b"cargo":  # a flipped byte of the copy, which its time does not show
            stat = file.stat()
            file.write_bytes(b"fjrst")
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            content = b"first"
        elif content == b"again":
            store.write("in/train.jsonl", b"again")
        assert local_file(f"{url}/in/train.jsonl").read_bytes() == content
        assert gets == fetches
    with pytest.raises(StoreError, match=r"nothing\.parquet does not exist"):
        local_file(f"{url}/in/nothing.parquet")
