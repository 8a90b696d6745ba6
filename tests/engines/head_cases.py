"""Cases for the tests of the output layer and of a reference model, on one rank or two."""

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
    """Model folders: two policies (`tied`: with a tied output layer) and one reference."""

    policy: str
    tied: str
    reference: str


@dataclass(frozen=True)
class HeadCase:
    """One combination of settings.

    `cut`: the first of two ranks has this many of the seven rows, the second has the others.
    """

    packed: bool
    fused: bool
    ref_fused: bool = False
    tied: bool = False
    micro: int | None = 2
    cut: int = 4
    min_unit_parameters: int = 10**9


ONE_RANK = [
    HeadCase(packed, fused, fused, tied, micro)
    for packed in (True, False)
    for fused in (True, False)
    for tied in (True, False)
    for micro in (3, None)
] + [HeadCase(True, True, False), HeadCase(False, False, True)]
TWO_RANKS = [
    HeadCase(packed, fused, fused, tied, 2, cut, unit)
    for packed, fused, tied, cut, unit in (
        (True, True, False, 2, 1),
        (True, False, True, 7, 10**9),
        (False, True, True, 7, 10**9),
        (False, False, False, 2, 1),
    )
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
        min_unit_parameters=case.min_unit_parameters,
    )


def gradients(case: HeadCase, folders: Folders, rows: dict[str, torch.Tensor]):
    """Return gradients and metrics of a loss of log-probabilities, entropy and full KL."""
    policy = engine(folders.tied if case.tied else folders.policy, case, fused=case.fused)
    reference = engine(folders.reference, case, fused=case.ref_fused, frozen=True)
    found: dict[str, torch.Tensor] = {}

    def keep_gradients() -> tuple[float, float]:
        for name, parameter in policy.module.named_parameters():
            found[name] = parameter.grad.full_tensor().clone()
            parameter.grad = None
        return 0.0, 0.0

    policy.optimizer.step = keep_gradients
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


def on_two_ranks(rank: int, folders: Folders):
    """Return the gradients of every case of `TWO_RANKS`. All ranks must call this."""
    batch = cases.make_batch()
    found = {}
    for case in TWO_RANKS:
        first, last = (0, case.cut) if rank == 0 else (case.cut, len(cases.LENGTHS))
        found[case] = gradients(case, folders, cases.rows_of(batch, first, last))
    return found
