"""A damaged checkpoint is found before the run is resumed, whatever was changed in it.

`auto` resumes from the last complete checkpoint and says which it has skipped; a checkpoint that is
named is refused.
"""

import errno
import itertools
import json
import os
import shutil

import pytest
import torch

from quadriga import files
from quadriga.checkpoint import folders
from quadriga.checkpoint.files import SavedFile, digest_file, digest_json, write_json
from quadriga.checkpoint.shards import Origin, RankState, load_rank_state, read_scalars
from quadriga.checkpoint.writer import reported_files
from quadriga.config.schema import TrainerConfig
from quadriga.errors import CheckpointError, InputError
from quadriga.files import HashedFile
from quadriga.trainer.checkpoints import checkpoint_to_resume

SHARD = "actor/shard_00000.safetensors"
INFO = {"loader": {"epoch": 0}, "kl_controller": {"value": 0.1}}


def save(root, step, ranks=2):
    """Save a checkpoint as the ranks and the controller of a run do."""
    partial = folders.begin_checkpoint(root, step)
    tensors, scalars = {"w": torch.full((4,), float(step))}, {"step": step}
    states = [RankState.of(tensors, scalars, Origin(step, rank, ranks)) for rank in range(ranks)]
    reports = [state.write(partial / "actor") for state in states]
    return folders.commit_checkpoint(
        partial, reported_files("actor", reports), {"step": step, **INFO}
    )


@pytest.fixture
def root(tmp_path):
    """The checkpoints of a run folder, of steps 1 and 2."""
    root = tmp_path / "checkpoints"
    save(root, 1)
    save(root, 2)
    return root


def rewrite_marker(folder, *, sign=True, **changes):
    """Change entries of the marker; `sign` computes its digest anew, as an attacker would."""
    marker = json.loads((folder / folders.MARKER).read_text()) | changes
    marker.pop("digest", None)
    digest = digest_json(marker) if sign else "0" * 64
    (folder / folders.MARKER).write_text(json.dumps({**marker, "digest": digest}))


def flip_a_bit(folder, root):
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)


def shard_of_another_step(folder, root):
    shutil.copy(root / "global_step_1" / SHARD, folder / SHARD)


def cut_a_file(folder, root):
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])


def delete_a_file(folder, root):
    (folder / SHARD).unlink()


def alter_the_step(folder, root):
    text = (folder / folders.MARKER).read_text()
    (folder / folders.MARKER).write_text(text.replace('"step": 2', '"step": 7'))


def alter_and_sign_the_step(folder, root):
    rewrite_marker(folder, step=7)


def nest_the_marker(folder, root):
    (folder / folders.MARKER).write_text("[" * 100_000)


def link_in_place_of_a_file(folder, root):
    shutil.move(folder / SHARD, root / "moved")
    (folder / SHARD).symlink_to(root / "moved")


def link_in_place_of_a_folder(folder, root):
    shutil.move(folder / "actor", root / "moved")
    (folder / "actor").symlink_to(root / "moved")


def name_that_leads_out(folder, root):
    outside = write_json(root / "outside.json", {})
    listed = {"../outside.json": {"size": outside.size, "digest": outside.digest}}
    rewrite_marker(folder, files=listed)


def format_of_an_earlier_version(folder, root):
    (folder / folders.MARKER).write_text(json.dumps({"files": {SHARD: 10}, "info": {"step": 2}}))


DAMAGE = {
    flip_a_bit: "other content than was written",
    shard_of_another_step: "other content than was written",
    cut_a_file: r"shard_00000\.safetensors', which is missing, is no plain file or does not have",
    delete_a_file: "is missing",
    alter_the_step: "its digest does not match",
    alter_and_sign_the_step: "is of step 7, but its folder is named global_step_2",
    nest_the_marker: "not valid JSON",
    link_in_place_of_a_file: "is no plain file",
    link_in_place_of_a_folder: "is no plain file",
    name_that_leads_out: "is no plain file",
    format_of_an_earlier_version: "is a checkpoint of format 1, but this version reads format 3",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_named_and_the_checkpoint_before_is_used(root, caplog, damage):
    damage(folders.step_folder(root, 2), root)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        folders.verify_checkpoint(folders.step_folder(root, 2))
    auto = TrainerConfig(resume_mode="auto", default_local_dir=str(root.parent))
    assert checkpoint_to_resume(auto, tell=True) == folders.step_folder(root, 1)
    assert "skipped a checkpoint" in caplog.text and "global_step_2" in caplog.text
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        checkpoint_to_resume(TrainerConfig(resume_mode=str(folders.step_folder(root, 2))))


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_again(root):
    flip_a_bit(folders.step_folder(root, 1), root)
    flip_a_bit(folders.step_folder(root, 2), root)
    auto = TrainerConfig(resume_mode="auto", default_local_dir=str(root.parent))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used.*global_step_2"):
        checkpoint_to_resume(auto)


def test_a_link_in_place_of_a_checkpoint_is_neither_read_nor_pruned(root, tmp_path):
    outside = save(tmp_path / "elsewhere", 3)
    folders.step_folder(root, 3).symlink_to(outside)
    assert [step for step, _ in folders.complete_checkpoints(root)] == [1, 2]
    folders.prune_checkpoints(root, 1)
    save(root, 3)
    assert not folders.step_folder(root, 3).is_symlink()
    assert folders.verify_checkpoint(outside)["step"] == 3
    assert [step for step, _ in folders.complete_checkpoints(root)] == [2, 3]


def test_a_link_within_a_checkpoint_is_not_deleted_through(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (folders.step_folder(root, 1) / "actor" / "link").symlink_to(outside)
    partial = folders.step_folder(root, 3).with_suffix(".partial")
    partial.symlink_to(outside)
    folders.prune_checkpoints(root, 1)
    save(root, 3)
    assert [step for step, _ in folders.complete_checkpoints(root)] == [2, 3]
    assert (outside / "precious").exists()


def test_a_link_in_place_of_a_file_is_not_written_through(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "drawn")  # the name is random
    (tmp_path / ".drawn.partial").symlink_to(target)
    with pytest.raises(InputError, match=r"cannot write .*state\.json"):
        write_json(tmp_path / "state.json", {})
    assert target.read_text() == "precious"


def test_the_files_of_another_step_or_rank_are_refused_by_each_rank(root, tmp_path):
    one, two = (folders.step_folder(root, step) / "actor" for step in (1, 2))
    tensors = {"w": torch.zeros(4)}
    assert read_scalars(two, step=2) == {"step": 2}
    load_rank_state(two, tensors, rank=0, step=2)
    with pytest.raises(CheckpointError, match=r"of step 2, .* expected of step 3"):
        load_rank_state(two, tensors, rank=0, step=3)
    for name in ("shard_00001.json", "shard_00001.safetensors", "random_00001.safetensors"):
        mixed = tmp_path / name
        shutil.copytree(two, mixed)
        shutil.copy(one / name, mixed / name)
        with pytest.raises(CheckpointError, match=rf"{name} is of step 1, written by rank 1 of 2"):
            load_rank_state(mixed, tensors, rank=1, step=2)
    swapped = tmp_path / "swapped"
    shutil.copytree(two, swapped)
    shutil.copy(two / "shard_00001.safetensors", swapped / "shard_00000.safetensors")
    with pytest.raises(CheckpointError, match=r"shard_00000.safetensors is of step 2, written by "):
        load_rank_state(swapped, tensors, rank=0, step=2)


def test_a_commit_fails_if_the_controller_does_not_see_what_a_rank_wrote(tmp_path):
    for reported, message in {
        (): "no rank has reported a file",
        (SavedFile("actor/x.json", 2, "0"),): r"written actor/x\.json with 2 bytes, but the contr",
        (SavedFile("state.json", 99, "0"),): "controller sees 2 bytes",
        (SavedFile("../state.json", 2, "0"),): "does not see it",
    }.items():
        partial = folders.begin_checkpoint(tmp_path, 4)
        write_json(partial / "state.json", {})
        with pytest.raises(CheckpointError, match=message):
            folders.commit_checkpoint(partial, reported)
        assert folders.complete_checkpoints(tmp_path) == []


def test_a_disk_that_is_full_at_any_write_leaves_a_complete_checkpoint(root, monkeypatch):
    """Each write, flush and rename fails in turn; the marker is written by the last of them."""
    left = [0]

    def limited(call):
        def limited_call(*arguments):
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments)

        return limited_call

    monkeypatch.setattr(HashedFile, "write", limited(HashedFile.write))
    monkeypatch.setattr(os, "fsync", limited(os.fsync))
    monkeypatch.setattr(os, "replace", limited(os.replace))
    for failing in itertools.count(1):
        left[0] = failing
        try:
            save(root, 3)
        except InputError as error:
            assert "No space left on device" in str(error) and "\n" not in str(error)
        else:
            break
        assert left[0] <= 0
        newest, errors = folders.newest_undamaged_checkpoint(root)
        assert (
            newest in (folders.step_folder(root, 2), folders.step_folder(root, 3)) and errors == []
        )
        shutil.rmtree(folders.step_folder(root, 3), ignore_errors=True)
    assert failing > 12, "files, folders, marker and rename were reached"
    assert folders.newest_undamaged_checkpoint(root) == (folders.step_folder(root, 3), [])


def test_files_that_have_not_changed_are_read_once(root, monkeypatch):
    read = []
    monkeypatch.setattr(folders, "_SETTLED_S", 1e9)
    monkeypatch.setattr(folders, "digest_file", lambda path: read.append(path) or digest_file(path))
    folder = folders.step_folder(root, 2)
    files = len(json.loads((folder / folders.MARKER).read_text())["files"])
    auto = TrainerConfig(resume_mode="auto", default_local_dir=str(root.parent))
    for _ in range(2):  # files of the last seconds: a change may leave coarse times as they are
        assert checkpoint_to_resume(auto) == folder
    assert len(read) == 2 * files
    read.clear()
    monkeypatch.setattr(folders, "_SETTLED_S", 0.0)
    assert checkpoint_to_resume(auto) == folder  # before the start of the workers
    assert checkpoint_to_resume(auto, tell=True) == folder  # when it is loaded
    assert len(read) == files
    before = (folder / SHARD).stat()
    flip_a_bit(folder, root)
    os.utime(folder / SHARD, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="other content than was written"):
        folders.verify_checkpoint(folder)
