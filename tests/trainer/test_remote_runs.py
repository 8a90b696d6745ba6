"""A run whose folder is copied to a remote one, and its continuation on an empty machine."""

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import fsspec
import pytest
from run_cases import assert_equal_tensors, noted, timeless

from quadriga.checkpoint.folders import complete_checkpoints
from quadriga.checkpoint.remote import RemoteRun, Uploads
from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.config.stores import MARKER
from quadriga.errors import ConfigError
from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.run_folder import RunFolder
from quadriga.trainer import stages

pytestmark = pytest.mark.usefixtures("memory_store")
URL = "memory://runs/one"
REMOTE = f"trainer.remote_dir={URL}"
FOUR = ("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=1",
        "trainer.max_remote_ckpt_to_keep=3", "data.val_files=[]")  # fmt: skip


def rows(folder: Path, name: str) -> list[dict]:
    return timeless([*read_jsonl(folder / name)])


def test_a_run_goes_on_from_its_copy_on_an_empty_machine(
    run, tmp_path, train_overrides, capsys, caplog
):
    own, whole, again = tmp_path / "run", tmp_path / "whole", "trainer.resume_mode=auto"
    run(*FOUR, REMOTE)
    assert f"uploaded to {URL}" in capsys.readouterr().err
    remote = RemoteRun(URL)
    assert remote.steps() == [2, 4]
    assert [step for step, _ in complete_checkpoints(own / "checkpoints")] == [4]
    written = {str(f.relative_to(own)) for f in own.rglob("*") if f.is_file()} - {"run.lock"}
    copied = {name for name in remote.store.files() if "global_step_2" not in name}
    assert copied == written | {f"model/{MARKER}", "checkpoints/steps.json"}
    assert all(remote.store.read(name) == (own / name).read_bytes() for name in written)
    own.rename(whole)
    shard = next(name for name in remote.store.files() if "step_4/actor/shard" in name)
    remote.store.write(shard, remote.store.read(shard)[:-1] + b"?")
    assert main(["train", *train_overrides, *FOUR, REMOTE]) == 2
    assert "already holds files; choose another folder, resume" in capsys.readouterr().err
    assert main(["train", *train_overrides, *FOUR, REMOTE, again]) == 0
    assert f"skipped a checkpoint: cannot read {URL}/checkpoints/global_step_4" in caplog.text
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert rows(own, name) == rows(whole, name)
        assert remote.store.read(name) == (own / name).read_bytes()
    assert_equal_tensors(own / "model", whole / "model")
    assert remote.steps() == [2, 4] and remote.fetch_checkpoint(4, tmp_path / "again")
    for step in (2, 4):
        remote.store.write(f"checkpoints/global_step_{step}/{MARKER}", b"{}")
    shutil.rmtree(own)
    capsys.readouterr()
    assert main(["train", *train_overrides, *FOUR, REMOTE, again]) == 2
    printed = capsys.readouterr().err
    assert "no checkpoint in" in printed and len(printed.splitlines()) == 1


@pytest.mark.parametrize(
    ("keep", "kept", "where"),
    [
        ("null", [2, 4], "all of it is in {}"),
        ("1", [4], "global_step_2: deleted here, by trainer.max_ckpt_to_keep\n"),
    ],
)
def test_an_upload_that_fails_ends_no_run_and_deletes_nothing(
    run, tmp_path, capsys, caplog, monkeypatch, keep, kept, where
):
    memory = fsspec.get_filesystem_class("memory")
    put_file = memory.put_file

    def fails_for_two(self, path, name, **given):
        if "global_step_2/actor" in name:
            raise OSError("slow down")
        put_file(self, path, name, **given)

    monkeypatch.setattr(memory, "put_file", fails_for_two)
    each = ("trainer.save_freq=1", f"trainer.max_ckpt_to_keep={keep}")
    run(*FOUR, *each, REMOTE, "trainer.remove_local_after_upload=true")
    printed = capsys.readouterr().err
    assert f"global_step_2 is not uploaded: cannot write {URL}/checkpoints/glob" in caplog.text
    assert f"{URL} lacks global_step_2; {where.format(tmp_path / 'run')}" in printed
    left = [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert left == kept and RemoteRun(URL).steps() == [1, 3, 4]  # 1 and 3 are not here any more


def test_a_run_whose_remote_folder_another_run_takes_over_sends_nothing_more(
    run, tmp_path, capsys, caplog, monkeypatch
):
    def take_over(batch):
        rows = [*read_jsonl(tmp_path / "run/metrics.jsonl")]
        if rows and rows[-1]["step"] == 2 and not other.is_dir():
            until = time.monotonic() + 60
            while RemoteRun(URL).steps() != [2]:  # it is uploaded while step 3 generates
                assert time.monotonic() < until
                time.sleep(0.01)
            other.mkdir()
            (other / "config.yaml").write_text("of the other run")
            config = load_config(TrainConfig, [REMOTE])
            Uploads(config.trainer).open(RunFolder(other), "overwrite", 0)

    other = tmp_path / "other"
    noted(monkeypatch, stages, "measure_batch", take_over)
    run(*FOUR, REMOTE)
    store = RemoteRun(URL).store
    assert {*store.files()} == {"config.yaml", "run.lock"}
    assert store.read("config.yaml") == b"of the other run"
    assert f"{URL} was written by process {os.getpid()} of" in caplog.text
    assert f"global_step_4 is not uploaded: {URL}: run.lock there names another run (pro" in (
        caplog.text
    )
    printed = capsys.readouterr().err
    assert f"{URL} lacks global_step_4, metrics, model; all of it is in {tmp_path}" in printed


def test_model_and_data_from_a_store_train_as_those_of_this_machine(
    run, tmp_path, tiny_task, train_overrides, capsys
):
    files = fsspec.filesystem("memory")
    files.put(str(tiny_task.model), "memory://in/base", recursive=True)
    files.put_file(str(tiny_task.folder / "data" / "train.parquet"), "memory://in/train.parquet")
    given = ("actor_rollout_ref.model.path=memory://in/base", "trainer.total_training_steps=1",
             "data.train_files=[memory://in/train.parquet]", "data.val_files=[]")  # fmt: skip
    ours = run("data.val_files=[]", "trainer.total_training_steps=1", "trainer.save_freq=1")
    fetched = timeless(run(*given, f"trainer.default_local_dir={tmp_path / 'fetched'}"))
    assert fetched == timeless(ours)
    # The data is the same, so the run of this machine goes on with the remote files.
    longer = (*given, "trainer.total_training_steps=2", "trainer.resume_mode=auto")
    assert main(["train", *train_overrides, *longer]) == 0
    assert "is another one" not in capsys.readouterr().err
    assert main(["plan", *train_overrides, *given]) == 0
    with pytest.raises(ConfigError, match="the ranks have processes of their own; set"):
        run(*given, "trainer.backend=ray", f"trainer.default_local_dir={tmp_path / 'ray'}")


def test_a_remote_folder_that_cannot_be_used_is_refused(refused, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *p: None if n == "gcsfs" else find(n, *p)
    )
    for setting, message in (
        ("trainer.remote_dir=gs://b/run", "gs:// needs the package gcsfs: pip install gcsfs"),
        ("trainer.remote_dir=z3://b/run", "no file system is known for z3://; write a path of"),
        ("trainer.remote_dir=s3://", "trainer.remote_dir=s3://: nothing follows s3://"),
        ("trainer.remote_dir=hf://a/b", "hf://a/b would be a commit for each file; for the model"),
        ("trainer.remote_dir=memory:///", "nothing follows memory://"),
        ("data.train_files=[file://]", "nothing follows file://"),
        ("trainer.remote_dir=", "trainer.remote_dir= is empty; name a folder, or leave it null"),
        ("trainer.remote_dir=simplecache::s3://b/run", "begins with no scheme; write a path of"),
        ("trainer.default_local_dir=/a/s3://b/run", "begins with no scheme; write a path of"),
        ("trainer.default_local_dir=s3://me:password@b/run",
         "set trainer.remote_dir=s3://***@b/run, where the run folder is copied to"),
        ("trainer.resume_mode=s3://b/run", "to the run that holds it, and resume_mode=auto"),
        ("trainer.remove_local_after_upload=true", "of the copies in trainer.remote_dir; set that"),
        ("trainer.max_remote_ckpt_to_keep=2", "of the copies in trainer.remote_dir; set that"),
        (f"trainer.remote_dir={tmp_path}/run/copy", "run, which it is a copy of; choose another"),
        ("actor_rollout_ref.model.path=memory://no", "memory://no does not exist, or has no files"),
        ("data.train_files=[memory://no.parquet]", "memory://no.parquet does not exist"),
    ):  # fmt: skip
        assert message in refused(setting), setting


def test_a_store_that_answers_nothing_ends_a_resume_and_does_not_start_anew(refused, monkeypatch):
    def fails(self, *_, **__):
        raise OSError("no route to host")

    RemoteRun(URL).store.write("checkpoints/steps.json", json.dumps([2]).encode())
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", fails)
    line = refused(REMOTE, "trainer.resume_mode=auto")
    assert "cannot read memory://runs/one/checkpoints/steps.json: no route to host" in line
