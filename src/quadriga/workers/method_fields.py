"""The fields that each method of the built-in workers reads from its batch and returns.

The methods select their inputs with these tuples, and `trainer.dataflow` checks with them, before
a run starts, that an earlier stage writes every field that a method reads.
"""

from dataclasses import replace

from quadriga.protocol import fields
from quadriga.protocol.fields import StageFields

MODEL_INPUTS = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSE_MASK)
"""What a training engine needs for a forward pass over sequences. It derives the positions and the
ids of the responses from these fields, so the others are not moved to the ranks."""

IMAGE_INPUTS = (fields.MULTI_MODAL_INPUTS,)
"""What a model that takes images needs in addition, and with it `position_ids` [B, 3, …], which a
model of text derives itself."""

GENERATE_SEQUENCES = StageFields(
    "generate_sequences",
    reads=(fields.INPUT_IDS, fields.ATTENTION_MASK, fields.SAMPLE_SEED),
    reads_if_present=IMAGE_INPUTS,
    writes=(
        fields.PROMPTS, fields.RESPONSES, fields.RESPONSE_MASK, fields.ROLLOUT_LOG_PROBS,
        fields.INPUT_IDS, fields.ATTENTION_MASK, fields.POSITION_IDS, fields.SEQUENCE_LENGTH,
        fields.FINISHED, fields.WEIGHT_VERSION,
    ),
    drops=(fields.SAMPLE_SEED,),
)  # fmt: skip
BEGUN_RESPONSES = (
    fields.RESPONSES, fields.RESPONSE_MASK, fields.ROLLOUT_LOG_PROBS, fields.TOKEN_VERSIONS,
)  # fmt: skip
"""The responses of an earlier call so far."""
OBSERVED = -2
"""In place of the version of a token that no weights have sampled: an environment has answered it.
Its mask is 0."""
CONTEXT = -3
"""The same, and the token is the first one of a context: it sees no token before it."""
REWRITTEN = -4
"""The same, and the context begins because the chat template writes the earlier one in another
way."""

CONTINUE_SEQUENCES = replace(
    GENERATE_SEQUENCES,
    reads_if_present=(*IMAGE_INPUTS, *BEGUN_RESPONSES, fields.ROUTED_EXPERTS, fields.GREEDY),
    writes=(*GENERATE_SEQUENCES.writes, fields.TOKEN_VERSIONS, fields.PAUSED),
    drops=(*GENERATE_SEQUENCES.drops, fields.GREEDY),
)
"""A call of `generate_sequences` that may pause and continue responses."""

PLAY_EPISODES = replace(
    CONTINUE_SEQUENCES, writes=(*CONTINUE_SEQUENCES.writes, fields.TURN_REWARDS, fields.EPISODE)
)
"""The calls of `generate_sequences`, and the answers of environments between them."""

COMPUTE_LOG_PROB = StageFields(
    "compute_log_prob",
    reads=MODEL_INPUTS,
    reads_if_present=(fields.ROUTED_EXPERTS, *IMAGE_INPUTS),
    writes=(fields.OLD_LOG_PROBS, fields.ENTROPYS),
)
COMPUTE_REF_LOG_PROB = StageFields(
    "compute_ref_log_prob",
    reads=MODEL_INPUTS,
    reads_if_present=IMAGE_INPUTS,
    writes=(fields.REF_LOG_PROB,),
)
COMPUTE_VALUES = StageFields("compute_values", reads=MODEL_INPUTS, writes=(fields.VALUES,))
COMPUTE_RM_SCORE = StageFields(
    "compute_rm_score",
    reads=(fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSES, fields.RAW_PROMPT),
    writes=(fields.RM_SCORES,),
)
UPDATE_CRITIC = StageFields(
    "update_critic", reads=(*MODEL_INPUTS, fields.VALUES, fields.RETURNS), writes=(fields.PARTIALS,)
)
UPDATE_ACTOR = StageFields(
    "update_actor",
    reads=(*MODEL_INPUTS, fields.ADVANTAGES),
    reads_if_present=(
        fields.OLD_LOG_PROBS, fields.REF_LOG_PROB, fields.ROLLOUT_IS_WEIGHTS,
        fields.ROLLOUT_LOG_PROBS, fields.SELECTED_TOKENS, fields.ROUTED_EXPERTS, *IMAGE_INPUTS,
    ),
    writes=(fields.PARTIALS,),
)  # fmt: skip
UPDATE_SFT = StageFields("update_sft", reads=MODEL_INPUTS)
COMPUTE_SFT_LOG_PROB = StageFields(
    "compute_sft_log_prob", reads=MODEL_INPUTS, writes=(fields.OLD_LOG_PROBS,)
)


def scored_with_model(score: StageFields, *, rules: bool) -> StageFields:
    """Return the stage that scores responses as it is with a reward model.

    Args:
        score: the stage with rules alone.
        rules: whether the rules have a part in the reward.
    """
    reads = (*score.reads, *COMPUTE_RM_SCORE.reads) if rules else COMPUTE_RM_SCORE.reads
    return StageFields(
        score.name,
        reads=tuple(dict.fromkeys(reads)),
        reads_if_present=score.reads_if_present if rules else (),
        writes=(*(score.writes if rules else (fields.TOKEN_LEVEL_SCORES,)), fields.RM_SCORES),
    )
