"""An export that is killed leaves a complete model: the old one or the new one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from quadriga import files
from quadriga.checkpoint import folders, hf_export
from quadriga.checkpoint.hf_export import export_hf


class KilledError(Exception):
    """Stands for the death of the process."""


def export(folder, value):
    export_hf(folder, [("w", torch.full((2,), value))], LlamaConfig())


def die(*args, **kwargs):
    raise KilledError


def kill_at(patch, moment):
    """Raise at the `moment`-th operation on the disk."""
    count = [0]

    def counted(function):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == moment:
                raise KilledError
            return function(*args, **kwargs)

        return call

    patch.setattr(folders.os, "replace", counted(folders.os.replace))
    patch.setattr(files.os, "fsync", counted(files.os.fsync))
    patch.setattr(hf_export, "save_torch_state_dict", counted(hf_export.save_torch_state_dict))
    patch.setattr(folders.shutil, "rmtree", counted(folders.shutil.rmtree))


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
