"""Updates with every loss and every aggregation, for `test_losses_on_megatron.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from typing import get_args

import conformance
import torch
from conformance import Subject

from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.config.schema import (
    ActorConfig,
    AggregationName,
    CriticConfig,
    PolicyLossConfig,
    SampledKLName,
)
from quadriga.protocol import DataProto, fields
from quadriga.workers.updates import update_policy, update_values

RESPONSE_LENGTH = 6
CRITIC = "critic"


@dataclass(frozen=True)
class Case:
    """A loss with an aggregation.

    Attributes:
        loss: `CRITIC` is that of the value model.
        terms: settings of the terms beside the loss.
        old_given: whether the batch has old log-probabilities. If not, the update takes its own.
    """

    loss: str
    aggregation: AggregationName
    old_given: bool = True
    terms: dict[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.loss} {self.aggregation}"

    @property
    def head(self) -> str:
        return "value" if self.loss == CRITIC else "lm"


def _with_terms() -> list[Case]:
    """Return all cases. A third of those of the policy have a KL, with each estimator in turns; a
    third have an entropy bonus; and a third take the old log-probabilities from the update."""
    kl = cycle(get_args(SampledKLName))
    found = []
    for number, (loss, mode) in enumerate(product(POLICY_LOSSES, get_args(AggregationName))):
        terms: dict[str, object] = {}
        if number % 3 == 0:
            terms = {"use_kl_loss": True, "kl_loss_type": next(kl), "kl_loss_coef": 0.1}
        elif number % 3 == 1:
            terms = {"entropy_coeff": 0.1}
        found.append(Case(loss, mode, number % 3 != 2, terms))
    return found + [Case(CRITIC, mode) for mode in get_args(AggregationName)]


CASES = _with_terms()


def batch_of() -> dict[str, torch.Tensor]:
    """Return seven rows with everything that a loss can read. One has no advantages."""
    batch = conformance.batch_of()
    mask = batch["response_mask"]
    random = torch.Generator().manual_seed(7)

    def numbers(mean: float, spread: float) -> torch.Tensor:
        return (mean + spread * torch.randn(mask.shape, generator=random)) * mask

    old = numbers(-5.0, 0.6)
    advantages = numbers(0.0, 1.0)
    advantages[3] = 0
    return {name: batch[name] for name in ("input_ids", "attention_mask", "response_mask")} | {
        fields.OLD_LOG_PROBS: old,
        fields.ROLLOUT_LOG_PROBS: old + numbers(0.0, 0.1),
        fields.REF_LOG_PROB: old + numbers(0.0, 0.3),
        fields.ADVANTAGES: advantages,
        fields.SELECTED_TOKENS: (numbers(0.0, 1.0) > 0.5) & mask.bool(),
        fields.VALUES: numbers(0.0, 0.5),
        fields.RETURNS: numbers(0.5, 1.0),
    }


class Updates:
    """Makes updates with one engine for each head. Each begins with the weights of the folder."""

    def __init__(self, subject: Subject, root: Path) -> None:
        self.engines = {
            head: conformance.build(Subject(subject.name, subject.family, head, subject.settings),
                                    root)
            for head in ("lm", "value")
        }  # fmt: skip
        self.first = {
            head: root / f"first {subject.name} {head}".replace(" ", "-") for head in self.engines
        }
        for head, engine in self.engines.items():
            engine.save(self.first[head])
        conformance.gather_over_ranks(None)  # every rank has saved

    def __call__(self, case: Case) -> dict[str, object]:
        engine = self.engines[case.head]
        engine.load(self.first[case.head])
        batch = batch_of()
        if not case.old_given:
            del batch[fields.OLD_LOG_PROBS]
        rows = conformance.own_rows(engine)
        at = getattr(engine, "ranks", None)
        data = DataProto.from_dict({name: tensor[rows] for name, tensor in batch.items()})
        if case.loss == CRITIC:
            report = update_values(
                engine,
                data,
                CriticConfig(
                    loss_agg_mode=case.aggregation,
                    ppo_micro_batch_size_per_gpu=2,
                    cliprange_value=0.3,
                ),
                mini_batch_rows=max(1, len(rows)),
                epochs=1,
                length_scale=RESPONSE_LENGTH,
            )
        else:
            report = update_policy(
                engine,
                data,
                ActorConfig(
                    policy_loss=PolicyLossConfig(name=case.loss),
                    loss_agg_mode=case.aggregation,
                    ppo_micro_batch_size_per_gpu=2,
                    **case.terms,
                ),
                responses_per_prompt=1,
                temperature=0.7,
                length_scale=RESPONSE_LENGTH,
                data_ranks=1 if at is None else at.degrees.replicas // at.sizes.context,
                seed=0,
            )
        return {"metrics": report.meta_info["metrics"], "weights": conformance.weights(engine)}


def rank_main(
    number: int, ranks: int, root: str, subject: Subject, cases: list[Case], port: int
) -> None:
    """Make updates with a subject; rank 0 writes what it has found."""
    import megatron_on_cpu

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    megatron_on_cpu.install()
    update = Updates(subject, Path(root))
    found = {str(case): update(case) for case in cases}
    if number == 0:
        torch.save(found, Path(root) / f"{subject.name}.pt")
    torch.distributed.destroy_process_group()
