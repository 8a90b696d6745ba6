"""Every way to compute one policy update, for `test_update_parity.py`, and an independent update.

The independent update reads one row at a time, without padding, and writes the loss down as the
papers do. It uses nothing of Quadriga.
"""

from dataclasses import astuple, dataclass
from functools import cache
from itertools import combinations, product
from typing import Literal, get_args
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quadriga.config import schema
from quadriga.engines.fsdp import FSDPEngine
from quadriga.parallel.balancing import Balance
from quadriga.protocol import DataProto, fields
from quadriga.workers.updates import update_policy

P, R = 9, 6
Form = Literal["padded", "packed", "shared"]
Batch = dict[str, torch.Tensor]
Parameters = dict[str, torch.Tensor]
GROUPS = (1, 4, 2, 5, 1)  # rows of each prompt group: 13 rows, so that no number of ranks divides
DEAD = (1, 4)  # groups whose advantages are all 0, which the update does not compute
RATE = 1e-2


def norm_in_float64(norm: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """The formula of `LlamaRMSNorm`, which rounds to float32 whatever the dtype."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)


@dataclass(frozen=True)
class Way:
    """One way to compute the update.

    Attributes:
        form: how rows reach the model. "shared": prompts of a group are equal and computed once.
        micro: rows of a micro-batch; None: all.
        checkpointing: of activations.
        whole_groups: whether the rows of a prompt group are on one rank.
        old_given: whether the batch has old log-probabilities. If not, the update takes its own.
    """

    form: Form
    micro: int | None
    aggregation: schema.AggregationName
    checkpointing: schema.Checkpointing
    whole_groups: bool
    old_given: bool


VALUES: tuple[tuple[object, ...], ...] = (
    get_args(Form),
    (1, 2, 3, None),
    get_args(schema.AggregationName),
    (False, True),
    (False, True),
    (False, True),
)
WAYS = [Way(*values) for values in product(*VALUES)]  # type: ignore[arg-type]  # the order above


def pairs_of(ways: list[Way]) -> set[tuple[int, object, int, object]]:
    """Return all pairs of values that occur together in one of the ways."""
    return {
        (i, astuple(way)[i], j, astuple(way)[j])
        for way in ways
        for i, j in combinations(range(len(VALUES)), 2)
    }


@cache
def sample() -> list[Way]:
    """Return few ways in which every pair of values occurs together."""
    missing = pairs_of(WAYS)
    chosen: list[Way] = []
    while missing:
        best = max(WAYS, key=lambda way: len(pairs_of([way]) & missing))
        chosen.append(best)
        missing -= pairs_of([best])
    return chosen


@cache
def make_batch(form: Form) -> tuple[Batch, list[int]]:
    """Make 13 rows, and the number of each row's group. "packed": no two rows share a prompt.

    The groups in `DEAD` have advantages 0. The independent update computes them.
    """
    random = torch.Generator().manual_seed(0)
    group = [number for number, size in enumerate(GROUPS) for _ in range(size)]
    prompt = torch.randint(1, P + 1, (len(GROUPS),), generator=random)[group]
    length = torch.randint(0, R + 1, (len(group),), generator=random)
    attention = torch.cat(
        [torch.arange(P) >= P - prompt[:, None], torch.arange(R) < length[:, None]], 1
    )
    ids = torch.randint(5, 200, (len(group), P + R), generator=random)
    ids[:, :P] = torch.randint(5, 200, (len(GROUPS), P), generator=random)[group]
    if form == "packed":
        ids[:, P - 1] = torch.arange(len(group)) + 5
    noise = torch.rand(len(group), R, generator=random, dtype=torch.float64)
    live = torch.tensor([number not in DEAD for number in group])
    batch = {
        fields.INPUT_IDS: ids * attention,
        fields.ATTENTION_MASK: attention.long(),
        fields.RESPONSE_MASK: attention[:, P:].long(),
        fields.ADVANTAGES: (noise - 0.5) * attention[:, P:] * live[:, None],
    }
    return batch, group


def log_probs_of(model: torch.nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Return the log-probabilities of each row's response tokens, one row at a time."""
    rows = []
    for ids, attention, mask in zip(
        batch[fields.INPUT_IDS], batch[fields.ATTENTION_MASK], batch[fields.RESPONSE_MASK],
        strict=True,
    ):  # fmt: skip
        tokens, n = ids[attention.bool()], int(mask.sum())
        logits = model(tokens[None]).logits[0]
        table = logits.log_softmax(-1)
        rows.append(
            torch.stack([table[i - 1, tokens[i]] for i in range(len(tokens) - n, len(tokens))])
            if n
            else table.new_zeros(0)
        )
    return rows


@patch.object(LlamaRMSNorm, "forward", norm_in_float64)
def independent_update(
    folder: str, form: Form, aggregation: schema.AggregationName
) -> tuple[Parameters, torch.Tensor]:
    """Return the parameters after the update, and the old log-probabilities [B, R].

    Each row's loss is −A · p / p_old with p = p_old. The clipped ratio is the same.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    batch, _ = make_batch(form)
    rows = log_probs_of(model, batch)
    losses = [
        -advantage[: len(row)] * (row - row.detach()).exp()
        for row, advantage in zip(rows, batch[fields.ADVANTAGES], strict=True)
    ]
    tokens, answered = sum(map(len, rows)), [loss for loss in losses if len(loss)]
    total = torch.stack([loss.sum() for loss in losses]).sum()
    loss = {
        "token-mean": total / tokens,
        "token-sum": total,
        "seq-mean-token-sum": total / len(answered),
        "seq-mean-token-mean": sum(loss.mean() for loss in answered) / len(answered),
        "seq-mean-token-sum-norm": total / len(answered) / R,
    }[aggregation]
    loss.backward()
    config = schema.OptimConfig(lr=RATE)
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    torch.optim.AdamW(
        model.parameters(), RATE, config.betas, config.eps, config.weight_decay, foreach=False
    ).step()
    old = torch.zeros(len(rows), R, dtype=torch.float64)
    for index, row in enumerate(rows):
        old[index, : len(row)] = row.detach()
    return {name: value.detach() for name, value in model.named_parameters()}, old


def rows_of_rank(way: Way, rank: int, ranks: int) -> list[int]:
    """Spread the rows over the ranks as the trainer does."""
    batch, group = make_batch(way.form)
    attention = batch[fields.ATTENTION_MASK]
    arranged = Balance(ranks, mini_batch_rows=None, whole_groups=way.whole_groups).arrange(
        group,
        attention[:, :P].sum(1).numpy(),
        attention[:, P:].sum(1).numpy(),
        np.ones(len(group), dtype=bool),
    )
    return [row for block in arranged.rows[rank] for row in block]


def updated(
    engine: FSDPEngine, rows: Batch, config: schema.ActorConfig, n: int, ranks: int
) -> Parameters:
    """Make one update with the rows of a rank, n responses per prompt; return all parameters."""
    update_policy(
        engine, DataProto.from_dict(rows), config, responses_per_prompt=n, temperature=1.0,
        length_scale=R, data_ranks=ranks, seed=0,
    )  # fmt: skip
    return {name: tensor.clone() for name, tensor in engine.state_stream()}


@patch.object(LlamaRMSNorm, "forward", norm_in_float64)
def parameters_after(folder: str, way: Way, old: torch.Tensor, rank: int, ranks: int) -> Parameters:
    """Make the update on one rank of `ranks`. Return the full parameters."""
    engine = FSDPEngine(
        schema.ModelConfig(path=folder, gradient_checkpointing=way.checkpointing),
        schema.EngineConfig(dtype="float64", reduce_dtype="float64", use_dynamic_bsz=False),
        schema.OptimConfig(lr=RATE),
        packed=way.form != "padded",
    )
    batch = make_batch(way.form)[0] | ({fields.OLD_LOG_PROBS: old} if way.old_given else {})
    mine = rows_of_rank(way, rank, ranks)
    config = schema.ActorConfig(
        loss_agg_mode=way.aggregation, ppo_mini_batch_size=None,
        ppo_micro_batch_size_per_gpu=way.micro,
    )  # fmt: skip
    return updated(engine, {name: field[mine] for name, field in batch.items()}, config, 1, ranks)


def differences(
    folder: str, ways: list[Way], expected: str, rank: int, ranks: int
) -> dict[Way, float]:
    """Return, for each way, the largest difference of a parameter from the independent update."""
    stored: dict[tuple[Form, schema.AggregationName], tuple[Parameters, torch.Tensor]] = torch.load(
        expected, weights_only=True
    )
    found = {}
    for way in ways:
        wanted, old = stored[way.form, way.aggregation]
        given = parameters_after(folder, way, old, rank, ranks)
        assert wanted.keys() <= given.keys()
        found[way] = max(float((given[name] - wanted[name]).abs().max()) for name in wanted)
    return found


def rank_main(
    rank: int, ranks: int, folder: str, ways: list[Way], expected: str, file: str
) -> None:
    """Make the updates as one rank of a process group; rank 0 writes the differences."""
    found = differences(folder, ways, expected, rank, ranks)
    if rank == 0:
        torch.save(list(found.values()), file)
