"""What the tests of this folder share."""

import pytest
import torch

from quadriga.testing import write_reference_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model of the laws of rollout engines."""
    path = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(path)
    return path
