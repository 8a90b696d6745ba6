"""The engine `hf`: generation in this process with a Hugging Face model.

- `engine`: `HFRollout`, its weights and its states.
- `generation`: one micro-batch, from the prefill to the last token.
- `weights`: memory of its own, or tensors of the training engine.
- `kv_cache`: the cache with spare columns.
- `unlisted`: a check of models of other architectures than those that were tested.
"""

from __future__ import annotations

from quadriga.rollout.hf.engine import HFRollout

__all__ = ["HFRollout"]
