"""Prompts and demonstrations from files, in an order that can be resumed.

    rows              parquet and JSON lines → rows; errors name the file and the row
    bounds            limits of time and memory for a chat template
    chat              the chat of a row → token ids, with the tokenizer's template
    prompts           `PromptDataset`: prompts for generation
    prompt_parts      the prompts of one file, in memory or on disk
    token_cache       the token ids of a large file, made once and kept on disk
    images            images in prompts: reading, tokens, patches, positions
    conversations     `SFTDataset` and others: conversations for fine-tuning
    order             the rows of each epoch: all once, or files with weights
    user_classes      datasets and samplers of the user
    collate           items → a batch: padding, positions, object arrays
    loader            `PromptLoader`: batches in a seeded order, with a state
    arithmetic        word problems made from a seed
    arithmetic_files  the same as parquet files

The package imports `errors`, `lazy`, `observability` and `protocol`. The names below are public;
each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "ArithmeticFiles": "arithmetic_files",
    "ArithmeticTask": "arithmetic",
    "Problem": "arithmetic",
    "PromptDataset": "prompts",
    "PromptLoader": "loader",
    "SFTDataset": "conversations.sft",
    "SFTLoader": "loader",
    "check_files": "rows",
    "collate_answers": "collate",
    "collate_prompts": "collate",
    "make_parts": "arithmetic",
    "read_rows": "rows",
    "write_arithmetic": "arithmetic_files",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.data.arithmetic import ArithmeticTask as ArithmeticTask
    from quadriga.data.arithmetic import Problem as Problem
    from quadriga.data.arithmetic import make_parts as make_parts
    from quadriga.data.arithmetic_files import ArithmeticFiles as ArithmeticFiles
    from quadriga.data.arithmetic_files import write_arithmetic as write_arithmetic
    from quadriga.data.collate import collate_answers as collate_answers
    from quadriga.data.collate import collate_prompts as collate_prompts
    from quadriga.data.conversations.sft import SFTDataset as SFTDataset
    from quadriga.data.loader import PromptLoader as PromptLoader
    from quadriga.data.loader import SFTLoader as SFTLoader
    from quadriga.data.prompts import PromptDataset as PromptDataset
    from quadriga.data.rows import check_files as check_files
    from quadriga.data.rows import read_rows as read_rows
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
