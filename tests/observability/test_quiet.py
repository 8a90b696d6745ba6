"""Libraries are quiet, what the user set stays."""

from __future__ import annotations

import logging

from quadriga.observability.quiet import silence_libraries


def test_environment_for_child_processes_without_touching_what_is_set(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    silence_libraries()
    silence_libraries()
    import os

    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert logging.getLogger("huggingface_hub").level == logging.ERROR
