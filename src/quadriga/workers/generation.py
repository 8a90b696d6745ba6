"""From prompts to a batch with responses: the engine-neutral half of `generate_sequences`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from quadriga.config.schema import ModelConfig, SamplingConfig
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from quadriga.rollout.base import RolloutEngine, SamplingParams


def generate_batch(
    engine: RolloutEngine, prompts: DataProto, sampling: SamplingParams
) -> DataProto:
    """Generate, and lay the results out as fields of a batch.

    Args:
        prompts: `input_ids`, `attention_mask` [B, P] int64, left-padded; `sample_seed` [B] int64.

    Returns:
        The fields that `ActorRolloutRefWorker.generate_sequences` names, [B, …];
        R is `sampling.max_new_tokens`.
    """
    import torch

    prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    out = engine.generate(prompt_ids, prompt_mask, sampling, prompts.batch["sample_seed"])
    attention_mask = torch.cat([prompt_mask, out.response_mask], dim=1)
    finished = [reason == "stop" for reason in out.finish_reason]
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": out.response_ids,
            "response_mask": out.response_mask,
            "rollout_log_probs": out.rollout_log_probs,
            "input_ids": torch.cat([prompt_ids, out.response_ids], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "sequence_length": attention_mask.sum(-1),
            "finished": torch.tensor(finished, dtype=torch.int64),
            "weight_version": torch.full((len(prompt_ids),), engine.version),
        }
    )


def sampling_params(
    settings: SamplingConfig, model: ModelConfig, *, max_new_tokens: int
) -> SamplingParams:
    """The settings as an engine takes them, with the model's own padding and end tokens."""
    from quadriga.rollout.base import SamplingParams

    pad, ends = special_tokens(model)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        eos_token_ids=ends,
        pad_token_id=pad,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )


@lru_cache(maxsize=8)
def special_tokens(model: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """(padding token, end tokens) of a model's tokenizer."""
    from quadriga.models.end_tokens import end_token_ids
    from quadriga.models.loading import load_tokenizer

    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    pad: int = tokenizer.pad_token_id
    return pad, end_token_ids(model.path, tokenizer)
