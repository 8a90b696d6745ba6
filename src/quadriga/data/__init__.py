"""Prompts and demonstrations from files, in an order that can be resumed.

    rows            parquet and JSON lines → rows; errors name the file and the row
    chat            the chat of a row → token ids, with the tokenizer's template, in bounded time
    encoded         token ids of rows, in memory or kept on disk; `PromptDataset`
    conversations   `SFTDataset`: conversations for supervised fine-tuning; pairs for a reward model
    images          images in prompts: reading, tokens, patches, positions
    user_classes    datasets and samplers of the user
    loader          `PromptLoader`: batches in a seeded order, with a state; items → a batch
    arithmetic      word problems made from a seed, as parquet files

The package imports `errors`, `lazy`, `observability` and `protocol`. The names below are public;
each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.data.arithmetic import (
        ArithmeticFiles as ArithmeticFiles,
        ArithmeticTask as ArithmeticTask,
        Problem as Problem,
        make_parts as make_parts,
        write_arithmetic as write_arithmetic,
    )
    from quadriga.data.conversations import SFTDataset as SFTDataset
    from quadriga.data.encoded import PromptDataset as PromptDataset
    from quadriga.data.loader import (
        PromptLoader as PromptLoader,
        SFTLoader as SFTLoader,
        collate_answers as collate_answers,
        collate_prompts as collate_prompts,
    )
    from quadriga.data.rows import check_files as check_files, read_rows as read_rows
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
