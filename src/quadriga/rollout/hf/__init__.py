"""The engine `hf`: generation in this process with a Hugging Face model.

- `engine`: `HFRollout`, its states, and its weights: memory of its own, or tensors of the actor.
- `generation`: one micro-batch, from the prefill to the last token, and how a token is sampled.
- `kv_cache`: layers with spare columns, from which rows are removed; prompts that rows share, with
  attention to them, and prompts that are repeated.

Importing this file imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.config.schema import ModelConfig
from quadriga.rollout import Rollout

if TYPE_CHECKING:
    from quadriga.models.memory import EngineMemory
    from quadriga.rollout.memory import GenerationUse


class HF(Rollout):
    """The reference, which needs no further package."""

    engine = "quadriga.rollout.hf.engine:HFRollout"
    computes_images = continues = in_flight = reports_routes = True

    def memory(self, model: ModelConfig, use: GenerationUse) -> EngineMemory:
        from quadriga.rollout.hf.memory import generation_memory

        return generation_memory(self.settings, model, use)
