"""The names of all fields: for each its shape, dtype, unit, and the stages that write and read it.

Use the constants where a field is written or read (`batch.batch[fields.RESPONSES]`), so that each
name is spelled in one place. The table in docs/architecture.md is made from this list:
`python -m quadriga.protocol.fields` prints it.

Shapes: `B` rows, `P` prompt tokens (padded on the left), `R` response tokens (padded on the
right), `K` reward components. A prompt has `P` columns before generation; after generation a
sequence has `P + R`:

    input_ids of two rows, P = 3, R = 4; "." is padding
        . p p | r r r .
        p p p | r . . .
    response_mask
                1 1 1 0
                1 0 0 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INPUT_IDS: Final = "input_ids"
ATTENTION_MASK: Final = "attention_mask"
POSITION_IDS: Final = "position_ids"
SAMPLE_SEED: Final = "sample_seed"
PROMPT_LENGTH: Final = "prompt_length"
PROMPTS: Final = "prompts"
RESPONSES: Final = "responses"
RESPONSE_MASK: Final = "response_mask"
ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"
SEQUENCE_LENGTH: Final = "sequence_length"
FINISHED: Final = "finished"
WEIGHT_VERSION: Final = "weight_version"
REWARD_BASELINES: Final = "reward_baselines"
OLD_LOG_PROBS: Final = "old_log_probs"
ENTROPYS: Final = "entropys"
REF_LOG_PROB: Final = "ref_log_prob"
VALUES: Final = "values"
RM_SCORES: Final = "rm_scores"
TOKEN_LEVEL_SCORES: Final = "token_level_scores"
REWARD_COMPONENTS: Final = "reward_components"
TOKEN_LEVEL_REWARDS: Final = "token_level_rewards"
ROLLOUT_IS_WEIGHTS: Final = "rollout_is_weights"
ADVANTAGES: Final = "advantages"
RETURNS: Final = "returns"
SELECTED_TOKENS: Final = "selected_tokens"

DATA_SOURCE: Final = "data_source"
REWARD_MODEL: Final = "reward_model"
EXTRA_INFO: Final = "extra_info"
RAW_PROMPT: Final = "raw_prompt"
INDEX: Final = "index"
MULTI_MODAL_INPUTS: Final = "multi_modal_inputs"
UID: Final = "uid"
PARTIALS: Final = "partials"


@dataclass(frozen=True, slots=True)
class StageFields:
    """The fields that one stage of a training step reads and writes.

    Attributes:
        name: the worker method or the function that is the stage.
        reads: fields that must be in the batch.
        writes: fields that the stage adds or replaces.
        reads_if_present: fields that the stage reads only where an earlier stage has written them.
        drops: fields that the batch does not hold after the stage.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    reads_if_present: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every field that the stage may read. Positions come with images; see
        `models.images`."""
        of_images = (POSITION_IDS,) if MULTI_MODAL_INPUTS in self.reads_if_present else ()
        return (*self.reads, *self.reads_if_present, *of_images)


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    Attributes:
        name: its key in `DataProto.batch` or `DataProto.non_tensor_batch`.
        shape: in the letters of the module's docstring.
        dtype: torch's name of it, "object" for an array of Python objects.
        unit: unit and meaning.
        written_by, read_by: names of stages (`StageFields.name`).
    """

    name: str
    shape: str
    dtype: str
    unit: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...] = ()


_PROMPT_LOADER, _SFT_LOADER = "PromptLoader", "SFTLoader"
_LOADERS = (_PROMPT_LOADER, _SFT_LOADER)
_GENERATE = "generate_sequences"
_LOG_PROBS = ("compute_log_prob", "compute_ref_log_prob")
_UPDATES = ("update_critic", "update_actor", "update_sft")
# The forward pass of the policy and of the value model, in inference and in training.
_FORWARD = (*_LOG_PROBS, "compute_values", *_UPDATES)
_MASKING = ("mask_truncated", "mask_zero_variance_groups")
_SCORE = "score_responses"
_SHAPING = ("shape_scores", "penalise_kl", "correct_mismatch")

TENSORS: tuple[Field, ...] = (
    Field(
        INPUT_IDS, "[B, P], then [B, P+R]", "int64", "token ids",
        (*_LOADERS, _GENERATE), (_GENERATE, _SCORE, *_FORWARD),
    ),
    Field(
        ATTENTION_MASK, "[B, P], then [B, P+R]", "int64", "1 at tokens, 0 at padding",
        (*_LOADERS, _GENERATE), ("expand_prompts", _GENERATE, _SCORE, *_FORWARD),
    ),
    Field(
        POSITION_IDS, "[B, P], then [B, P+R]", "int64",
        "position of each token, from 0; for a model that takes images [B, 3, …]: in time, height "
        "and width",
        (*_LOADERS, _GENERATE),
    ),
    Field(
        SAMPLE_SEED, "[B]", "int64", "seed of the tokens that a row samples",
        ("expand_prompts",), (_GENERATE,),
    ),
    Field(
        PROMPT_LENGTH, "[B]", "int64", "tokens of the prompt, without padding",
        ("expand_prompts",), ("balance_over_ranks",),
    ),
    Field(PROMPTS, "[B, P]", "int64", "token ids, padded on the left", (_SFT_LOADER, _GENERATE)),
    Field(
        RESPONSES, "[B, R]", "int64", "token ids, padded on the right",
        (_SFT_LOADER, _GENERATE), (_SCORE, "log_samples"),
    ),
    Field(
        RESPONSE_MASK, "[B, R]", "int64",
        "1 at tokens of the policy, end token included; 0 at padding and at tokens without loss",
        (_SFT_LOADER, _GENERATE, _SCORE, *_MASKING),
        (
            _SCORE, *_FORWARD, "refill", "balance_over_ranks", "measure_batch", "measure_entropy",
            *_MASKING, *_SHAPING, "estimate_advantages", "select_update_tokens", "log_samples",
        ),
    ),
    Field(
        ROLLOUT_LOG_PROBS, "[B, R]", "float32",
        "nats, of the rollout engine's distribution; 0 outside the mask",
        (_GENERATE,), ("correct_mismatch", "update_actor"),
    ),
    Field(
        SEQUENCE_LENGTH, "[B]", "int64", "tokens of prompt and response, without padding",
        (_GENERATE,), ("balance_over_ranks", "measure_batch"),
    ),
    Field(
        FINISHED, "[B]", "int64", "1: the response has an end token; 0: the length limit cut it",
        (_GENERATE,), ("measure_batch", "mask_truncated", "refill"),
    ),
    Field(WEIGHT_VERSION, "[B]", "int64", "version of the weights that generated", (_GENERATE,)),
    Field(
        REWARD_BASELINES, "[B]", "float32", "reward, of the greedy response to the same prompt",
        ("add_baselines",), ("estimate_advantages",),
    ),
    Field(
        OLD_LOG_PROBS, "[B, R]", "float32", "nats, of the actor before the update",
        ("compute_log_prob",),
        (
            "penalise_kl", "correct_mismatch", "estimate_advantages", "select_update_tokens",
            "update_actor",
        ),
    ),
    Field(
        ENTROPYS, "[B, R]", "float32", "nats, of the actor before the update",
        ("compute_log_prob",), ("measure_entropy",),
    ),
    Field(
        REF_LOG_PROB, "[B, R]", "float32", "nats, of the reference policy",
        ("compute_ref_log_prob",), ("penalise_kl", "update_actor"),
    ),
    Field(
        VALUES, "[B, R]", "float32",
        "reward, the critic's expected return before each token is chosen",
        ("compute_values",), ("estimate_advantages", "update_critic"),
    ),
    Field(
        RM_SCORES, "[B, R]", "float32",
        "score of a reward model at the last token, 0 elsewhere",
        ("compute_rm_score", _SCORE),
    ),
    Field(
        TOKEN_LEVEL_SCORES, "[B, R]", "float32",
        "score of the reward function at the last token, 0 elsewhere",
        (_SCORE,),
        (
            "add_baselines", "refill", "measure_batch", "mask_zero_variance_groups",
            "shape_scores", "log_samples",
        ),
    ),
    Field(
        REWARD_COMPONENTS, "[B, K]", "float32",
        "numbers that the reward function returns beside its score",
        (_SCORE,), ("estimate_advantages",),
    ),
    Field(
        TOKEN_LEVEL_REWARDS, "[B, R]", "float32",
        "reward: the score after length penalty, clipping, whitening and KL penalty",
        ("shape_scores", "penalise_kl"), ("penalise_kl", "estimate_advantages"),
    ),
    Field(
        ROLLOUT_IS_WEIGHTS, "[B, R]", "float32",
        "importance weight of training against rollout, without unit",
        ("correct_mismatch",), ("update_actor",),
    ),
    Field(
        ADVANTAGES, "[B, R]", "float32", "reward, or without unit where it is normalised",
        ("estimate_advantages",), ("balance_over_ranks", "select_update_tokens", "update_actor"),
    ),
    Field(
        RETURNS, "[B, R]", "float32", "reward, the target of the critic",
        ("estimate_advantages",), ("update_critic",),
    ),
    Field(
        SELECTED_TOKENS, "[B, R]", "bool", "tokens that the covariance losses treat apart",
        ("select_update_tokens",), ("update_actor",),
    ),
)  # fmt: skip
"""Tensor fields, in the order in which a step writes them."""

ARRAYS: tuple[Field, ...] = (
    Field(
        DATA_SOURCE, "[B]", "object", "str or None, selects the built-in reward function",
        (_PROMPT_LOADER,), (_SCORE, "log_samples"),
    ),
    Field(
        REWARD_MODEL, "[B]", "object", "dict with ground_truth",
        (_PROMPT_LOADER,), (_SCORE, "log_samples"),
    ),
    Field(
        EXTRA_INFO, "[B]", "object", "dict or None, other values of the data row",
        (_PROMPT_LOADER,), (_SCORE,),
    ),
    Field(
        RAW_PROMPT, "[B]", "object", "list of chat messages",
        (_PROMPT_LOADER,), (_SCORE, "log_samples"),
    ),
    Field(
        INDEX, "[B]", "object", "int, number of the row in its data files",
        (_PROMPT_LOADER,), (),
    ),
    Field(
        MULTI_MODAL_INPUTS, "[B]", "object",
        "for a model that takes images: dict of `pixel_values` and `image_grid_thw`, {} without",
        (_PROMPT_LOADER,), (_GENERATE, *_LOG_PROBS, "update_actor"),
    ),
    Field(
        UID, "[B]", "object", "str, the same for all rows of one prompt group",
        ("expand_prompts",),
        ("refill", "balance_over_ranks", "mask_zero_variance_groups", "estimate_advantages"),
    ),
    Field(
        PARTIALS, "[B]", "object",
        "in the result of an update, one row per rank: list of dicts from metric to `Partial`",
        ("update_critic", "update_actor"), ("log_update",),
    ),
)  # fmt: skip
"""Object arrays."""

BY_NAME: dict[str, Field] = {field.name: field for field in (*TENSORS, *ARRAYS)}


def markdown_table() -> str:
    """Return all fields as a Markdown table, in the order of `TENSORS` and `ARRAYS`."""
    head = ("field", "shape", "dtype", "unit, meaning", "written by", "read by")
    rows = [head, ("---",) * len(head)]
    for field in BY_NAME.values():
        writers, readers = (_code(names) for names in (field.written_by, field.read_by))
        rows.append((f"`{field.name}`", field.shape, field.dtype, field.unit, writers, readers))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "—"


if __name__ == "__main__":
    print(markdown_table(), end="")
