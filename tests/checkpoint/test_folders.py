"""The latest complete checkpoint is found, whenever the process is killed."""

import pytest
import torch
from kills import KilledError, kill_at

from quadriga.checkpoint import folders
from quadriga.checkpoint.files import write_tensors


def save(root, step, content):
    partial = folders.begin_checkpoint(root, step)
    (partial / "actor").mkdir()
    written = [
        write_tensors(partial / "actor" / f"{part}.safetensors", {"x": torch.full((3,), content)})
        for part in range(2)
    ]
    return folders.commit_checkpoint(
        partial, [f.under("actor") for f in written], {"content": content}
    )


@pytest.mark.parametrize("step", [6, 5], ids=["a new step", "the same step again"])
def test_killed_at_every_operation_on_the_disk(tmp_path, monkeypatch, step):
    moments = 0
    for moment in range(1, 100):
        root = tmp_path / str(moment)
        save(root, 5, 1.0)
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                save(root, step, 2.0)
            except KilledError:
                moments += 1
            else:
                break
        found = folders.newest_undamaged_checkpoint(root)[0]
        content = folders.verify_checkpoint(found)["content"]
        assert content in (1.0, 2.0)
        for part in range(2):
            stored = files_of(found / "actor" / f"{part}.safetensors")
            assert torch.equal(stored, torch.full((3,), content))
        save(root, 7, 3.0)
        assert folders.newest_undamaged_checkpoint(root)[0] == folders.step_folder(root, 7)
        assert list(root.glob("*.partial")) == [], "what was killed takes no disk for ever"
    assert moments > 10


def test_a_killed_deletion_of_an_old_checkpoint_leaves_nothing_for_ever(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, 1.0)
    for moment in (1, 2):  # the rename, the deletion
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            kill_at(patch, moment)
            folders.prune_checkpoints(tmp_path, 1)
        assert folders.newest_undamaged_checkpoint(tmp_path)[0] == folders.step_folder(tmp_path, 2)
    save(tmp_path, 3, 1.0)
    assert folders.prune_checkpoints(tmp_path, 1) == [folders.step_folder(tmp_path, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


def test_a_rank_of_a_lost_node_that_still_writes_changes_no_later_save_of_the_step(tmp_path):
    """Its node may be cut off from the controller, which has gone back, but not from the files."""
    lost, again = folders.begin_checkpoint(tmp_path, 6), folders.begin_checkpoint(tmp_path, 6)
    files = []
    for folder, content in ((again, 2.0), (lost, 1.0)):
        (folder / "actor").mkdir(parents=True, exist_ok=True)
        path = folder / "actor" / "0.safetensors"
        files.append(write_tensors(path, {"x": torch.full((3,), content)}).under("actor"))
    found = folders.commit_checkpoint(again, files[:1])
    folders.verify_checkpoint(found)
    assert torch.equal(files_of(found / "actor" / "0.safetensors"), torch.full((3,), 2.0))


@pytest.mark.parametrize(("moment", "left"), [(1, [1, 2, 3]), (2, [1, 2])])
def test_a_kill_while_later_steps_are_set_aside_leaves_the_steps_before_them(
    tmp_path, monkeypatch, moment, left
):
    for step in (1, 2, 3):
        save(tmp_path, step, 1.0)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        kill_at(patch, moment)
        folders.set_aside_after(tmp_path, 1)
    assert [step for step, _ in folders.complete_checkpoints(tmp_path)] == left


def files_of(path):
    from safetensors.torch import load_file

    return load_file(path)["x"]


def test_prune_keeps_the_newest_checkpoints(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, 1.0)
    assert folders.prune_checkpoints(tmp_path, None) == []
    removed = folders.prune_checkpoints(tmp_path, 2)
    assert removed == [folders.step_folder(tmp_path, 1), folders.step_folder(tmp_path, 2)]
    assert [step for step, _ in folders.complete_checkpoints(tmp_path)] == [3, 4]
    assert not folders.step_folder(tmp_path, 1).exists()
