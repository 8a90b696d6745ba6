"""The names of all fields: for each its shape, dtype, unit, and the stages that write it.

Use the constants where a field is written or read (`batch.batch[fields.RESPONSES]`), so that each
name is spelled in one place. The stages that read a field say so in their `StageFields`.

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

from dataclasses import dataclass
from typing import Final

INPUT_IDS: Final = "input_ids"
ATTENTION_MASK: Final = "attention_mask"
POSITION_IDS: Final = "position_ids"
SAMPLE_SEED: Final = "sample_seed"
GREEDY: Final = "greedy"
PROMPT_LENGTH: Final = "prompt_length"
PROMPTS: Final = "prompts"
RESPONSES: Final = "responses"
RESPONSE_MASK: Final = "response_mask"
ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"
ROUTED_EXPERTS: Final = "routed_experts"
SEQUENCE_LENGTH: Final = "sequence_length"
FINISHED: Final = "finished"
PAUSED: Final = "paused"
TOKEN_VERSIONS: Final = "token_versions"
TURN_REWARDS: Final = "turn_rewards"
WEIGHT_VERSION: Final = "weight_version"
REWARD_BASELINES: Final = "reward_baselines"
OLD_LOG_PROBS: Final = "old_log_probs"
ENTROPYS: Final = "entropys"
REF_LOG_PROB: Final = "ref_log_prob"
VALUES: Final = "values"
RM_SCORES: Final = "rm_scores"
TOKEN_LEVEL_SCORES: Final = "token_level_scores"
REWARD_COMPONENTS: Final = "reward_components"
REWARD_EXTRA: Final = "reward_extra"
EPISODE: Final = "episode"
TOKEN_LEVEL_REWARDS: Final = "token_level_rewards"
ROLLOUT_IS_WEIGHTS: Final = "rollout_is_weights"
ADVANTAGES: Final = "advantages"
RETURNS: Final = "returns"
SELECTED_TOKENS: Final = "selected_tokens"

DATA_SOURCE: Final = "data_source"
REWARD_MODEL: Final = "reward_model"
EXTRA_INFO: Final = "extra_info"
COLUMNS: Final = "columns"
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
        name: its key in `DataProto.batch`, or in `DataProto.non_tensor_batch` if it is an array.
        shape: in the letters of the module's docstring.
        dtype: torch's name of it, "object" for an array of Python objects.
        unit: unit and meaning.
        written_by: names of stages (`StageFields.name`).
    """

    name: str
    shape: str
    dtype: str
    unit: str
    written_by: tuple[str, ...]


_PROMPT_LOADER, _SFT_LOADER = "PromptLoader", "SFTLoader"
_GENERATE, _SCORE = "generate_sequences", "score_responses"

FIELDS: tuple[Field, ...] = (
    Field(INPUT_IDS, "[B, P], then [B, P+R]", "int64", "token ids",
          (_PROMPT_LOADER, _SFT_LOADER, _GENERATE)),
    Field(ATTENTION_MASK, "[B, P], then [B, P+R]", "int64",
          "0 at padding; at a token the number of its context, which is 1, and 2, … in an episode "
          "that begins another one: a token sees the tokens of its context",
          (_PROMPT_LOADER, _SFT_LOADER, _GENERATE)),
    Field(POSITION_IDS, "[B, P], then [B, P+R]", "int64",
          "position of each token, from 0; for a model that takes images [B, 3, …]: in time, "
          "height and width",
          (_PROMPT_LOADER, _SFT_LOADER, _GENERATE)),
    Field(SAMPLE_SEED, "[B]", "int64", "seed of the tokens that a row samples",
          ("expand_prompts",)),
    Field(GREEDY, "[B]", "int64", "1: the response is the greedy one, for a baseline; 0: sampled",
          ("add_greedy_rows",)),
    Field(PROMPT_LENGTH, "[B]", "int64", "tokens of the prompt, without padding",
          ("expand_prompts",)),
    Field(PROMPTS, "[B, P]", "int64", "token ids, padded on the left", (_SFT_LOADER, _GENERATE,)),
    Field(RESPONSES, "[B, R]", "int64", "token ids, padded on the right", (_SFT_LOADER, _GENERATE)),
    Field(RESPONSE_MASK, "[B, R]", "int64",
          "1 at tokens of the policy, end token included; 0 at padding and at tokens without loss",
          (_SFT_LOADER, _GENERATE, _SCORE, "mask_truncated", "mask_zero_variance_groups")),
    Field(ROLLOUT_LOG_PROBS, "[B, R]", "float32",
          "nats, of the rollout engine's distribution; 0 outside the mask", (_GENERATE,)),
    Field(ROUTED_EXPERTS, "[B, P+R, L, K]", "int8 or int16",
          "the K experts of each token in each of L layers with experts, -1 where the rollout has "
          "not computed a token; written with `rollout.replay_routes`",
          (_GENERATE,)),
    Field(SEQUENCE_LENGTH, "[B]", "int64", "tokens of prompt and response, without padding",
          (_GENERATE,)),
    Field(FINISHED, "[B]", "int64", "1: the response has an end token; 0: the length limit cut it",
          (_GENERATE,)),
    Field(PAUSED, "[B]", "int64", "1: the response has not ended, a later call continues it",
          (_GENERATE,)),
    Field(WEIGHT_VERSION, "[B]", "int64",
          "version of the weights that generated, of the oldest token", (_GENERATE,)),
    Field(TOKEN_VERSIONS, "[B, R]", "int64",
          "version of the weights that sampled each token, -2 at tokens of an environment, -3 at "
          "the first of a context, -4 if the template rewrites it, 0 at padding; written where "
          "responses are continued",
          (_GENERATE,)),
    Field(TURN_REWARDS, "[B, R]", "float32",
          "rewards of an environment, each at the last token of its turn; 0 elsewhere",
          (_GENERATE,)),
    Field(REWARD_BASELINES, "[B]", "float32", "reward, of the greedy response to the same prompt",
          ("add_baselines",)),
    Field(OLD_LOG_PROBS, "[B, R]", "float32", "nats, of the actor before the update",
          ("compute_log_prob",)),
    Field(ENTROPYS, "[B, R]", "float32", "nats, of the actor before the update",
          ("compute_log_prob",)),
    Field(REF_LOG_PROB, "[B, R]", "float32", "nats, of the reference policy",
          ("compute_ref_log_prob",)),
    Field(VALUES, "[B, R]", "float32",
          "reward, the critic's expected return before each token is chosen", ("compute_values",)),
    Field(RM_SCORES, "[B, R]", "float32", "score of a reward model at the last token, 0 elsewhere",
          ("compute_rm_score", _SCORE)),
    Field(TOKEN_LEVEL_SCORES, "[B, R]", "float32",
          "score of the reward function at the last token, 0 elsewhere", (_SCORE,)),
    Field(REWARD_COMPONENTS, "[B, K]", "float32",
          "numbers that the reward function returns beside its score", (_SCORE,)),
    Field(TOKEN_LEVEL_REWARDS, "[B, R]", "float32",
          "reward: the score after length penalty, clipping, whitening and KL penalty",
          ("shape_scores", "penalise_kl")),
    Field(ROLLOUT_IS_WEIGHTS, "[B, R]", "float32",
          "importance weight of training against rollout, without unit", ("correct_mismatch",)),
    Field(ADVANTAGES, "[B, R]", "float32", "reward, or without unit where it is normalised",
          ("estimate_advantages",)),
    Field(RETURNS, "[B, R]", "float32", "reward, the target of the critic",
          ("estimate_advantages",)),
    Field(SELECTED_TOKENS, "[B, R]", "bool", "tokens that the covariance losses treat apart",
          ("select_update_tokens",)),
    Field(DATA_SOURCE, "[B]", "object", "str or None, selects the built-in reward function",
          (_PROMPT_LOADER,)),
    Field(REWARD_MODEL, "[B]", "object", "dict with ground_truth", (_PROMPT_LOADER,)),
    Field(EXTRA_INFO, "[B]", "object", "dict or None, other values of the data row",
          (_PROMPT_LOADER,)),
    Field(COLUMNS, "[B]", "object", "dict of all values of the data row, by column",
          (_PROMPT_LOADER,)),
    Field(RAW_PROMPT, "[B]", "object", "list of chat messages", (_PROMPT_LOADER,)),
    Field(INDEX, "[B]", "object", "int, number of the row in its data files", (_PROMPT_LOADER,)),
    Field(MULTI_MODAL_INPUTS, "[B]", "object",
          "for a model that takes images: dict of `pixel_values` and `image_grid_thw`, {} without",
          (_PROMPT_LOADER,)),
    Field(REWARD_EXTRA, "[B]", "object",
          "dict of the numbers that the reward function returned beside its score", (_SCORE,)),
    Field(EPISODE, "[B]", "object",
          "dict of how an episode went: `status`, `turns`, `times`, `metrics`, `detail`",
          (_GENERATE,)),
    Field(UID, "[B]", "object", "str, the same for all rows of one prompt group",
          ("expand_prompts",)),
    Field(PARTIALS, "[B]", "object",
          "in the result of an update, one row per rank: list of dicts from metric to `Partial`",
          ("update_critic", "update_actor")),
)  # fmt: skip
"""In the order in which a step writes them: tensors, then object arrays."""

BY_NAME: dict[str, Field] = {field.name: field for field in FIELDS}
