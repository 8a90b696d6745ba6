"""The losses that TRL has too, with the settings of both sides, computed with Quadriga."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from maths.comparison import Comparison
from quadriga.algorithms.aggregation import aggregate, count_mask
from quadriga.algorithms.kl import kl_loss
from quadriga.algorithms.policy_losses import compute_policy_loss

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
THEIR_CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
SAMPLES = "seq-mean-token-mean"
NO_DUAL_CLIP = {"clip_ratio_c": 1e9}


def trl_cases() -> list[Comparison]:
    """Return the cases. `name` is TRL's loss type, `peer` the name of Quadriga's loss."""

    def case(
        title: str, name: str, loss: str, mode: str, mine: dict[str, Any], more: dict[str, Any]
    ) -> Comparison:
        theirs = {**THEIR_CLIP, **more}
        return Comparison(f"TRL {title}", "trl", name, mine, mode, peer=loss, peer_options=theirs)

    plain = {**CLIP, **NO_DUAL_CLIP}
    scaled = {**plain, "loss_scale_length": 9}
    tau = {"tau_pos": 1.2, "tau_neg": 0.8}
    upper = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}
    return [
        case("grpo", "grpo", "ppo_clip", SAMPLES, plain, {}),
        case("grpo with KL", "grpo", "ppo_clip", SAMPLES, {**plain, "beta": 0.1}, {"beta": 0.1}),
        case("grpo with delta", "grpo", "ppo_clip", SAMPLES,
             {**CLIP, "clip_ratio_c": 1.5}, {"delta": 1.5}),
        case("bnpo", "bnpo", "ppo_clip", "token-mean", plain, {}),
        case("dapo", "dapo", "ppo_clip", "token-mean", plain, {}),
        case("dr_grpo", "dr_grpo", "ppo_clip", "seq-mean-token-sum-norm", scaled,
             {"max_completion_length": 9}),
        case("gspo", "grpo", "gspo", SAMPLES, CLIP, {"level": "sequence"}),
        case("sapo", "sapo", "sapo", SAMPLES, tau, tau),
        case("cispo", "cispo", "cispo", "token-mean", upper, {"epsilon_high": 1.5}),
        Comparison("TRL log-probability", "trl logits", "log_prob"),
        Comparison("TRL entropy", "trl logits", "entropy"),
    ]  # fmt: skip


def quadriga_side(case: Comparison, t: dict[str, Any]) -> dict[str, Tensor]:
    """Compute value and gradient of the loss `case.peer` with Quadriga."""
    mask, log_prob = t["mask"], t["log_prob"].clone().requires_grad_()
    settings = dict(case.options)
    beta, length = settings.pop("beta", 0.0), settings.pop("loss_scale_length", None)
    loss_BT = compute_policy_loss(
        case.peer,
        log_prob_BT=log_prob,
        old_log_prob_BT=t["old_log_prob"],
        advantages_BT=t["baselines"][:, None].expand(mask.shape),
        response_mask_BT=mask,
        **settings,
    ).loss_BT
    if beta:
        loss_BT = loss_BT + kl_loss(log_prob, t["values"], mask, kl_loss_coef=beta).loss_BT
    tokens, sequences = count_mask(mask)
    loss = aggregate(
        loss_BT,
        mask,
        case.mode,
        global_tokens=tokens,
        global_sequences=sequences,
        loss_scale_length=length,
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"value": loss, "grad": grad}
