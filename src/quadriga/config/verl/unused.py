"""Settings of verl that other settings of verl leave without effect."""

from __future__ import annotations

from collections.abc import Mapping

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_FSDP, _MEGATRON = "fsdp", "megatron"


def reason_unused(key: str, given: Mapping[str, object]) -> str | None:
    """Return why verl does not read `key` beside the other settings `given`; None: it does."""
    if key.startswith("critic.") and given.get("algorithm.adv_estimator", "gae") != "gae":
        return "the estimator reads no values"
    role, found, name = key.rpartition(f".{_MEGATRON}.")
    if not found:
        return None
    default = given.get(f"{_ACTOR}.strategy", _FSDP) if role == _REF else _FSDP
    strategy = given.get(f"{role}.strategy", default)
    if strategy != _MEGATRON:
        return f"the strategy is {strategy}"
    ranks = given.get(f"{role}.{_MEGATRON}.tensor_model_parallel_size", 1)
    if name == "sequence_parallel" and ranks == 1:
        return "tensor_model_parallel_size is 1"  # verl turns it off
    return None
