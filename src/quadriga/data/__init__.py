"""WHAT IS READ: prompts and demonstrations from files, in a seeded order that can be resumed.

Names load when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.data.arithmetic import ArithmeticTask as ArithmeticTask
    from quadriga.data.arithmetic import Problem as Problem
    from quadriga.data.arithmetic import make_parts as make_parts
    from quadriga.data.arithmetic_files import ArithmeticFiles as ArithmeticFiles
    from quadriga.data.arithmetic_files import write_arithmetic as write_arithmetic
    from quadriga.data.collate import collate_answers as collate_answers
    from quadriga.data.collate import collate_prompts as collate_prompts
    from quadriga.data.loader import PromptLoader as PromptLoader
    from quadriga.data.loader import SFTLoader as SFTLoader
    from quadriga.data.prompts import PromptDataset as PromptDataset
    from quadriga.data.rows import check_files as check_files
    from quadriga.data.rows import read_rows as read_rows
    from quadriga.data.sft import SFTDataset as SFTDataset

_HOME = {
    "ArithmeticFiles": "arithmetic_files",
    "ArithmeticTask": "arithmetic",
    "Problem": "arithmetic",
    "PromptDataset": "prompts",
    "PromptLoader": "loader",
    "SFTDataset": "sft",
    "SFTLoader": "loader",
    "check_files": "rows",
    "collate_answers": "collate",
    "collate_prompts": "collate",
    "make_parts": "arithmetic",
    "read_rows": "rows",
    "write_arithmetic": "arithmetic_files",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
