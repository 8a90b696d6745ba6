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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Concatenate, Literal, ParamSpec, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.algorithms import shaping
from quadriga.algorithms.advantages import compute_advantages, get_advantage
from quadriga.algorithms.dynamic_sampling import SamplingDecision, dynamic_sampling
from quadriga.algorithms.importance import mismatch_metrics
from quadriga.algorithms.kl import KLController, penalise_rewards
from quadriga.algorithms.policy_losses import get_policy_loss, select_tokens
from quadriga.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    RewardModelConfig,
    RolloutCorrectionConfig,
    TrainConfig,
)
from quadriga.errors import FieldError, LengthError, WorkerError
from quadriga.observability.metrics import MetricSet, metric_kind
from quadriga.parallel.balancing import Balance
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.protocol.contents import shape_and_dtype
from quadriga.rewards.functions import FAILURES
from quadriga.single_controller import WorkerGroup
from quadriga.streams.playing import EpisodeGenerator
from quadriga.trainer.dataflow import ESTIMATOR_FIELDS
from quadriga.trainer.record import Metrics, RunRecord, StageResult, named_mismatch
from quadriga.trainer.roles.registry import PlacedStage
from quadriga.workers.method_fields import COMPUTE_RM_SCORE, GENERATE_SEQUENCES
from quadriga.workers.roles import GeneratingGroup, GroupMethod, RewardModelGroup
from quadriga.workers.updates import importance_weights, mask_with_advantage

ArgumentsP = ParamSpec("ArgumentsP")
Stage = Callable[Concatenate[DataProto, ArgumentsP], StageResult]
"""A function of this module that is a stage."""
SamplingMode = Literal["train", "val", "greedy"]
"""Which settings sample: `rollout.sampling`, `rollout.val_sampling`, or temperature 0."""


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


def add_greedy_rows(rows: DataProto, n: int) -> DataProto:
    """Return the rows of each prompt with one more for its greedy response, and `greedy` [B]."""
    order = np.arange(len(rows)).reshape(-1, n)
    batch = rows.select_idxs(np.hstack([order, order[:, :1]]).ravel())
    batch.batch[fields.GREEDY] = torch.tensor([0] * n + [1]).repeat(len(order))
    return batch


def take_greedy_rows(batch: DataProto, rows: int) -> DataProto:
    """Make the last of the `rows` of each prompt, which is greedy, the baseline of the others."""
    order = np.arange(len(batch)).reshape(-1, rows)
    greedy = batch.select_idxs(order[:, -1])
    kept = add_baselines(batch.select_idxs(order[:, :-1].ravel()), greedy).batch
    _mask_without_baseline(kept, greedy)
    return kept


def generation_inputs(rows: DataProto, mode: SamplingMode = "train") -> DataProto:
    """Return a batch of the fields that generation reads, with the sampling mode."""
    tensors, arrays = list(GENERATE_SEQUENCES.reads), list[str]()
    tensors += [key for key in tensor_names(rows) if key == fields.GREEDY]
    if fields.MULTI_MODAL_INPUTS in rows.non_tensor_batch:
        tensors, arrays = [*tensors, fields.POSITION_IDS], [fields.MULTI_MODAL_INPUTS]
    inputs = rows.select(batch_keys=tensors, non_tensor_batch_keys=arrays, meta_info_keys=[])
    inputs.meta_info["sampling"] = mode
    return inputs


def generate(
    rows: DataProto, rollout: GeneratingGroup | EpisodeGenerator, mode: SamplingMode
) -> StageResult:
    """Generate one response per row, for any number of rows.

    The prompts' tensors are replaced by those of the sequences; other fields stay. With an
    environment, a response is a whole episode.
    """
    if isinstance(rollout, EpisodeGenerator):
        return StageResult(rollout.play(rows, partial(generation_inputs, mode=mode)), {})
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
    live_B = _live(batch, balance)
    uid = batch.non_tensor_batch[fields.UID]
    if balance.ranks == 1 or len(batch) % balance.ranks:
        return StageResult(batch, {})
    arranged = balance.arrange(
        uid.tolist(), prompt_B.numpy(), (length_B - prompt_B).numpy(), live_B
    )
    return StageResult(batch.select_idxs(arranged.order), arranged.metrics())


def _live(batch: DataProto, balance: Balance) -> npt.NDArray[np.bool_]:
    """Return which rows need computation, [B] bool."""
    if not balance.masked:
        return np.ones(len(batch), dtype=np.bool_)
    mask_BT = batch.batch[fields.RESPONSE_MASK]
    if balance.skips:
        mask_BT = mask_with_advantage(mask_BT, batch.batch[fields.ADVANTAGES])
    return cast(npt.NDArray[np.bool_], mask_BT.any(-1).numpy())


# From scores to advantages.


def measure_batch(batch: DataProto) -> StageResult:
    """Measure scores, response lengths and the share of truncated responses.

    Rows that are masked because they or their baselines have no score count in the lengths and not
    in the scores.
    """
    length_B = batch.batch[fields.SEQUENCE_LENGTH] - batch.batch[fields.PROMPT_LENGTH]
    kept_B = batch.batch[fields.RESPONSE_MASK].any(-1) | (length_B == 0)
    score_B = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1)[kept_B]
    metrics = {
        "response_length/mean": float(length_B.float().mean()),
        "response_length/max": float(length_B.max()),
        "response_length/clip_ratio": float((batch.batch[fields.FINISHED] == 0).float().mean()),
        "batch/sequences": float(len(batch)),
        "batch/tokens": float(batch.batch[fields.SEQUENCE_LENGTH].sum()),
    }
    if len(score_B):
        metrics["reward/mean"] = float(score_B.mean())
        metrics["reward/max"] = float(score_B.max())
        metrics["reward/min"] = float(score_B.min())
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
        kept = shaping.drop_truncated(mask, batch.batch[fields.FINISHED] == 0)
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
    metrics = {f"group/{k}": v for k, v in shaping.zero_variance_metrics(score_B, uid).items()}
    if config.filter_groups.enable:
        kept_B = present_B.clone()
        kept_B[present_B] = shaping.nonzero_variance_rows(score_B, uid)
        batch.batch[fields.RESPONSE_MASK] = mask * kept_B.to(mask.dtype)[:, None]
    return StageResult(batch, metrics)


def shape_scores(batch: DataProto, config: AlgorithmConfig) -> StageResult:
    """Write `token_level_rewards`: the scores after length penalty, clipping and whitening."""
    scores = batch.batch[fields.TOKEN_LEVEL_SCORES]
    mask = batch.batch[fields.RESPONSE_MASK]
    metrics: Metrics = {}
    # The penalty comes before clipping and whitening, which act on the complete reward.
    if config.overlong.enable:
        penalty = shaping.overlong_penalty(
            mask.sum(-1),
            max_length=mask.shape[1],
            buffer_length=config.overlong.buffer_length,
            penalty_factor=config.overlong.penalty_factor,
        )
        scores = shaping.add_to_last_token(scores, mask, penalty)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
    batch.batch[fields.TOKEN_LEVEL_REWARDS] = shaping.shape_rewards(
        scores, mask, clip=config.reward_clip, whiten=config.whiten_rewards
    )
    return StageResult(batch, metrics)


def penalise_kl(batch: DataProto, controller: KLController, estimator: str) -> StageResult:
    """Subtract β·KL(policy ‖ reference) from the reward of each token, then adapt β."""
    # β of this step is read before the update: the controller changes it for the next step.
    beta = controller.value
    read = (fields.TOKEN_LEVEL_REWARDS, fields.OLD_LOG_PROBS, fields.REF_LOG_PROB,
            fields.RESPONSE_MASK)  # fmt: skip
    inputs = [batch.batch[name] for name in read]
    rewards, kl = penalise_rewards(*inputs, kl_coef=beta, kl_penalty=estimator)
    batch.batch[fields.TOKEN_LEVEL_REWARDS] = rewards
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
    if (correction := importance_weights(config, old, rollout, mask)) is not None:
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
        config.adv_estimator, token_level_rewards_BT=batch.batch[fields.TOKEN_LEVEL_REWARDS],
        response_mask_BT=mask, group_ids=batch.non_tensor_batch[fields.UID],
        **{name: batch.batch[key] for name, key in ESTIMATOR_FIELDS.items() if name in needs},
        gamma=config.gamma, lam=config.lam, norm_adv_by_std=config.norm_adv_by_std,
        whiten_advantages=config.whiten_advantages, **config.options,
    )  # fmt: skip
    batch.batch[fields.ADVANTAGES] = advantages
    batch.batch[fields.RETURNS] = returns
    chosen = advantages[mask.bool()]
    mean, largest = (chosen.mean(), chosen.abs().max()) if chosen.numel() else (0.0, 0.0)
    metrics = {"critic/advantages/mean": float(mean), "critic/advantages/max_abs": float(largest)}
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


@dataclass(frozen=True, eq=False)
class StageRunner:
    """Runs the stages of a step, and before and after them the stages of added roles.

    Args:
        added: the stages of added roles.
        groups: role key → its worker group.
        record: where metrics and times of added stages and of updates are logged; needed for both.
        prefix: before the names of their metrics, "val/" in validation.
    """

    added: Sequence[PlacedStage] = ()
    groups: Mapping[str, WorkerGroup] = field(default_factory=dict)
    record: RunRecord | None = None
    prefix: str = ""

    def run(
        self,
        stage: Stage[ArgumentsP],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> DataProto:
        """Run a function of this module and the added stages around it; log its metrics."""
        result = self.result(stage, batch, *args, **kwargs)
        assert self.record is not None, "metrics need a record"
        self.record.add(result.metrics)
        return result.batch

    def result(
        self,
        stage: Stage[ArgumentsP],
        batch: DataProto,
        /,
        *args: ArgumentsP.args,
        **kwargs: ArgumentsP.kwargs,
    ) -> StageResult:
        """Run a function as `run` does, but return its metrics in place of logging them."""
        # `generate` calls the worker method that is the stage.
        name = GENERATE_SEQUENCES.name if stage is generate else _name(stage)
        result = stage(self.run_added("before", batch, name), *args, **kwargs)
        return StageResult(self.run_added("after", result.batch, name), result.metrics)

    def update(
        self,
        method: GroupMethod[[DataProto], DataProto],
        batch: DataProto,
        order: npt.NDArray[np.int64] | None = None,
    ) -> DataProto:
        """Run an update of a built-in role and the added stages around it; log its metrics.

        `order`: in which the method gets the rows; None: as in the batch.
        """
        batch = self.run_added("before", batch, _name(method))
        assert self.record is not None, "an update needs a record"
        self.record.log_update(method(batch if order is None else batch.select_idxs(order)))
        return self.run_added("after", batch, _name(method))

    def without_updates(self) -> StageRunner:
        """Return a runner that leaves out added stages without `writes`.

        It is for rows that are not those of the batch: greedy responses for reward baselines.
        """
        return replace(self, added=[placed for placed in self.added if placed.stage.writes])

    def run_added(
        self, side: Literal["before", "after"], batch: DataProto, *names: str
    ) -> DataProto:
        """Run the added stages that stand before or after some stages."""
        for placed in (p for name in names for p in self.added if getattr(p.stage, side) == name):
            batch = self.run_added("before", batch, placed.name)
            batch = self._run(placed, batch)
            batch = self.run_added("after", batch, placed.name)
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


# From prompts to the batch of a step.


_FAILED = (*(f"reward/{status}" for status in FAILURES), "reward/masked")
"""Metrics of a reward function that count samples without a score."""


@dataclass(eq=False)
class Sampler:
    """Draws the batch of a step.

    Args:
        rollout: the worker group that generates.
        reward: scores a batch, where sampling depends on scores.
        stream: batches of prompts without end; a step draws one, and refilling more of them.
        runner: runs the stages; by default without those of added roles.
    """

    config: TrainConfig
    rollout: GeneratingGroup | EpisodeGenerator
    reward: BatchReward
    stream: Iterator[DataProto]
    runner: StageRunner = field(default_factory=StageRunner)

    def draw(self, step: int) -> StageResult:
        """Return the batch of a step and metrics. With refilling the rows are scored already."""
        prompts = next(self.stream)
        batch, metrics = self._generate(prompts, step, turn=0)
        if self.config.algorithm.filter_groups.refills:
            batch, refilled = self.refill(batch, len(prompts), step)
            metrics = merged(metrics, refilled)
        return StageResult(batch, metrics)

    def refill(self, batch: DataProto, wanted: int, step: int) -> StageResult:
        """Keep the prompt groups whose scores differ, and draw more until there are `wanted`
        (DAPO, arXiv 2503.14476, section 3.2).

        Only responses that take part in the update count. Stops at
        `filter_groups.max_num_gen_batches` draws, however many groups there are then. The metrics
        of the reward function are those of all draws.
        """
        batch, of_first = self.runner.result(score_responses, batch, self.reward)
        scoring = [of_first]
        turn = 1
        while True:
            decision = sampled(batch, self.config.algorithm, wanted, turn)
            batch = batch.select_idxs(decision.rows)
            if decision.action == "train":
                drawn = {"group/kept": float(decision.kept), "group/gen_batches": float(turn)}
                return StageResult(batch, {**drawn, **merged(*scoring)})
            # `turn` is part of the seed, so that a prompt that is drawn twice in one step does
            # not sample the same responses again.
            more, of_greedy = self._generate(next(self.stream), step, turn)
            more, of_more = self.runner.result(score_responses, more, self.reward)
            scoring += [of_greedy, of_more]
            batch = DataProto.concat([batch, more])
            turn += 1

    def _generate(self, prompts: DataProto, step: int, turn: int) -> StageResult:
        """Return the responses to prompts, and what failed in scoring their greedy responses."""
        n = self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed
        result = self.runner.result
        rows = result(expand_prompts, prompts, n=n, step=step, seed=seed, turn=turn).batch
        if not get_advantage(self.config.algorithm.adv_estimator).needs_baseline_scores:
            return StageResult(result(generate, rows, self.rollout, "train").batch, {})
        runner = self.runner.without_updates()
        # One greedy response per prompt; `n` neighbouring rows have the same prompt.
        first_of_each = rows.select_idxs(np.arange(0, len(rows), n))
        greedy = runner.result(generate, first_of_each, self.rollout, "greedy").batch
        greedy, scoring = runner.result(score_responses, greedy, self.reward)
        rows = add_baselines(rows, greedy).batch
        batch = result(generate, rows, self.rollout, "train").batch
        _mask_without_baseline(batch, greedy)
        return StageResult(batch, {name: scoring[name] for name in _FAILED if name in scoring})


def sampled(batch: DataProto, config: AlgorithmConfig, groups: int, drawn: int) -> SamplingDecision:
    """Decide on scored rows, of which a step wants some `groups` and has `drawn` batches."""
    return dynamic_sampling(
        batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1), batch.non_tensor_batch[fields.UID],
        wanted_groups=groups, member_B=_in_update(batch, config), gen_batches=drawn,
        max_num_gen_batches=config.filter_groups.max_num_gen_batches,
        under_filled=config.filter_groups.under_filled,
    )  # fmt: skip


def _in_update(batch: DataProto, config: AlgorithmConfig) -> Tensor:
    """Return bool [B], True for responses that take part in the update if their group does."""
    left_out = (batch.batch[fields.FINISHED] == 0) & config.overlong.drop_truncated
    return shaping.drop_truncated(batch.batch[fields.RESPONSE_MASK], left_out).any(-1)


def _mask_without_baseline(batch: DataProto, greedy: DataProto) -> None:
    """Mask the responses to prompts whose greedy response was left out (`reward.on_failure=mask`).

    A baseline of 0 in its place would make their advantages too large.
    """
    scored_P = greedy.batch[fields.RESPONSE_MASK].any(-1)
    if not scored_P.all():
        mask = batch.batch[fields.RESPONSE_MASK]
        scored_B = scored_P.repeat_interleave(len(batch) // len(greedy))
        batch.batch[fields.RESPONSE_MASK] = mask * scored_B.to(mask.dtype)[:, None]


def merged(*metrics: Metrics, rows: Sequence[int] = ()) -> Metrics:
    """Reduce the metrics of several draws by their kinds: counts are added, and means weigh the
    `rows` of each draw; without them all draws are equally large."""
    merged = MetricSet()
    for some, count in zip(metrics, rows or [1] * len(metrics), strict=True):
        merged.add({k: [v] * count if metric_kind(k) == "mean" else v for k, v in some.items()})
    return merged.reduce()


@dataclass(eq=False)
class ModelReward:
    """Scores batches with rules and a reward model.

    Attributes:
        metrics: of the last batch: those of the rules, and the mean of each part before weights.
        masked_rows: rows of the last batch that the rules exclude from the update.
    """

    rules: BatchReward
    group: RewardModelGroup
    config: RewardModelConfig
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    masked_rows: list[int] = field(default_factory=list, init=False)

    def __call__(self, data: DataProto, /) -> DataProto:
        """Return the scores of every row of `data`."""
        inputs = data.select(
            batch_keys=[key for key in COMPUTE_RM_SCORE.reads if key != fields.RAW_PROMPT],
            non_tensor_batch_keys=[fields.RAW_PROMPT],
            meta_info_keys=[],
        )
        # Rows that are added for a rank count are scored for nothing.
        inputs, extra = pad_dataproto_to_divisor(inputs, self.group.world_size)
        pending = self.group.compute_rm_score.submit(inputs)
        self.metrics, self.masked_rows = {}, []
        ruled: DataProto | None = None
        if self.config.rule_weight:
            result = self.rules(data)
            ruled = result.get() if isinstance(result, DataProtoFuture) else result
            self.metrics = dict(getattr(self.rules, "metrics", {}))
            self.masked_rows = list(getattr(self.rules, "masked_rows", []))
        model_BT = unpad_dataproto(pending.get(), extra).batch[fields.RM_SCORES]
        scores_BT = self.config.weight * model_BT
        self.metrics["reward/model"] = float(model_BT.sum(-1).mean())
        if ruled is None:
            tensors = {fields.TOKEN_LEVEL_SCORES: scores_BT, fields.RM_SCORES: model_BT}
            return DataProto.from_dict(tensors=tensors)
        rule_BT = ruled.batch[fields.TOKEN_LEVEL_SCORES]
        self.metrics["reward/rules"] = float(rule_BT.sum(-1).mean())
        ruled.batch[fields.TOKEN_LEVEL_SCORES] = self.config.rule_weight * rule_BT + scores_BT
        ruled.batch[fields.RM_SCORES] = model_BT
        return ruled
