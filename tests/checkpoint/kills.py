"""A process that is killed at any of its operations on the disk."""

from quadriga import files
from quadriga.checkpoint import folders, hf_export


class KilledError(Exception):
    """Stands for the death of the process."""


def kill_at(monkeypatch, moment):
    """Raise at the `moment`-th operation on the disk."""
    count = 0

    def counted(owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise KilledError
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(files.os, "replace")
    counted(files.os, "fsync")
    counted(files.HashedFile, "write")
    counted(folders.shutil, "rmtree")
    counted(hf_export, "save_torch_state_dict")
