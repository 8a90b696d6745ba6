"""The engine `hf` satisfies every law of rollout engines."""

from __future__ import annotations

import pytest

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.testing import ROLLOUT_LAWS, RolloutUnderTest, write_reference_model


def hf(folder):
    return build_rollout("hf", ModelConfig(path=folder), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(path)
    return path


@pytest.fixture(scope="module")
def subject(folder):
    with RolloutUnderTest(hf, folder) as subject:
        yield subject


@pytest.mark.parametrize("law", ROLLOUT_LAWS, ids=str)
def test_hf_satisfies_the_law(subject, law):
    law.check(subject)
