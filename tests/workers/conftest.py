"""The model of the updates on several ranks."""

import pytest


@pytest.fixture(scope="module")
def folder(model_folder) -> str:
    """The folder of a tiny Llama model."""
    return model_folder
