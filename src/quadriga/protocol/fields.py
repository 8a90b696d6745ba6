"""The one home of field names: shape, dtype, unit and who writes each of them.

Shapes: `B` samples, `P` prompt tokens (left-padded), `R` response tokens (right-padded). Use the
constants where a key is written or read (`batch[fields.RESPONSES]`), so that a name is spelled in
one place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One field: `shape` in the letters above, `dtype` by torch's name ("object" for arrays of
    objects), `unit` and meaning, and the methods or parts that write it."""

    name: str
    shape: str
    dtype: str
    unit: str
    written_by: tuple[str, ...]


_DATA, _ROLLOUT, _CONTROLLER = "data", "generate_sequences", "controller"

TENSORS: tuple[Field, ...] = (
    Field("input_ids", "[B, P] or [B, P+R]", "int64", "token ids", (_DATA, _ROLLOUT)),
    Field("attention_mask", "[B, P] or [B, P+R]", "int64", "1 = a real token", (_DATA, _ROLLOUT)),
    Field("position_ids", "[B, P] or [B, P+R]", "int64", "position of a token", (_DATA, _ROLLOUT)),
    Field("prompts", "[B, P]", "int64", "token ids, left-padded", (_ROLLOUT,)),
    Field("responses", "[B, R]", "int64", "token ids, right-padded", (_ROLLOUT,)),
    Field(
        "response_mask", "[B, R]", "int64",
        "1 = written by the policy, end token included", (_ROLLOUT,),
    ),
    Field("rollout_log_probs", "[B, R]", "float32", "nats, 0 outside the mask", (_ROLLOUT,)),
    Field("old_log_probs", "[B, R]", "float32", "nats", ("compute_log_prob",)),
    Field("entropys", "[B, R]", "float32", "nats", ("compute_log_prob",)),
    Field("ref_log_prob", "[B, R]", "float32", "nats", ("compute_ref_log_prob",)),
    Field("values", "[B, R]", "float32", "expected return", ("compute_values",)),
    Field("rm_scores", "[B, R]", "float32", "score, at the last token", ("compute_rm_score",)),
    Field(
        "token_level_scores", "[B, R]", "float32",
        "score of the reward functions or model", (_CONTROLLER,),
    ),
    Field(
        "token_level_rewards", "[B, R]", "float32",
        "score less the KL penalty, where it is in the reward", (_CONTROLLER,),
    ),
    Field("advantages", "[B, R]", "float32", "reward", (_CONTROLLER,)),
    Field("returns", "[B, R]", "float32", "reward", (_CONTROLLER,)),
)  # fmt: skip
"""Tensor fields, in the order in which a step writes them."""

ARRAYS: tuple[Field, ...] = (
    Field("uid", "[B]", "object", "str, the same for all samples of one prompt", (_CONTROLLER,)),
    Field("data_source", "[B]", "object", "str, chooses the reward function", (_DATA,)),
    Field("reward_model", "[B]", "object", "dict with ground_truth", (_DATA,)),
    Field("extra_info", "[B]", "object", "dict, anything else of the row", (_DATA,)),
    Field("raw_prompt", "[B]", "object", "list of chat messages", (_DATA,)),
    Field("index", "[B]", "object", "int, the row's number in its file", (_DATA,)),
)
"""Object arrays."""

BY_NAME: dict[str, Field] = {field.name: field for field in (*TENSORS, *ARRAYS)}

INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"
PROMPTS = "prompts"
RESPONSES = "responses"
RESPONSE_MASK = "response_mask"
ROLLOUT_LOG_PROBS = "rollout_log_probs"
OLD_LOG_PROBS = "old_log_probs"
ENTROPYS = "entropys"
REF_LOG_PROB = "ref_log_prob"
VALUES = "values"
RM_SCORES = "rm_scores"
TOKEN_LEVEL_SCORES = "token_level_scores"
TOKEN_LEVEL_REWARDS = "token_level_rewards"
ADVANTAGES = "advantages"
RETURNS = "returns"
UID = "uid"
DATA_SOURCE = "data_source"
REWARD_MODEL = "reward_model"
EXTRA_INFO = "extra_info"
RAW_PROMPT = "raw_prompt"
INDEX = "index"
