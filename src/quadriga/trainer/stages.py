"""What each step of the training loop does on the controller, one function per stage.

Convention. A stage takes a batch, then its settings. It returns `StageResult(batch, metrics)`:

- `batch` holds the fields of the given batch and those that the stage writes. A stage that adds
  or replaces fields returns the given batch; a stage that changes rows returns a new one. Callers
  go on with the returned batch.
- `metrics` maps names to floats and may be empty.

    batch, metrics = stages.shape_scores(batch, config.algorithm)

Batches are by reference: a stage fetches the fields that it reads and no others.
`trainer.dataflow` declares what each stage reads and writes; the names of fields, with their
shapes, are in `protocol.fields`.

The trainer runs a stage with the stages of added roles before and after it, and logs its metrics:

    runner = StageRunner(added_stages, groups, record)
    batch = runner.run(stages.shape_scores, batch, config)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray

from quadriga.algorithms.advantages import compute_advantages, get_advantage
from quadriga.algorithms.importance import importance_correction, mismatch_metrics
from quadriga.algorithms.kl import KLController, penalise_rewards
from quadriga.algorithms.policy_losses import get_policy_loss, select_tokens
from quadriga.algorithms.shaping import (
    add_to_last_token,
    drop_truncated,
    nonzero_variance_rows,
    overlong_penalty,
    shape_rewards,
    zero_variance_metrics,
)
from quadriga.config.plan import mini_batch_prompts
from quadriga.config.schema import (
    MISSING_PATH,
    ActorConfig,
    AlgorithmConfig,
    RolloutCorrectionConfig,
    TrainConfig,
)
from quadriga.errors import FieldError, LengthError, WorkerError
from quadriga.parallel.balancing import RowCosts, arrange_rows
from quadriga.parallel.costs import TOKENS, CostModel, Counts
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.protocol.contents import shape_and_dtype
from quadriga.trainer.dataflow import ESTIMATOR_FIELDS, PASSES, StepPlan
from quadriga.trainer.record import Metrics, RunRecord, StageResult, named_mismatch
from quadriga.trainer.roles.registry import PlacedStage
from quadriga.trainer.roles.workers import needs_critic
from quadriga.workers.generation import GeneratingGroup, SamplingMode, generation_inputs
from quadriga.workers.method_fields import GENERATE_SEQUENCES
from quadriga.workers.roles import GroupMethod
from quadriga.workers.updates import mask_with_advantage

if TYPE_CHECKING:
    from quadriga.single_controller import WorkerGroup

ArgumentsP = ParamSpec("ArgumentsP")


class BatchReward(Protocol):
    """A reward function for whole batches, on the controller.

    It reads the responses and returns a batch with `token_level_scores` [B, R] float32, and
    `reward_components` [B, K] where the settings name components. A function that submits the
    scoring to a worker group may return the future of that batch.

    It may keep `metrics` of its last call, a dict from name to number, and the `masked_rows` of
    that call, which take no part in the update; see `rewards.RewardManager`.
    """

    def __call__(self, data: DataProto, /) -> DataProto | DataProtoFuture:
        """Score every row of `data`."""
        ...


# From prompts to scored responses.


def expand_prompts(
    prompts: DataProto,
    *,
    n: int,
    seed: int,
    step: int = 0,
    turn: int = 0,
    seed_by_index: bool = False,
) -> StageResult:
    """Repeat each prompt `n` times and write `uid`, `sample_seed` and `prompt_length`.

    The rows of a prompt group are neighbours. Two prompts, n = 2, step 7, turn 0:

        row   prompt   uid       sample_seed
        0     a        "7-0-0"   s0
        1     a        "7-0-0"   s1
        2     b        "7-0-1"   s2
        3     b        "7-0-1"   s3

    Args:
        n: responses per prompt.
        step: number of the training step.
        seed: seed of the run.
        turn: number of the draw within the step; a step with refilling draws several times.
        seed_by_index: the seeds of a prompt depend on `seed` and on its `index` in the data only.
    """
    count = len(prompts)
    batch = prompts.repeat(repeat_times=n, interleave=True)
    batch.non_tensor_batch[fields.UID] = np.repeat(
        np.array([f"{step}-{turn}-{i}" for i in range(count)], dtype=object), n
    )
    # A row's seed depends on (seed, step, turn) and on the number of the row, and on nothing
    # else. The tokens that a row samples are therefore the same for any number of ranks and any
    # split of the batch.
    seeds = _seeds([seed, step, turn], count * n)
    if seed_by_index:
        index = prompts.non_tensor_batch[fields.INDEX]
        seeds = np.concatenate([_seeds([seed, int(i)], n) for i in index])
    batch.batch[fields.SAMPLE_SEED] = torch.from_numpy(seeds)
    batch.batch[fields.PROMPT_LENGTH] = batch.batch[fields.ATTENTION_MASK].sum(-1)
    return StageResult(batch, {})


def _seeds(source: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    streams = np.random.SeedSequence(source).generate_state(count, dtype=np.uint64)
    # torch has no uint64 arithmetic; dropping the lowest bit makes the seeds fit int64.
    return (streams >> np.uint64(1)).astype(np.int64)


def generate(rows: DataProto, rollout: GeneratingGroup, mode: SamplingMode) -> StageResult:
    """Generate one response per row, for any number of rows.

    The prompts' tensors are replaced by those of the sequences; other fields stay.
    """
    # The rollout's ranks take equal parts, so rows are added up to a multiple of their number and
    # the responses to them are dropped.
    inputs, extra = pad_dataproto_to_divisor(generation_inputs(rows, mode), rollout.world_size)
    generated = unpad_dataproto(rollout.generate_sequences(inputs), extra)
    replaced = {*GENERATE_SEQUENCES.reads, *GENERATE_SEQUENCES.writes}
    kept = [key for key in tensor_names(rows) if key not in replaced]
    return StageResult(rows.select(batch_keys=kept, meta_info_keys=[]).union(generated), {})


def add_baselines(rows: DataProto, greedy: DataProto) -> StageResult:
    """Write `reward_baselines` from the scores of one greedy response per prompt.

    Rows 0 … n−1 belong to row 0 of `greedy`, rows n … 2n−1 to row 1, and so on.
    """
    # P counts prompts here: one greedy row per prompt.
    score_P = greedy.batch[fields.TOKEN_LEVEL_SCORES].sum(-1)
    per_prompt = len(rows) // len(greedy)
    rows.batch[fields.REWARD_BASELINES] = score_P.repeat_interleave(per_prompt)
    return StageResult(rows, {})


def score_responses(batch: DataProto, reward: BatchReward) -> StageResult:
    """Write `token_level_scores` [B, R], unless an earlier stage of the step has scored the rows.

    The mask of rows that the reward function excludes becomes 0 (`reward.on_failure=mask`). The
    metrics are those of the reward function's last call.
    """
    if fields.TOKEN_LEVEL_SCORES not in tensor_names(batch):
        scored = reward(batch)
        batch = batch.union(scored.get() if isinstance(scored, DataProtoFuture) else scored)
        masked: list[int] = getattr(reward, "masked_rows", [])
        if masked:
            mask = batch.batch[fields.RESPONSE_MASK].clone()
            mask[masked] = 0
            batch.batch[fields.RESPONSE_MASK] = mask
    return StageResult(batch, dict(getattr(reward, "metrics", {})))


def balance_over_ranks(batch: DataProto, balance: Balance) -> StageResult:
    """Reorder rows so that the equal parts of the batch cost the ranks about the same work.

    A mini-batch keeps its rows, also if `balance.enabled` is false; costs then do not matter. The
    batch stays as it is with one rank, or if its rows do not divide by the number of ranks.
    """
    if not balance.enabled:
        if balance.ranks == 1 or len(batch) % balance.ranks:
            return StageResult(batch, {})
        return StageResult(batch.select_idxs(balance.unbalanced(len(batch))), {})
    # Few small fields are fetched; the others are reordered by reference.
    length_B, prompt_B = batch.batch[fields.SEQUENCE_LENGTH], batch.batch[fields.PROMPT_LENGTH]
    live_B = balance.live(batch)
    uid = batch.non_tensor_batch[fields.UID]
    if balance.ranks == 1 or len(batch) % balance.ranks:
        return StageResult(batch, {})
    arranged = balance.arrange(
        uid.tolist(), prompt_B.numpy(), (length_B - prompt_B).numpy(), live_B
    )
    return StageResult(batch.select_idxs(arranged.order), arranged.metrics())


# From scores to advantages.


def measure_batch(batch: DataProto) -> StageResult:
    """Measure scores, response lengths and the share of truncated responses."""
    length_B = batch.batch[fields.RESPONSE_MASK].sum(-1).float()
    score_B = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1)
    metrics = {
        "reward/mean": float(score_B.mean()),
        "reward/max": float(score_B.max()),
        "reward/min": float(score_B.min()),
        "response_length/mean": float(length_B.mean()),
        "response_length/max": float(length_B.max()),
        "response_length/clip_ratio": float((batch.batch[fields.FINISHED] == 0).float().mean()),
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.batch[fields.SEQUENCE_LENGTH].sum()),
    }
    return StageResult(batch, metrics)


def measure_entropy(batch: DataProto) -> StageResult:
    """Measure the entropy of the policy that generated, from the pass over the log-probabilities.

    Without such a pass the update measures it.
    """
    entropy = batch.batch[fields.ENTROPYS][batch.batch[fields.RESPONSE_MASK].bool()]
    return StageResult(batch, {"actor/entropy": float(entropy.mean())} if len(entropy) else {})


def mask_truncated(batch: DataProto, config: AlgorithmConfig) -> StageResult:
    """Set the mask of truncated responses to 0, if `overlong.drop_truncated` says so.

    Such a response takes no part in the update and does not count in its prompt group.
    """
    if config.overlong.drop_truncated:
        mask = batch.batch[fields.RESPONSE_MASK]
        kept = drop_truncated(mask, batch.batch[fields.FINISHED] == 0)
        batch.batch[fields.RESPONSE_MASK] = kept.to(mask.dtype)
    return StageResult(batch, {})


def mask_zero_variance_groups(batch: DataProto, config: AlgorithmConfig) -> StageResult:
    """Measure prompt groups whose scores are all equal; mask them if `filter_groups` is enabled.

    The scores are those of the reward function, before penalties: a difference in length or KL
    alone does not count. Responses without tokens do not count. Four rows, two prompt groups:

        uid     score   tokens   zero-variance   mask afterwards
        "a"     1       3        no              kept
        "a"     0       2        no              kept
        "b"     1       3        yes             0: of prompt group b only this row counts
        "b"     0       0        -               0 already
    """
    mask = batch.batch[fields.RESPONSE_MASK]
    present_B = mask.any(-1)
    if not present_B.any():
        return StageResult(batch, {})
    score_B = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1)[present_B]
    uid = batch.non_tensor_batch[fields.UID][present_B.numpy()]
    metrics = {f"group/{k}": v for k, v in zero_variance_metrics(score_B, uid).items()}
    if config.filter_groups.enable:
        kept_B = present_B.clone()
        kept_B[present_B] = nonzero_variance_rows(score_B, uid)
        batch.batch[fields.RESPONSE_MASK] = mask * kept_B.to(mask.dtype)[:, None]
    return StageResult(batch, metrics)


def shape_scores(batch: DataProto, config: AlgorithmConfig) -> StageResult:
    """Write `token_level_rewards`: the scores after length penalty, clipping and whitening."""
    scores = batch.batch[fields.TOKEN_LEVEL_SCORES]
    mask = batch.batch[fields.RESPONSE_MASK]
    metrics: Metrics = {}
    # The penalty comes before clipping and whitening, which act on the complete reward.
    if config.overlong.enable:
        penalty = overlong_penalty(
            mask.sum(-1),
            max_length=mask.shape[1],
            buffer_length=config.overlong.buffer_length,
            penalty_factor=config.overlong.penalty_factor,
        )
        scores = add_to_last_token(scores, mask, penalty)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
    batch.batch[fields.TOKEN_LEVEL_REWARDS] = shape_rewards(
        scores, mask, clip=config.reward_clip, whiten=config.whiten_rewards
    )
    return StageResult(batch, metrics)


def penalise_kl(batch: DataProto, controller: KLController, estimator: str) -> StageResult:
    """Subtract β·KL(policy ‖ reference) from the reward of each token, then adapt β."""
    # β of this step is read before the update: the controller changes it for the next step.
    beta = controller.value
    batch.batch[fields.TOKEN_LEVEL_REWARDS], kl = penalise_rewards(
        batch.batch[fields.TOKEN_LEVEL_REWARDS],
        batch.batch[fields.OLD_LOG_PROBS],
        batch.batch[fields.REF_LOG_PROB],
        batch.batch[fields.RESPONSE_MASK],
        kl_coef=beta,
        kl_penalty=estimator,
    )
    controller.update(kl, n_steps=len(batch))
    return StageResult(batch, {"reward/kl_penalty": kl, "reward/kl_coef": beta})


def correct_mismatch(
    batch: DataProto, config: RolloutCorrectionConfig, bound: float
) -> StageResult:
    """Measure how far training and rollout log-probabilities differ; `bound`: in nats.

    With a correction level, write importance weights of training against rollout to
    `rollout_is_weights`.
    """
    old = batch.batch[fields.OLD_LOG_PROBS]
    rollout = batch.batch[fields.ROLLOUT_LOG_PROBS]
    mask = batch.batch[fields.RESPONSE_MASK]
    metrics = mismatch_metrics(old, rollout, mask, bound=bound)
    if config.level != "none":
        correction = importance_correction(
            old,
            rollout,
            mask,
            level=config.level,
            mode=config.mode,
            upper=config.upper,
            lower=config.lower,
            normalise=config.normalise,
        )
        batch.batch[fields.ROLLOUT_IS_WEIGHTS] = correction.weights_BT
        metrics.update(correction.metrics)
    return StageResult(batch, named_mismatch(metrics))


def estimate_advantages(batch: DataProto, config: AlgorithmConfig) -> StageResult:
    """Write `advantages` and `returns` by the estimator that the settings name.

    Also reads those of `ESTIMATOR_FIELDS` that the estimator asks for.
    """
    needs = get_advantage(config.adv_estimator).needs
    mask = batch.batch[fields.RESPONSE_MASK]
    advantages, returns = compute_advantages(
        config.adv_estimator,
        token_level_rewards_BT=batch.batch[fields.TOKEN_LEVEL_REWARDS],
        response_mask_BT=mask,
        group_ids=batch.non_tensor_batch[fields.UID],
        **{name: batch.batch[key] for name, key in ESTIMATOR_FIELDS.items() if name in needs},
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std=config.norm_adv_by_std,
        whiten_advantages=config.whiten_advantages,
        **config.options,
    )
    batch.batch[fields.ADVANTAGES] = advantages
    batch.batch[fields.RETURNS] = returns
    chosen = advantages[mask.bool()]
    metrics = {"critic/advantages/mean": 0.0, "critic/advantages/max_abs": 0.0}
    if chosen.numel():
        metrics = {
            "critic/advantages/mean": float(chosen.mean()),
            "critic/advantages/max_abs": float(chosen.abs().max()),
        }
    return StageResult(batch, metrics)


def select_update_tokens(batch: DataProto, config: ActorConfig) -> StageResult:
    """Write `selected_tokens`, for losses that choose tokens over the whole batch (Clip-Cov,
    KL-Cov).

    The choice is made here and not in the update, because a rank has only its part of the batch.
    """
    if get_policy_loss(config.policy_loss.name).select is None:
        return StageResult(batch, {})
    selected = select_tokens(
        config.policy_loss.name,
        old_log_prob_BT=batch.batch[fields.OLD_LOG_PROBS],
        advantages_BT=batch.batch[fields.ADVANTAGES],
        response_mask_BT=batch.batch[fields.RESPONSE_MASK],
        **config.policy_loss.options,
    )
    if selected is not None:
        batch.batch[fields.SELECTED_TOKENS] = selected
    return StageResult(batch, {})


def rows_with_advantage(batch: DataProto) -> DataProto:
    """Return a batch with the same fields, but response mask 0 where all advantages of a row are 0.

    The given batch keeps its mask.
    """
    mask = mask_with_advantage(batch.batch[fields.RESPONSE_MASK], batch.batch[fields.ADVANTAGES])
    rows = batch.select()
    rows.batch[fields.RESPONSE_MASK] = mask
    return rows


def tensor_names(batch: DataProto) -> list[str]:
    """Return the names of the tensor fields. A batch without tensors has no `batch`."""
    return [] if batch.batch is None else [str(key) for key in batch.batch.keys()]  # noqa: SIM118


# Stages with those of added roles beside them.


class StageRunner:
    """Runs stages with those of added roles beside them.

    Args:
        added: the stages of added roles.
        groups: role key → its worker group.
        record: where metrics and times of added stages and of updates are logged; needed for both.
        prefix: before the names of their metrics, "val/" in validation.
    """

    def __init__(
        self,
        added: Sequence[PlacedStage] = (),
        groups: Mapping[str, WorkerGroup] | None = None,
        record: RunRecord | None = None,
        prefix: str = "",
    ) -> None:
        self.added = tuple(added)
        self.groups = groups or {}
        self.record = record
        self.prefix = prefix

    def run(
        self,
        stage: Callable[Concatenate[DataProto, ArgumentsP], StageResult],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> DataProto:
        """Run a function of this module and the added stages beside it; log its metrics."""
        result = self.result(stage, batch, *args, **kwargs)
        assert self.record is not None, "metrics need a record"
        self.record.add(result.metrics)
        return result.batch

    def result(
        self,
        stage: Callable[Concatenate[DataProto, ArgumentsP], StageResult],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> StageResult:
        """Run a function as `run` does, but return its metrics in place of logging them."""
        # `generate` calls the worker method that is the stage.
        name = GENERATE_SEQUENCES.name if stage is generate else _name(stage)
        result = stage(self.beside("before", name, batch), *args, **kwargs)
        return StageResult(self.beside("after", name, result.batch), result.metrics)

    def update(
        self,
        method: GroupMethod[[DataProto], DataProto],
        batch: DataProto,
        order: npt.NDArray[np.int64] | None = None,
    ) -> DataProto:
        """Run an update of a built-in role and the added stages beside it; log its metrics.

        `order`: in which the method gets the rows; None: as in the batch.
        """
        batch = self.beside("before", _name(method), batch)
        assert self.record is not None, "an update needs a record"
        self.record.log_update(method(batch if order is None else batch.select_idxs(order)))
        return self.beside("after", _name(method), batch)

    def without_updates(self) -> StageRunner:
        """Return a runner that leaves out added stages without `writes`.

        It is for rows that are not those of the batch: greedy responses for reward baselines.
        """
        added = [placed for placed in self.added if placed.stage.writes]
        return StageRunner(added, self.groups, self.record, self.prefix)

    def beside_passes(self, side: Literal["before", "after"], batch: DataProto) -> DataProto:
        """Run the stages before all passes: those before any of them; or after all of them."""
        for name in PASSES:
            batch = self.beside(side, name, batch)
        return batch

    def beside(self, side: Literal["before", "after"], name: str, batch: DataProto) -> DataProto:
        """Run the added stages that stand before or after a stage."""
        for placed in self.added:
            if getattr(placed.stage, side) == name:
                batch = self.beside("before", placed.name, batch)
                batch = self._run(placed, batch)
                batch = self.beside("after", placed.name, batch)
        return batch

    def _run(self, placed: PlacedStage, batch: DataProto) -> DataProto:
        """Call the method of an added stage. Return the batch with the fields that it writes."""
        assert self.record is not None, "added stages need a record"
        stage, group = placed.stage, self.groups[placed.role]
        present = {*tensor_names(batch), *batch.non_tensor_batch}
        inputs = _select(
            batch, [*stage.reads, *(key for key in stage.reads_if_present if key in present)]
        )
        extra = 0
        if stage.writes:
            # Rows that are added are scored for nothing; in an update they would count.
            inputs, extra = pad_dataproto_to_divisor(inputs, group.world_size)
        with self.record.span(placed.name):
            result: object = getattr(group, stage.method)(inputs)
            if isinstance(result, DataProtoFuture):
                result = result.get()
        if result is None and not stage.writes:
            return batch
        if not isinstance(result, DataProto):
            raise WorkerError(
                f"stage {placed.name} returned {type(result).__name__}, expected a DataProto with "
                f"the fields {', '.join(stage.writes) or 'none'}",
                role=placed.role,
                method=stage.method,
            )
        try:
            self.record.log_role(f"{self.prefix}{placed.role}/", result)
        except (TypeError, ValueError, RuntimeError) as error:
            raise WorkerError(
                f"stage {placed.name} returned a metric that is no number: {error}",
                role=placed.role,
                method=stage.method,
            ) from error
        if not stage.writes:
            return batch
        _check_result(placed, batch, result, len(inputs))
        return _written(placed, batch, unpad_dataproto(result, extra))


def _written(placed: PlacedStage, batch: DataProto, result: DataProto) -> DataProto:
    """Return the batch with the fields that a stage has returned, in place of its own."""
    writes = set(placed.stage.writes)
    present = (*tensor_names(batch), *batch.non_tensor_batch)
    kept = _select(batch, [key for key in present if key not in writes])
    kept.meta_info = dict(batch.meta_info)
    added = _select(result, list(writes))
    added.meta_info = {key: value for key, value in result.meta_info.items() if key != "metrics"}
    return kept.union(added)


def _select(batch: DataProto, keys: Sequence[str]) -> DataProto:
    tensors = set(tensor_names(batch))
    return batch.select(
        batch_keys=[key for key in keys if key in tensors],
        non_tensor_batch_keys=[key for key in keys if key not in tensors],
        meta_info_keys=[],
    )


def _name(function: object) -> str:
    return str(getattr(function, "__name__", ""))


def _check_result(placed: PlacedStage, batch: DataProto, result: DataProto, rows: int) -> None:
    """Check the fields of a result: names, rows, and the form of declared fields.

    Args:
        batch: the batch of the step.
        result: what the stage has returned.
        rows: rows that it was given, with those that pad the batch.
    """
    found = {key: shape_and_dtype(c) for key, c in result.contents.columns().items()}
    writes = set(placed.stage.writes)
    if set(found) != writes:
        raise FieldError(
            f"stage {placed.name} declares writes {', '.join(sorted(writes))}, but returned "
            f"{', '.join(sorted(found)) or 'no field'}; make both equal",
            field=min(set(found) ^ writes),
        )
    if len(result) != rows:
        raise LengthError(
            f"stage {placed.name} got {rows} rows and returned {len(result)}; expected one row "
            "for each row of the batch"
        )
    column = batch.contents.columns().get(fields.RESPONSE_MASK)
    mask = None if column is None else shape_and_dtype(column)[0]
    columns = (mask or "").partition(", ")[2]  # "12]" of "[16, 12]"
    for key, (shape, dtype) in found.items():
        declared = fields.BY_NAME.get(key)
        if declared is None or declared.shape != "[B, R]" or mask is None:
            continue
        is_float = "float" in dtype and key not in result.non_tensor_batch
        if shape.partition(", ")[2] != columns or is_float != ("float" in declared.dtype):
            raise FieldError(
                f"stage {placed.name} returned {key} {shape} of {dtype}, expected a tensor "
                f"{declared.shape} of {declared.dtype} (response_mask is {mask})",
                field=key,
            )


# The order of rows. A worker group splits a batch into equal parts of neighbouring rows, one for
# each rank, and a rank cuts its part into mini-batches in order.


@dataclass(frozen=True)
class Balance:
    """What the order of the rows depends on.

    Attributes:
        ranks: ranks of the actor.
        enabled: False: rows keep their order within a mini-batch.
        mini_batch_rows: rows of a mini-batch over all ranks, each of which is balanced by itself;
            None: the whole batch.
        cost: the cost of the actor's sequences.
        shares_prompts: whether the training engine computes a prompt that several rows of a rank
            share once.
        whole_groups: whether the responses of one prompt are kept on one rank.
        masked: whether the rows that the update leaves out are known and masked.
        skips: whether advantages are known, and rows whose advantages are all 0 are left out.
        critic_ranks: ranks of the critic; None: as many as the actor has.
        critic_mini_batch_rows: rows of a mini-batch of the critic over all ranks; None: the batch.
    """

    ranks: int
    enabled: bool = True
    mini_batch_rows: int | None = None
    cost: CostModel = TOKENS
    shares_prompts: bool = True
    whole_groups: bool = True
    masked: bool = False
    skips: bool = False
    critic_ranks: int | None = None
    critic_mini_batch_rows: int | None = None

    def unbalanced(self, rows: int) -> NDArray[np.int64]:
        """Return the order [B] in which each mini-batch has the same rows for any number of ranks.

        `rows`: B, a multiple of the number of ranks.
        """
        # 8 rows on 2 ranks in mini-batches of 4 rows: a rank has half of each mini-batch.
        #
        #   rank 0   0 1 | 4 5        rank 1   2 3 | 6 7
        size = self.mini_batch_rows or max(rows, 1)
        blocks = [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
        pieces = [np.array_split(block, self.ranks) for block in blocks]
        parts = [part[rank] for rank in range(self.ranks) for part in pieces]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def critic_order(self, rows: int) -> NDArray[np.int64] | None:
        """Return the order in which a critic on another number of ranks gets the rows of a batch
        that is ordered for the actor, so that it has the mini-batches that one rank has.

        None: the order of the actor, which fits the ranks of the critic, or all rows are one
        mini-batch, or they do not divide by its ranks.
        """
        # 8 rows in mini-batches of 4, on 2 ranks of the actor and 1 of the critic:
        #
        #   actor    rank 0   0 1 | 4 5     rank 1   2 3 | 6 7
        #   critic   rank 0   0 1 2 3 | 4 5 6 7
        ranks, size = self.critic_ranks or self.ranks, self.critic_mini_batch_rows or rows
        if ranks == self.ranks or rows <= size or rows % ranks:
            return None
        by_unit = np.arange(rows)
        if rows % self.ranks == 0:  # otherwise the batch was not ordered for the actor
            by_unit = by_unit[np.argsort(self.unbalanced(rows))]
        critic = Balance(ranks, enabled=False, mini_batch_rows=size)
        return by_unit[critic.unbalanced(rows)]

    def live(self, batch: DataProto) -> NDArray[np.bool_]:
        """Return which rows need computation, [B] bool."""
        if not self.masked:
            return np.ones(len(batch), dtype=np.bool_)
        mask_BT = batch.batch[fields.RESPONSE_MASK]
        if self.skips:
            mask_BT = mask_with_advantage(mask_BT, batch.batch[fields.ADVANTAGES])
        live: NDArray[np.bool_] = mask_BT.any(-1).numpy()
        return live

    def arrange(
        self, uid: Sequence[object], prompt: Counts, response: Counts, live: NDArray[np.bool_]
    ) -> Arrangement:
        """Order B rows by ids of prompt groups, tokens, and whether a row has one to learn from."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(uid))}
        group = np.array([numbers[key] for key in uid], dtype=np.int64)
        single = np.arange(len(group))
        costs = RowCosts.of(
            self.cost, group if self.whole_groups else single, prompt, response, live
        )
        rows = arrange_rows(costs, self.ranks, self.mini_batch_rows)
        computed = group if self.shares_prompts else single
        return Arrangement(
            rows,
            RowCosts.of(TOKENS, computed, prompt, response, live),
            RowCosts.of(self.cost, computed, prompt, response, live),
        )


@dataclass(frozen=True)
class Arrangement:
    """The row numbers of [ranks][mini-batches], and the tokens and FLOPs that they compute."""

    rows: list[list[list[int]]]
    tokens: RowCosts
    costs: RowCosts

    @property
    def order(self) -> NDArray[np.int64]:
        """The new order of the rows, [B]."""
        return np.array([row for rank in self.rows for block in rank for row in block])

    def metrics(self) -> dict[str, float]:
        """Measure the balance."""
        tokens = [sum(map(self.tokens.total, rank)) for rank in self.rows]
        cost = np.array([[self.costs.total(block) for block in rank] for rank in self.rows])
        # All ranks wait for the slowest one at each optimizer step.
        waited, mean = cost.max(0).sum(), cost.mean(0).sum()
        return {
            "batch/token_spread": (max(tokens) - min(tokens)) / max(1.0, *tokens),
            "batch/cost_imbalance": float(waited / mean) if mean else 1.0,
        }


def balance_of(
    config: TrainConfig, plan: StepPlan, ranks: int, critic_ranks: int | None = None
) -> Balance:
    """Return how the batches of a run are ordered. `critic_ranks`: None if there is no critic."""
    _, critic_prompts = mini_batch_prompts(config)
    unbalanced = Balance(
        ranks,
        config.trainer.balance_batch,
        mini_batch_rows=_rows_of_mini_batch(config, ranks),
        masked=plan.masks_before_passes,
        skips=plan.advantages_before_passes,
        critic_ranks=critic_ranks,
        critic_mini_batch_rows=critic_prompts * config.actor_rollout_ref.rollout.n,
    )
    if ranks == 1 or not unbalanced.enabled:
        return unbalanced
    cost, shares_prompts = _cost_of_actor(config)
    return replace(
        unbalanced,
        cost=cost,
        shares_prompts=shares_prompts,
        whole_groups=shares_prompts and config.trainer.balance_groups,
    )


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
    shares_prompts = architecture_of(found).rows == "packed"
    return (
        sequence_cost(found, "lm", get_device_name() if device == "auto" else device, attention),
        shares_prompts,
    )


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
