"""Updates of rows in prompt groups on one, two or four ranks, for `test_group_balance.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args
from unittest.mock import patch

import numpy as np
import torch
from parity_cases import P, R, norm_in_float64, updated
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quadriga.config import schema
from quadriga.engines.fsdp import FSDPEngine
from quadriga.parallel.balancing import Arrangement, Balance
from quadriga.protocol import fields
from rank_groups import fork_ranks

Order = Literal["as drawn", "sequences", "groups"]
AGGREGATIONS: tuple[schema.AggregationName, ...] = get_args(schema.AggregationName)
WAIT_S = 400.0


@dataclass(frozen=True)
class Case:
    """One update.

    Attributes:
        rows: rows of the batch.
        order: how they are spread over the ranks.
        aggregation: of the loss.
        mini_prompts: prompts of a mini-batch; None: the whole batch.
        dead: whether every third prompt group is masked.
        max_tokens: of a micro-batch.
    """

    rows: int
    order: Order = "groups"
    aggregation: schema.AggregationName = "token-mean"
    mini_prompts: int | None = None
    dead: bool = False
    max_tokens: int = 40


ORDERS: tuple[Order, ...] = get_args(Order)
EVEN = 4  # responses of a prompt where the batch has several mini-batches
CASES = (
    *(Case(rows, order) for rows in range(1, 18) for order in ORDERS),
    *(Case(13, order, aggregation=mode) for mode in AGGREGATIONS for order in ORDERS[1:]),
    *(Case(16, order, mini_prompts=2, dead=dead) for order in ORDERS[1:] for dead in (False, True)),
    Case(16, dead=True),
    # A budget below one group: the group is split over micro-batches.
    Case(17, max_tokens=16),
    Case(16, mini_prompts=2, max_tokens=10**6),
)  # fmt: skip


def group_sizes(case: Case) -> list[int]:
    """Rows of each prompt group: equal ones for mini-batches, else 1 to 5."""
    if case.mini_prompts is not None:
        return [EVEN] * (case.rows // EVEN)
    random = np.random.default_rng(case.rows)
    sizes: list[int] = []
    while sum(sizes) < case.rows:
        sizes.append(min(int(random.integers(1, 6)), case.rows - sum(sizes)))
    return sizes


def batch_of(case: Case) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Rows in uneven prompt groups, next to each other, and the number of each row's group."""
    random = torch.Generator().manual_seed(case.rows)
    group = [number for number, size in enumerate(group_sizes(case)) for _ in range(size)]
    prompt_length = torch.randint(1, P + 1, (max(group) + 1,), generator=random)[group]
    length = torch.randint(1, R + 1, (case.rows,), generator=random)
    prompt = torch.arange(P) >= P - prompt_length[:, None]
    response = torch.arange(R) < length[:, None]
    ids = torch.randint(5, 200, (case.rows, P + R), generator=random)
    ids[:, :P] = torch.randint(5, 200, (max(group) + 1, P), generator=random)[group]
    attention = torch.cat([prompt, response], 1).long()
    noise = torch.rand(case.rows, R, generator=random, dtype=torch.float64)
    mask = response.long()
    if case.dead:
        mask[[number % 3 == 1 for number in group]] = 0
    rows = {
        fields.INPUT_IDS: ids * attention,
        fields.ATTENTION_MASK: attention,
        fields.RESPONSE_MASK: mask,
        fields.ADVANTAGES: (noise - 0.5) * response,
        fields.OLD_LOG_PROBS: (-4 * noise - 0.1) * response,
    }
    return rows, group


def arrangement(case: Case, ranks: int) -> Arrangement:
    """Spread the rows of a case over ranks as `stages.balance_over_ranks` does."""
    rows, group = batch_of(case)
    prompt = rows[fields.ATTENTION_MASK][:, :P].sum(1).numpy()
    response = rows[fields.ATTENTION_MASK][:, P:].sum(1).numpy()
    size = None if case.mini_prompts is None else case.mini_prompts * EVEN
    balance = Balance(ranks, mini_batch_rows=size, whole_groups=case.order == "groups")
    live = rows[fields.RESPONSE_MASK].any(1).numpy()
    return balance.arrange(group, prompt, response, live)


def rows_of_rank(case: Case, rank: int, ranks: int) -> list[int]:
    if case.order == "as drawn":
        return np.array_split(np.arange(case.rows), ranks)[rank].tolist()
    return [row for block in arrangement(case, ranks).rows[rank] for row in block]


@patch.object(LlamaRMSNorm, "forward", norm_in_float64)
def parameters_after(
    folder: str, case: Case, rank: int, ranks: int, *, packed: bool = True
) -> dict[str, torch.Tensor]:
    """Make the update on one rank of `ranks`. Return the full parameters."""
    engine = FSDPEngine(
        schema.ModelConfig(path=folder),
        schema.EngineConfig(
            dtype="float64", reduce_dtype="float64", max_tokens_per_micro_batch=case.max_tokens
        ),
        schema.OptimConfig(lr=1e-2),
        packed=packed,
    )
    rows, _ = batch_of(case)
    mine = rows_of_rank(case, rank, ranks)
    config = schema.ActorConfig(
        ppo_mini_batch_size=case.mini_prompts, loss_agg_mode=case.aggregation
    )
    given = {name: field[mine] for name, field in rows.items()}
    return updated(engine, given, config, EVEN, ranks)


def rank_main(rank: int, ranks: int, folder: str, file: str) -> None:
    """Make every update as one rank of a process group; rank 0 writes the parameters."""
    found = {case: parameters_after(folder, case, rank, ranks) for case in cases_on(ranks)}
    if rank == 0:
        torch.save(found, file)


def run_ranks(ranks: int, folder: str, file: str) -> dict[Case, dict[str, torch.Tensor]]:
    """Make every update on `ranks` processes. Raises `TimeoutError` after `WAIT_S`."""
    fork_ranks(rank_main, ranks, folder, file, limit=WAIT_S)
    # The keys are dataclasses, which need pickle. This test wrote the file.
    results: dict[Case, dict[str, torch.Tensor]] = torch.load(file, weights_only=False)
    return results


def cases_on(ranks: int) -> list[Case]:
    """Return the cases whose mini-batches divide by the number of ranks."""
    return [case for case in CASES if (case.mini_prompts or 0) * EVEN % ranks == 0]


def cases_by_batch() -> Iterator[tuple[Case, list[Case]]]:
    """Yield each batch with the cases whose parameters must be equal."""
    by_batch: dict[Case, list[Case]] = {}
    for case in CASES:
        plain = Case(case.rows, "as drawn", case.aggregation, case.mini_prompts, case.dead, 10**6)
        by_batch.setdefault(plain, []).append(case)
    yield from by_batch.items()
