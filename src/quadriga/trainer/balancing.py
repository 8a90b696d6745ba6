"""How the rows of a step are ordered, so that the ranks of the actor have about equal work.

A worker group splits a batch into equal parts of neighbouring rows, one for each rank, and a rank
cuts its part into mini-batches in order. So the order of the rows decides which rank computes a row
and in which mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from quadriga.config.plan import mini_batch_prompts
from quadriga.config.schema import MISSING_PATH, TrainConfig
from quadriga.parallel.balancing import RowCosts, arrange_rows
from quadriga.parallel.costs import TOKENS, CostModel, Counts
from quadriga.protocol import DataProto, fields
from quadriga.trainer.dataflow import masks_before_passes, skips_before_passes
from quadriga.trainer.roles.workers import needs_critic
from quadriga.workers.objectives import mask_with_advantage


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
        """Order B rows.

        Args:
            uid: [B] ids of prompt groups.
            prompt, response: [B] tokens.
            live: [B] bool, whether the row has a token to learn from.
        """
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
    """The rows of each rank in each mini-batch.

    Attributes:
        rows: [ranks][mini-batches], row numbers of the batch.
        tokens, costs: tokens and FLOPs that the rows compute.
    """

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


def balance_of(config: TrainConfig, ranks: int, critic_ranks: int | None = None) -> Balance:
    """Return how the batches of a run are ordered.

    Args:
        ranks: of the actor.
        critic_ranks: of the critic; None: the run has none, or as many as the actor has.

    Raises:
        ModelError: the model folder of the actor cannot be used.
    """
    _, critic_prompts = mini_batch_prompts(config)
    unbalanced = Balance(
        ranks,
        config.trainer.balance_batch,
        mini_batch_rows=_rows_of_mini_batch(config, ranks),
        masked=masks_before_passes(config),
        skips=skips_before_passes(config),
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
