"""What a training step does, and which fields each of its stages reads and writes.

    plan = StepPlan.of(config)         # made once; `quadriga plan` prints it
    check_dataflow(plan.stages)        # every field that is read is written by an earlier stage

Trainers run the check before they start any process. The fields of worker methods are declared
beside the workers (`workers.method_fields`); those of the controller's stages are declared here.
Stages have the names of the functions and methods that run them.

Most stages run one after the other, and a stage of an added role runs directly before or after the
one that it names. The passes (`PASSES`) run side by side, and while they run the controller scores
and masks the responses. They stand where what they write is in the batch. With stages a, b, c, d of
added roles:

    added stage                        runs
    a   before="compute_values"        before the first pass is submitted
    b   before="score_responses"       while the passes compute; it cannot read what they write
    c   after="score_responses"        the same
    d   after="compute_log_prob"       when all passes have ended

    declared   start_passes score_responses measure_batch compute_log_prob compute_values
    result     start_passes a b score_responses c measure_batch compute_log_prob compute_values d
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.policy_losses import get_policy_loss
from quadriga.config.plan import mini_batch_prompts
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import MISSING_PATH, TrainConfig
from quadriga.errors import ConfigError, nearest_name
from quadriga.parallel.balancing import Balance
from quadriga.parallel.costs import TOKENS, CostModel
from quadriga.protocol import fields
from quadriga.protocol.fields import StageFields
from quadriga.trainer.roles import workers
from quadriga.trainer.roles.needs import needs_critic, reads_ref_log_prob
from quadriga.trainer.roles.registry import PlacedStage, added_stages
from quadriga.workers.method_fields import (
    COMPUTE_LOG_PROB,
    COMPUTE_REF_LOG_PROB,
    COMPUTE_VALUES,
    CONTINUE_SEQUENCES,
    GENERATE_SEQUENCES,
    PLAY_EPISODES,
    UPDATE_ACTOR,
    UPDATE_CRITIC,
    scored_with_model,
)
from quadriga.workers.updates import skips_zero_advantages

_MASK, _SCORES = fields.RESPONSE_MASK, fields.TOKEN_LEVEL_SCORES
_LENGTHS = fields.SEQUENCE_LENGTH, fields.PROMPT_LENGTH
_OLD, _REWARDS = fields.OLD_LOG_PROBS, fields.TOKEN_LEVEL_REWARDS

# fmt: off
LOAD_PROMPTS = StageFields("PromptLoader", writes=(
    fields.INPUT_IDS, fields.ATTENTION_MASK, fields.POSITION_IDS, fields.RAW_PROMPT, fields.INDEX,
    fields.DATA_SOURCE, fields.REWARD_MODEL, fields.EXTRA_INFO,
))
EXPAND_PROMPTS = StageFields(
    "expand_prompts", reads=(fields.ATTENTION_MASK,),
    writes=(fields.UID, fields.SAMPLE_SEED, fields.PROMPT_LENGTH),
)
ADD_GREEDY_ROWS = StageFields("add_greedy_rows", writes=(fields.GREEDY,))
ADD_BASELINES = StageFields("add_baselines", reads=(_SCORES,), writes=(fields.REWARD_BASELINES,))
REFILL = StageFields("refill", reads=(_SCORES, _MASK, fields.FINISHED, fields.UID))
MEASURE_BATCH = StageFields(
    "measure_batch",
    reads=(_MASK, _SCORES, fields.FINISHED, fields.SEQUENCE_LENGTH, fields.PROMPT_LENGTH),
)
MEASURE_ENTROPY = StageFields("measure_entropy", reads=(fields.ENTROPYS, _MASK))
MASK_TRUNCATED = StageFields("mask_truncated", reads=(_MASK, fields.FINISHED), writes=(_MASK,))
SHAPE_SCORES = StageFields("shape_scores", reads=(_SCORES, _MASK), writes=(_REWARDS,))
PENALISE_KL = StageFields(
    "penalise_kl", reads=(_REWARDS, _OLD, fields.REF_LOG_PROB, _MASK), writes=(_REWARDS,)
)
SELECT_UPDATE_TOKENS = StageFields(
    "select_update_tokens", reads=(_OLD, fields.ADVANTAGES, _MASK), writes=(fields.SELECTED_TOKENS,)
)
BALANCE_OVER_RANKS = StageFields("balance_over_ranks", reads=(*_LENGTHS, fields.UID))
MASK_ZERO_VARIANCE_GROUPS = StageFields(
    "mask_zero_variance_groups", reads=(_MASK, _SCORES, fields.UID), writes=(_MASK,)
)
CORRECT_MISMATCH = StageFields(
    "correct_mismatch",
    reads=(_OLD, fields.ROLLOUT_LOG_PROBS, _MASK),
    writes=(fields.ROLLOUT_IS_WEIGHTS,),
)
ESTIMATE_ADVANTAGES = StageFields(
    "estimate_advantages",
    reads=(_REWARDS, _MASK, fields.UID),
    writes=(fields.ADVANTAGES, fields.RETURNS),
)
LOG_UPDATE = StageFields("log_update", reads=(fields.PARTIALS,))
LOG_SAMPLES = StageFields(
    "log_samples",
    reads=(fields.RESPONSES, _MASK, _SCORES, fields.RAW_PROMPT, fields.ATTENTION_MASK, fields.UID),
    reads_if_present=(fields.REWARD_MODEL, fields.DATA_SOURCE, fields.TOKEN_VERSIONS,
                      fields.REWARD_EXTRA, fields.RM_SCORES, fields.ADVANTAGES,
                      fields.ROLLOUT_LOG_PROBS, _OLD),
)
# fmt: on

ESTIMATOR_FIELDS = {
    "values_BT": fields.VALUES,
    "reward_baselines_B": fields.REWARD_BASELINES,
    "reward_components_BK": fields.REWARD_COMPONENTS,
    "old_log_prob_BT": fields.OLD_LOG_PROBS,
    "responses_BT": fields.RESPONSES,
}
"""Parameter of an advantage estimator → the field that it is read from, where it has one."""

PASSES = (COMPUTE_LOG_PROB.name, COMPUTE_REF_LOG_PROB.name, COMPUTE_VALUES.name)
"""Calls that are submitted together, in this order."""
START_PASSES = StageFields("start_passes")
SCORE = "score_responses"
EARLY = EXPAND_PROMPTS.name, GENERATE_SEQUENCES.name, SCORE
"""Stages before the step has its batch, with `trainer.max_staleness`."""
NOT_PLACES = (
    "PromptLoader",
    "add_greedy_rows",
    "add_baselines",
    "refill",
    START_PASSES.name,
    "log_update",
    "log_samples",
)
"""Stages that are parts of others: no added stage can stand beside them."""


@dataclass(frozen=True)
class StepPlan:
    """What one step of a run does, made once from the settings.

    Attributes:
        stages: what `RayPPOTrainer.fit` runs, in order, with the fields of each stage.
        streams: generation goes on while the policy is trained, and each response is scored when
            its prompt group is complete.
        draws_again: more prompts are drawn in place of zero-variance prompt groups, so the scores
            decide which rows stay in the batch and the sampler computes them. Otherwise they are
            computed while the roles evaluate the batch.
        masks_before_passes: rows are scored and masked before the passes over the batch. Rows that
            are masked, or left out because of their advantages, then need no log-probabilities and
            no values.
        advantages_before_passes: advantages are estimated before the passes, which leave out rows
            whose advantages are all 0.
        old_log_prob_pass: the old log-probabilities have a pass of their own. Otherwise the update
            computes them.
    """

    stages: tuple[StageFields, ...]
    streams: bool
    draws_again: bool
    masks_before_passes: bool
    advantages_before_passes: bool
    old_log_prob_pass: bool

    @classmethod
    def of(cls, config: TrainConfig, *, custom_reward: bool = False) -> StepPlan:
        """Return the plan of a run.

        `custom_reward`: the trainer is given a reward function instead of the settings.

        Raises:
            ConfigError: an added stage stands where it cannot run.
        """
        algorithm, added = config.algorithm, added_stages(config)
        estimator = get_advantage(algorithm.adv_estimator)
        scored_first = added_until_scores(added)
        # Leaving out rows changes no parameter if nothing but the update reads what the passes
        # write in them. It is of use where an estimator compares responses: a zero-variance group
        # has advantages 0. A correction in the pass over the old log-probabilities writes weights.
        old_pass = not workers.takes_old_log_probs_from_update(config)
        early = (
            estimator.needs_groups
            and skips_zero_advantages(config.actor_rollout_ref.actor)
            and not (workers.reads_old_log_probs(config) or estimator.needs_values)
            and not (old_pass and workers.corrects_mismatch(config))
            and scored_first
        )
        # A stage of an added role after the passes may write the scores.
        masks = algorithm.overlong.drop_truncated and scored_first
        plan = cls(
            stages=(),
            streams=config.trainer.max_staleness > 0,
            draws_again=algorithm.filter_groups.refills,
            masks_before_passes=algorithm.filter_groups.enable or masks or early,
            advantages_before_passes=early,
            old_log_prob_pass=old_pass,
        )
        early_stages = [placed.name for placed in added if placed.stage.neighbour in EARLY]
        if early_stages and plan.streams and (plan.draws_again or estimator.needs_baseline_scores):
            what = (
                "filter_groups.mode=refill" if plan.draws_again else "the greedy responses of remax"
            )
            raise ConfigError(
                f"stage {early_stages[0]} runs on the batch of a step with trainer.max_staleness, "
                f"but {what} need scores before; set max_staleness=0, or place it after the scores"
            )
        return replace(plan, stages=_step_stages(config, plan, custom_reward))

    @property
    def sampler_scores(self) -> bool:
        """Whether the rows have scores when the sampler returns them."""
        return self.draws_again or self.streams

    def text(self) -> str:
        """Return the plan in words, for `quadriga plan`."""
        names = ", ".join(dict.fromkeys(stage.name for stage in self.stages))
        old = "a pass of their own" if self.old_log_prob_pass else "computed by the update"
        left_out = []
        if self.masks_before_passes:
            left_out.append("masked rows")
        if self.advantages_before_passes:
            left_out.append("rows whose advantages are all 0")
        rows = [
            ("stages of a step", names),
            ("old log-probabilities", old),
            ("left out of passes", " and ".join(left_out) or "nothing"),
            ("scores", "before the passes" if self.masks_before_passes else "during the passes"),
        ]
        if self.streams:
            rows[-1] = ("scores", "as soon as a prompt group is complete")
        if self.draws_again:
            rows.append(("prompts", "drawn again in place of zero-variance prompt groups"))
        return "\n".join(f"{key:<23}{value}" for key, value in rows)


def _step_stages(
    config: TrainConfig, plan: StepPlan, custom_reward: bool
) -> tuple[StageFields, ...]:
    """Return the stages of one step of `RayPPOTrainer.fit`, in order."""
    algorithm, critic, old_pass = config.algorithm, needs_critic(config), plan.old_log_prob_pass
    score = _score_responses(config, custom_reward)
    if has_reward_model(config):
        score = scored_with_model(score, rules=bool(config.reward_model.rule_weight))
    # Some stages only measure unless the settings say more.
    mask_groups, correct = MASK_ZERO_VARIANCE_GROUPS, CORRECT_MISMATCH
    if not algorithm.filter_groups.enable:
        mask_groups = replace(mask_groups, writes=())
    if not workers.corrects_mismatch(config):
        correct = replace(correct, writes=())
    # The mask and the advantages say which rows need computation.
    live = ((_MASK, plan.masks_before_passes), (fields.ADVANTAGES, plan.advantages_before_passes))
    balance = _reading(BALANCE_OVER_RANKS, live)
    estimator, early = get_advantage(algorithm.adv_estimator), plan.advantages_before_passes
    inputs = [(field, name in estimator.needs) for name, field in ESTIMATOR_FIELDS.items()]
    estimate = _reading(ESTIMATE_ADVANTAGES, inputs)
    masking = (
        (score, not plan.sampler_scores),
        (MEASURE_BATCH, True),
        (MASK_TRUNCATED, algorithm.overlong.drop_truncated),
        (mask_groups, True),
    )
    stages = (
        (LOAD_PROMPTS, True),
        (EXPAND_PROMPTS, True),
        (ADD_GREEDY_ROWS, plan.streams and estimator.needs_baseline_scores),
        # On greedy responses of their own, of which only the baselines reach the batch.
        (replace(ADD_BASELINES, reads=()), estimator.needs_baseline_scores),
        (_generation(config), True),
        (score, plan.sampler_scores),
        (REFILL, plan.draws_again),
        *(masking if plan.masks_before_passes else ()),
        (SHAPE_SCORES, early),
        (estimate, early),
        # After the masking, so that rows which need no computation do not count.
        (balance, config.trainer.balance_batch),
        (START_PASSES, True),
        *(() if plan.masks_before_passes else masking),
        (COMPUTE_LOG_PROB, old_pass),
        (COMPUTE_REF_LOG_PROB, reads_ref_log_prob(config)),
        (COMPUTE_VALUES, critic),
        (SHAPE_SCORES, not early),
        (PENALISE_KL, algorithm.use_kl_in_reward),
        # Without the pass the update measures entropy and mismatch, and corrects it.
        (MEASURE_ENTROPY, old_pass),
        (correct, old_pass or workers.normalises_weights(config)),
        (estimate, not early),
        (SELECT_UPDATE_TOKENS, workers.selects_tokens(config)),
        (UPDATE_CRITIC, critic),
        (LOG_UPDATE, critic),
        (_update_actor(config, old_pass), True),
        (LOG_UPDATE, True),
        (_reading(LOG_SAMPLES, [(length, plan.streams) for length in _LENGTHS]), True),
    )
    return _with_roles(config, [stage for stage, runs in stages if runs])


def validation_dataflow(
    config: TrainConfig, *, custom_reward: bool = False
) -> tuple[StageFields, ...]:
    """Return the stages of `Validator.run`, in order."""
    score = _score_responses(config, custom_reward)
    generate = GENERATE_SEQUENCES if config.agent.path is None else PLAY_EPISODES
    flow = (LOAD_PROMPTS, EXPAND_PROMPTS, generate, score, LOG_SAMPLES)
    return _with_roles(config, flow, validation=True)


def check_dataflow(stages: Iterable[StageFields]) -> None:
    """Check that every field that a stage reads is written by an earlier stage.

    Raises:
        ConfigError: names the stage, the field, and the stages that would write it.
    """
    present: set[str] = set()
    passed: list[str] = []
    for stage in stages:
        for name in stage.reads:
            if name not in present:
                known = fields.BY_NAME.get(name)
                writers = f" (written by {' or '.join(known.written_by)})" if known else ""
                raise ConfigError(
                    f"stage {stage.name} reads field {name!r}{writers}, but with these settings no "
                    f"earlier stage writes it; earlier stages: {', '.join(passed) or 'none'}",
                    field=name,
                )
        # A stage that drops and writes one field replaces it, so the writes come last.
        present = (present - set(stage.drops)) | set(stage.writes)
        passed.append(stage.name)


# Stages whose fields depend on the settings.


def _generation(config: TrainConfig) -> StageFields:
    """The generation of a step."""
    stage = CONTINUE_SEQUENCES if config.trainer.max_staleness else GENERATE_SEQUENCES
    stage = stage if config.agent.path is None else PLAY_EPISODES
    routes = (fields.ROUTED_EXPERTS,) if config.actor_rollout_ref.rollout.replay_routes else ()
    return replace(stage, writes=(*stage.writes, *routes))


def _score_responses(config: TrainConfig, custom_reward: bool) -> StageFields:
    """The reward function of the settings (`rewards.RewardManager`), or one of the user.

    Nothing is known of a user's function, except that it must write the scores: it is taken to
    read nothing and to write the reward components.
    """
    if config.agent.path is not None:
        masks = (_MASK,) if config.agent.on_error == "mask" else ()
        reads = _MASK, fields.TURN_REWARDS, fields.EPISODE
        return StageFields("score_responses", reads=reads, writes=(_SCORES, *masks))
    if custom_reward:
        written = _SCORES, fields.REWARD_COMPONENTS, fields.REWARD_EXTRA
        return StageFields("score_responses", writes=written)
    components = (fields.REWARD_COMPONENTS,) if config.algorithm.reward_components else ()
    masks = (_MASK,) if config.reward.on_failure == "mask" else ()
    return StageFields(
        "score_responses",
        reads=(fields.RESPONSES, _MASK, fields.REWARD_MODEL),
        reads_if_present=(fields.DATA_SOURCE, fields.EXTRA_INFO, fields.COLUMNS),
        writes=(_SCORES, fields.REWARD_EXTRA, *components, *masks),
    )


def _reading(stage: StageFields, optional: Iterable[tuple[str, bool]]) -> StageFields:
    """Return a stage that also reads those optional fields that it needs."""
    return replace(stage, reads=(*stage.reads, *(field for field, is_read in optional if is_read)))


def _update_actor(config: TrainConfig, old_log_prob_pass: bool) -> StageFields:
    """`UPDATE_ACTOR` with the optional fields that the chosen loss cannot do without."""
    actor = config.actor_rollout_ref.actor
    loss, corrects = get_policy_loss(actor.policy_loss.name), workers.corrects_mismatch(config)
    optional = (
        (fields.OLD_LOG_PROBS, old_log_prob_pass),
        (fields.REF_LOG_PROB, actor.use_kl_loss and not actor.reads_full_kl),
        (fields.ROLLOUT_IS_WEIGHTS, corrects and old_log_prob_pass),
        (fields.ROLLOUT_LOG_PROBS, corrects or "rollout_log_prob_BT" in loss.needs),
        (fields.SELECTED_TOKENS, workers.selects_tokens(config)),
    )
    stage = _reading(UPDATE_ACTOR, optional)
    left = tuple(field for field in stage.reads_if_present if field not in stage.reads)
    return replace(stage, reads_if_present=left)


# Stages of added roles.


def _with_roles(
    config: TrainConfig, flow: Sequence[StageFields], *, validation: bool = False
) -> tuple[StageFields, ...]:
    """Add the stages of added roles. Where they write the scores, `score_responses` reads them."""
    added = added_stages(config, validation=validation)
    stages = with_added(flow, added)
    names = [stage.name for stage in stages]
    for placed in added:
        if placed.name not in names:
            raise ConfigError(_no_place(placed, [n for n in names if n not in NOT_PLACES]))
    if scores_come_from_roles(stages):
        scored = StageFields(SCORE, reads=(_SCORES,))
        stages = tuple(scored if stage.name == SCORE else stage for stage in stages)
    return stages


def with_added(
    flow: Sequence[StageFields], added: Sequence[PlacedStage]
) -> tuple[StageFields, ...]:
    """Return the stages of a step with those of added roles at the places where they run."""
    result: list[StageFields] = []
    passes = [stage.name for stage in flow if stage.name in PASSES]

    def beside(side: str, names: Iterable[str]) -> None:
        for name in names:
            for placed in added:
                if getattr(placed.stage, side) == name:
                    beside("before", [placed.name])
                    result.append(placed.fields)
                    beside("after", [placed.name])

    for stage in flow:
        own = () if stage.name in (*NOT_PLACES, *PASSES) else (stage.name,)
        beside("before", own)
        result.append(stage)
        beside("after", own)
        if stage is START_PASSES:
            beside("before", passes)
        if passes[-1:] == [stage.name]:
            beside("after", passes)
    return tuple(result)


def _no_place(placed: PlacedStage, known: Sequence[str]) -> str:
    side, name = "before" if placed.stage.before else "after", placed.stage.neighbour
    near = nearest_name(name, known)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"stage {placed.name} stands {side} {name!r}, which this run does not have; {hint}"
        f"stages: {', '.join(dict.fromkeys(known))}"
    )


def scores_come_from_roles(flow: Sequence[StageFields]) -> bool:
    """Return whether an added stage writes the scores, so that `score_responses` computes none."""
    names = [*(stage.name for stage in flow), SCORE]
    return any(_SCORES in stage.writes for stage in flow[: names.index(SCORE)])


def added_until_scores(added: Sequence[PlacedStage]) -> bool:
    """Return whether all added stages stand where responses are generated or scored, so that they
    neither read what the passes write nor change it."""
    # The place of a stage beside another added stage is the place of that one.
    return all(p.stage.neighbour in {*EARLY, *(q.name for q in added)} for p in added)


# The order of the rows.


def balance_of(
    config: TrainConfig, plan: StepPlan, ranks: int, critic_ranks: int | None = None
) -> Balance:
    """Return how the batches of a run are ordered. `critic_ranks`: None if there is no critic."""
    _, critic_prompts = mini_batch_prompts(config)
    unbalanced = Balance(
        ranks, config.trainer.balance_batch, mini_batch_rows=_rows_of_mini_batch(config, ranks),
        masked=plan.masks_before_passes, skips=plan.advantages_before_passes,
        critic_ranks=critic_ranks,
        critic_mini_batch_rows=critic_prompts * config.actor_rollout_ref.rollout.n,
    )  # fmt: skip
    if ranks == 1 or not unbalanced.enabled:
        return unbalanced
    cost, shares_prompts = _cost_of_actor(config)
    whole = shares_prompts and config.trainer.balance_groups
    return replace(unbalanced, cost=cost, shares_prompts=shares_prompts, whole_groups=whole)


def _cost_of_actor(config: TrainConfig) -> tuple[CostModel, bool]:
    """Return what the actor's sequences cost, and whether its engine computes prompts once."""
    from quadriga.engines.sequence_cost import sequence_cost
    from quadriga.models.architectures import architecture_of
    from quadriga.models.folder import check_model_folder, local_folder
    from quadriga.models.loading import read_config
    from quadriga.parallel.device import get_device_name

    model, device = config.actor_rollout_ref.model, config.trainer.device
    attention = config.actor_rollout_ref.actor.engine.attention
    if model.path == MISSING_PATH:  # a worker class of the user that loads its own model
        return TOKENS, True
    folder, trust = local_folder(model.path), model.trust_remote_code
    check_model_folder(folder, weights=False, tokenizer=False, trust_remote_code=trust)
    found = read_config(folder, trust_remote_code=trust)
    cost = sequence_cost(found, "lm", get_device_name() if device == "auto" else device, attention)
    return cost, architecture_of(found).rows == "packed"


def _rows_of_mini_batch(config: TrainConfig, ranks: int) -> int | None:
    """Return the rows of the mini-batches that are balanced; None: the whole batch is."""
    # Each rank draws new mini-batches from its rows in each epoch.
    if config.actor_rollout_ref.actor.shuffle:
        return None
    n = config.actor_rollout_ref.rollout.n
    actor, critic = mini_batch_prompts(config)
    # Mini-batches of 6 and 4 prompts are balanced in units of 2: both consist of whole units.
    common = gcd(actor, critic)
    if needs_critic(config) and common * n % ranks == 0:
        return common * n
    return actor * n
