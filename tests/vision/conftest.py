"""One small model of text and images for all tests of this folder."""

import pytest
import vision_cases as cases

from group_fixtures import backend, ray_backend, start

__all__ = ["backend", "ray_backend", "start"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision") / "model"
    cases.write_model(path)
    return path
