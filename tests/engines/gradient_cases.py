"""Gradients of a loss of log-probabilities, entropies and full KL, on one rank or two."""

from dataclasses import dataclass

import engine_cases as cases
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.loading import load_causal_lm

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Folders:
    """Model folders: two policies (`tied`: with a tied output layer) and one reference."""

    policy: str
    tied: str
    reference: str


@dataclass(frozen=True)
class Case:
    """One combination of settings.

    `cut`: the first of two ranks has this many of the seven rows, the second has the others.
    `unit`: least parameters of a layer that is an FSDP unit.
    """

    packed: bool
    fused: bool
    ref_fused: bool = False
    tied: bool = False
    micro: int | None = 2
    cut: int = 4
    unit: int = 10**9
    fsdp_size: int = -1
    early: bool | None = None


ONE_RANK = [
    Case(packed, fused, fused, tied=micro in (2, None), micro=micro)
    for packed in (True, False)
    for fused in (True, False)
    for micro in (1, 2, 3, None)
] + [Case(True, True, False, micro=3), Case(False, False, True, tied=True, micro=None)]
TWO_RANKS = [
    Case(packed, fused, fused, tied=fused != packed, micro=micro, cut=cut, unit=unit)
    for packed in (True, False)
    for fused, micro, cut, unit in (
        (True, 2, 2, 1),
        (False, 2, 2, 10**9),
        (False, 2, 7, 1),
        (True, 2, 7, 10**9),
        (True, None, 2, 10**9),
        (False, None, 7, 10**9),
    )
] + [
    Case(True, False, fsdp_size=size, early=early, unit=1 if early else 10**9)
    for size, early in ((1, None), (-1, True), (1, True))
]


def engine(folder: str, case: Case, *, dtype: str = "float64", **settings) -> FSDPEngine:
    found = EngineConfig(
        dtype=dtype, reduce_dtype=dtype, fused_head=settings.pop("fused", None),
        fsdp_size=case.fsdp_size, reduce_each_micro_batch=case.early,
    )  # fmt: skip
    optim = settings.pop("optim", OptimConfig())
    return FSDPEngine(
        ModelConfig(path=folder), found, optim, packed=case.packed,
        min_unit_parameters=case.unit, **settings,
    )  # fmt: skip


def engines(case: Case, folders: Folders, **settings) -> tuple[FSDPEngine, FSDPEngine]:
    """Return the policy and the reference."""
    policy = folders.tied if case.tied else folders.policy
    return (
        engine(policy, case, fused=case.fused, **settings),
        engine(folders.reference, case, fused=case.ref_fused, optim=None, **settings),
    )


def gradients(case: Case, policy: FSDPEngine, reference: FSDPEngine, rows):
    """Return gradients and metrics of the loss."""
    return cases.gradients(
        policy, rows, loss, case.micro, temperature=TEMPERATURE, entropy=True, reference=reference
    )


def loss(outputs, micro):
    weight = micro["weight"].to(outputs["log_probs"].dtype) * micro["response_mask"]
    kl = outputs["full_kl"] * micro["response_mask"]
    share = (weight * (outputs["log_probs"] + 0.5 * outputs["entropy"])).sum()
    metrics = {"kl": float(kl.detach().sum()), "rows": len(weight)}
    return share + (weight.square() * kl).sum(), metrics


def naive(folders: Folders, *, tied: bool):
    """Compute the same with `log_softmax`, one row and one token at a time, without sharding."""
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
            lp, lq = log_p[prompt + t - 1], log_q[prompt + t - 1]
            weight = batch["weight"][row, t]
            kl = (lp.exp() * (lp - lq)).sum()
            entropy = -(lp.exp() * lp).sum()
            share = weight * (lp[ids[prompt + t]] + 0.5 * entropy) + weight**2 * kl
            share.backward(retain_graph=True)
            total += float(kl.detach())
    return {name: p.grad for name, p in policy.named_parameters()}, total
