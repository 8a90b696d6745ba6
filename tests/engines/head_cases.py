"""What the tests of output layers and of a reference beside the policy compute, on any ranks."""

from __future__ import annotations

from dataclasses import dataclass

import engine_cases as cases
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.loading import load_causal_lm

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Folders:
    """`policy` and `tied` are the models that learn, `reference` is another one like them."""

    policy: str
    tied: str
    reference: str


@dataclass(frozen=True)
class HeadCase:
    """`cut`: rows of the first of two ranks, the other has the rest (7: none)."""

    packed: bool
    fused: bool
    ref_fused: bool = False
    tied: bool = False
    micro: int | None = 2
    cut: int = 4
    smallest_unit: int = 10**9


ONE_RANK = [
    HeadCase(packed, fused, fused, tied, micro)
    for packed in (True, False)
    for fused in (True, False)
    for tied in (True, False)
    for micro in (1, 3, None)
] + [HeadCase(True, True, False), HeadCase(False, False, True)]
TWO_RANKS = [
    HeadCase(packed, fused, fused, tied, 2, cut, unit)
    for packed in (True, False)
    for fused in (True, False)
    for tied, cut, unit in ((False, 2, 1), (True, 7, 10**9))
]


def engine(
    folder: str, case: HeadCase, *, fused: bool, frozen: bool = False, dtype: str = "float64"
) -> FSDPEngine:
    settings = EngineConfig(dtype=dtype, reduce_dtype=dtype, fused_head=fused)
    return FSDPEngine(
        ModelConfig(path=folder),
        settings,
        None if frozen else OptimConfig(),
        packed=case.packed,
        smallest_unit=case.smallest_unit,
    )


def gradients(case: HeadCase, folders: Folders, rows: dict[str, torch.Tensor]):
    """Gradients and metrics of a loss of log-probabilities, entropy and KL over the vocabulary."""
    policy = engine(folders.tied if case.tied else folders.policy, case, fused=case.fused)
    reference = engine(folders.reference, case, fused=case.ref_fused, frozen=True)
    found: dict[str, torch.Tensor] = {}

    def keep() -> tuple[float, float]:
        for name, parameter in policy.module.named_parameters():
            found[name] = parameter.grad.full_tensor().clone()
            parameter.grad = None
        return 0.0, 0.0

    policy.optimizer.step = keep
    metrics = policy.train_step(
        rows,
        loss,
        temperature=TEMPERATURE,
        entropy=True,
        reference=reference,
        micro_batch_size=case.micro,
    )
    return found, metrics


def loss(outputs, micro):
    weight = micro["weight"].to(outputs["log_probs"].dtype) * micro["response_mask"]
    kl = outputs["full_kl"] * micro["response_mask"]
    share = (weight * (outputs["log_probs"] + 0.5 * outputs["entropy"])).sum()
    return share + (weight.square() * kl).sum(), {"kl": float(kl.detach().sum())}


def by_rows(folders: Folders, *, tied: bool):
    """The same from the textbook, one row and one token at a time, no padding, no sharding."""
    policy, reference = (
        load_causal_lm(folder, dtype=torch.float64)
        for folder in (folders.tied if tied else folders.policy, folders.reference)
    )
    batch = cases.make_batch()
    total = 0.0
    for row, (prompt, response) in enumerate(cases.LENGTHS):
        ids = batch["input_ids"][row, cases.P - prompt : cases.P + response]
        log_p = (policy(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            log_q = (reference(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for t in range(response):
            if not batch["response_mask"][row, t]:
                continue
            mine, theirs = log_p[prompt + t - 1], log_q[prompt + t - 1]
            weight = batch["weight"][row, t]
            kl = (mine.exp() * (mine - theirs)).sum()
            entropy = -(mine.exp() * mine).sum()
            share = weight * (mine[ids[prompt + t]] + 0.5 * entropy) + weight**2 * kl
            share.backward(retain_graph=True)
            total += float(kl.detach())
    return {name: p.grad for name, p in policy.named_parameters()}, total


def on_two_ranks(rank: int, folders: Folders):
    """Gradients of every case of `TWO_RANKS`; all ranks call this together."""
    batch = cases.make_batch()
    found = {}
    for case in TWO_RANKS:
        first, last = (0, case.cut) if rank == 0 else (case.cut, len(cases.LENGTHS))
        found[case] = gradients(case, folders, cases.rows_of(batch, first, last))
    return found
