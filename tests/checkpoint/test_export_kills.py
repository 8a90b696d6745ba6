"""An export that is killed leaves a complete model: the old one or the new one."""

import pytest
import torch
from kills import KilledError, kill_at
from safetensors.torch import load_file
from transformers import LlamaConfig

from quadriga.checkpoint import hf_export
from quadriga.checkpoint.hf_export import export_hf
from quadriga.errors import InputError


def export(folder, value):
    export_hf(folder, [("w", torch.full((2,), value))], LlamaConfig())


def die(*args, **kwargs):
    raise KilledError


def test_killed_at_every_operation_on_the_disk(tmp_path, monkeypatch):
    moments = 0
    for moment in range(1, 50):
        folder = tmp_path / str(moment) / "model"
        export(folder, 1.0)
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                export(folder, 2.0)
            except KilledError:
                moments += 1
            else:
                break
        whole = [p for p in (folder, folder.with_name("model.replaced")) if p.exists()]
        assert whole, "the old model was deleted before the new one had its name"
        assert (whole[0] / "config.json").is_file()
        assert load_file(whole[0] / "model.safetensors")["w"][0] in (1.0, 2.0)
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(hf_export, "save_torch_state_dict", die)
            export(folder, 3.0)
        assert folder.is_dir(), "the next export restores the name of the old model first"
        export(folder, 4.0)
        assert load_file(folder / "model.safetensors")["w"][0] == 4.0
        assert [p.name for p in folder.parent.iterdir()] == ["model"]
    assert moments > 5


def test_a_rank_of_a_lost_node_that_still_writes_changes_no_later_export(tmp_path):
    """Its node may be cut off from the controller, but not from the files."""
    folder, lost = tmp_path / "model", []

    def cut_off(partial):
        lost.append(partial)
        export_hf(folder, [("w", torch.full((2,), 2.0))], LlamaConfig(), extra=meanwhile)

    def meanwhile(_):
        lost[0].mkdir(parents=True, exist_ok=True)
        (lost[0] / "late.txt").write_text("of the lost rank")

    with pytest.raises(InputError):
        export_hf(folder, [("w", torch.full((2,), 1.0))], LlamaConfig(), extra=cut_off)
    assert load_file(folder / "model.safetensors")["w"][0] == 2.0
    assert not (folder / "late.txt").exists()
    export(folder, 3.0)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
