"""The engine `hf`: generation in this process with a Hugging Face model.

- `engine`: `HFRollout`, its weights and its states.
- `generation`: one micro-batch, from the prefill to the last token.
- `weights`: memory of its own, or tensors of the training engine.
- `row_caches`: the two forms of the cache, prompts that rows share and prompts that are repeated.
- `kv_cache`: layers with spare columns, from which rows are removed.
- `prompt_cache`, `decode_attention`: a cache that holds each prompt once, and attention to it.
- `unlisted`: a check of models of other architectures than those that were tested.
"""

from __future__ import annotations

from quadriga.rollout.hf.engine import HFRollout

__all__ = ["HFRollout"]
