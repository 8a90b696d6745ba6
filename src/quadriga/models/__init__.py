"""MODELS: loading, value heads, log-probabilities, and a tiny model made here.

Names load when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.models.folder import check_model_folder as check_model_folder
    from quadriga.models.loading import load_causal_lm as load_causal_lm
    from quadriga.models.loading import load_tokenizer as load_tokenizer
    from quadriga.models.loading import load_value_model as load_value_model
    from quadriga.models.quiet import quiet_libraries as quiet_libraries
    from quadriga.models.tiny import TinyModel as TinyModel
    from quadriga.models.tiny import train_tokenizer as train_tokenizer
    from quadriga.models.tiny import write_tiny_model as write_tiny_model

_HOME = {
    "TinyModel": "tiny",
    "check_model_folder": "folder",
    "load_causal_lm": "loading",
    "load_tokenizer": "loading",
    "load_value_model": "loading",
    "quiet_libraries": "quiet",
    "train_tokenizer": "tiny",
    "write_tiny_model": "tiny",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
