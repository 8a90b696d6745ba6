"""`silence_libraries` sets log levels and keeps what the user has set."""

from __future__ import annotations

import logging
import os

from quadriga.observability.quiet import silence_libraries


def test_environment_variables_are_set_unless_the_user_has_set_them(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    silence_libraries()
    silence_libraries()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert logging.getLogger("huggingface_hub").level == logging.ERROR
