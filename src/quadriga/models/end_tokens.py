"""Which tokens end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quadriga.models.folder import local_folder


def end_token_ids(path: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end token, and those that the model's generation_config.json names."""
    ends = {int(tokenizer.eos_token_id)}
    file = Path(local_folder(path)) / "generation_config.json"
    if file.is_file():
        named = json.loads(file.read_text()).get("eos_token_id")
        ends.update(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(ends))
