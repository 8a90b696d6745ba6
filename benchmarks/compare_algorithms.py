"""Compare values and gradients of Quadriga's algorithms with verl 0.9.1 and TRL on random batches.

    python benchmarks/compare_algorithms.py --peer-python /path/to/verl-env/bin/python
    python benchmarks/compare_algorithms.py --trl-python /path/to/trl-env/bin/python

Everything runs in float64. `EXPLAINED` lists the known differences with their reasons. The exit
code is 1 if another difference is found, or if a listed difference is not found.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from algorithms import Peer  # noqa: E402
from maths.comparison import Comparison  # noqa: E402
from maths.trl_cases import quadriga_side, trl_cases  # noqa: E402
from quadriga.algorithms.advantages import compute_advantages  # noqa: E402
from quadriga.algorithms.aggregation import AGGREGATIONS, aggregate, count_mask  # noqa: E402
from quadriga.algorithms.importance import (  # noqa: E402
    importance_correction,
    mismatch_metrics,
)
from quadriga.algorithms.kl import kl_estimate, make_kl_controller  # noqa: E402
from quadriga.algorithms.policy_losses import (  # noqa: E402
    compute_policy_loss,
    get_policy_loss,
    select_tokens,
)
from quadriga.algorithms.value_loss import value_loss  # noqa: E402
from quadriga.models.log_probs import log_probs_and_entropy  # noqa: E402

TOLERANCE = 1e-6
ONE = (
    "A prompt group with one sample: verl subtracts no baseline, so the advantage is the reward. "
    "Quadriga returns 0."
)
ROW = (
    "A sample without tokens: verl counts it in the statistics of its prompt group. Quadriga does "
    "not."
)
SELECTED = (
    "verl takes mean, covariance and largest tokens from the current log-probabilities of one "
    "micro-batch. Quadriga takes them from the old log-probabilities of the whole batch, so that "
    "the result does not depend on the micro-batches."
)
EXPLAINED = {
    "grpo, groups of one": ONE,
    "rloo, groups of one": ONE,
    "opo, groups of one": ONE,
    "reinforce_plus_plus_baseline, groups of one": ONE,
    "grpo, empty samples": ROW,
    "gpg, zero-one rewards": "verl's α is B / (samples with a non-zero reward), which changes when "
    "a constant is added to all rewards. Quadriga's is that of the paper: B / (samples in prompt "
    "groups with unequal rewards).",
    "k3": "verl clamps k3 to ±10. Quadriga's `low_var_kl` does too; its `k3` is not clamped.",
    "kl_cov": SELECTED,
    "geo_mean, token-mean": "verl ignores the aggregation mode and averages over samples. Quadriga "
    "follows the mode; `seq-mean-token-mean` gives the loss of the paper.",
    "sapo, token-mean": "verl always aggregates SAPO by `seq-mean-token-mean`. Quadriga follows "
    "the aggregation mode.",
    "gdpo, one component": "verl whitens the sum over tokens, so that long responses weigh more. "
    "Quadriga whitens it over samples, as in the paper.",
    "mismatch, perplexity ratio": "verl takes the arithmetic mean of the responses' ratios. "
    "Quadriga takes the geometric mean, in which a ratio and its inverse cancel.",
    "importance token mask": "verl's interval starts at the given bound. Quadriga's starts at "
    "1/upper unless `lower` is given; this case does not give it.",
}


def make_batch(variant: str) -> dict[str, Tensor | list[str]]:
    """Return 24 samples of up to 12 tokens in 6 prompt groups, with zeros inside the mask.

    Log-ratios have a standard deviation of 0.3. `variant` names what is special about the batch.
    """
    rng = np.random.default_rng(7)
    count, width = 24, 12
    mask = (np.arange(width)[None] < rng.integers(1, width + 1, count)[:, None]).astype(np.int64)
    mask[:, 4] *= rng.integers(0, 2, count)
    mask[:, 0] = 1
    groups = [f"g{i % 6}" for i in range(count)]
    if variant == "groups of one":
        groups[0] = "alone"
    if variant == "empty samples":
        mask[3] = 0
    if variant == "zero-one rewards":
        rewards = np.zeros((count, width))
        rewards[:, 0] = np.arange(count) % 3 == 0  # reward 1 in two prompt groups, 0 in four
        rewards[1, 0] = 1.0  # unequal rewards in one of the four
    else:
        rewards = rng.normal(size=(count, width)) * mask
    old = -rng.exponential(1.0, (count, width))
    tokens = {
        "rewards": rewards,
        "values": rng.normal(size=(count, width)) * mask,
        "log_prob": old + 0.3 * rng.normal(size=(count, width)),
        "old_log_prob": old,
        "advantages": rng.normal(size=(count, width)) * mask,
    }
    batch: dict[str, Any] = {key: torch.from_numpy(value) for key, value in tokens.items()}
    batch["mask"] = torch.from_numpy(mask)
    batch["baselines"] = torch.from_numpy(rng.normal(size=count))
    batch["groups"] = groups
    if variant == "far apart":
        batch["log_prob"] = batch["log_prob"] - 4.0
    if variant == "first step":
        batch["log_prob"] = batch["old_log_prob"].clone()
    batch["logits"] = torch.from_numpy(2 * rng.normal(size=(count, width, 7)))
    batch["labels"] = torch.from_numpy(rng.integers(0, 7, (count, width)))
    return batch


CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
TAU = {"tau_pos": 1.2, "tau_neg": 0.8}
DUAL = {**CLIP, "clip_ratio_c": 1.3}
PAPER = "seq-mean-token-mean"


def advantage_cases() -> list[Comparison]:
    """Return the cases of estimators, with special prompt groups and samples."""

    def case(name: str, options: dict[str, Any] | None = None, batch: str = "usual") -> Comparison:
        title = name if batch == "usual" else f"{name}, {batch}"
        return Comparison(title, "advantage", name, options or {}, batch=batch)

    plain = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "remax", "reinforce_plus_plus_baseline")
    return [
        case("gae", {"gamma": 0.9, "lam": 0.7}),
        case("reinforce_plus_plus", {"gamma": 0.9}),
        Comparison("dr_grpo", "advantage", "grpo", {"norm_adv_by_std": False}),
        *map(case, plain),
        *(case(name, batch="zero-one rewards") for name in ("grpo", "rloo", "opo", "gpg")),
        *(
            case(name, batch="groups of one")
            for name in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
        ),
        case("grpo", batch="empty samples"),
        Comparison("gdpo, one component", "advantage", "gdpo"),
    ]


def loss_cases() -> list[Comparison]:
    """Return the cases of policy losses, aggregations and the value loss."""
    modes = ("token-mean", "token-sum", "seq-mean-token-sum", PAPER)
    cov = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}
    band = {**CLIP, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
    length = {"loss_scale_length": 9}
    return [
        *(
            Comparison(f"ppo_clip, {mode}", "loss", "ppo_clip", DUAL, mode, peer="vanilla")
            for mode in modes
        ),
        Comparison("gspo_token", "loss", "gspo_token", CLIP, PAPER, peer="gspo"),
        Comparison("cispo", "loss", "cispo", CLIP),
        Comparison("sapo", "loss", "sapo", TAU, PAPER),
        Comparison("sapo, token-mean", "loss", "sapo", TAU),
        Comparison("geo_mean", "loss", "geo_mean", CLIP, PAPER),
        Comparison("geo_mean, token-mean", "loss", "geo_mean", CLIP),
        Comparison("gpg loss", "loss", "gpg"),
        Comparison("kl_cov", "loss", "kl_cov", cov),
        Comparison("kl_cov, first step", "loss", "kl_cov", cov, batch="first step"),
        Comparison("clip_cov, first step", "loss", "clip_cov", band, batch="first step"),
        *(Comparison(f"aggregation {m}", "aggregation", m, length) for m in AGGREGATIONS),
        Comparison("value", "value", "value", {"cliprange_value": 0.4}),
    ]


def distance_cases() -> list[Comparison]:
    """Return the cases of KL estimators and importance weights."""

    def weights(level: str, threshold: str, **options: Any) -> Comparison:
        given = {"level": level, "mode": "truncate", "upper": 1.4, **options}
        title = " ".join(["importance", level, given["mode"], *(["lower"] * ("lower" in options))])
        return Comparison(title, "importance", level, given, threshold=threshold)

    return [
        *(Comparison(kind, "kl", kind) for kind in ("k1", "abs", "k2", "low_var_kl", "k1+", "k3+")),
        Comparison("k3", "kl", "k3", batch="far apart"),
        Comparison("low_var_kl, far apart", "kl", "low_var_kl", batch="far apart"),
        weights("token", "1.4"),
        weights("sequence", "1.4"),
        weights("token", "0.8_1.4", mode="mask", lower=0.8),
        weights("token", "0.8_1.4", mode="mask"),
    ]


def measure_cases() -> list[Comparison]:
    """Return the cases of logits, of the rollout mismatch and of the adaptive KL controller."""
    return [
        Comparison("log-probability", "logits", "log_prob"),
        Comparison("entropy", "logits", "entropy"),
        Comparison("mismatch", "mismatch", "k1, k3, perplexities"),
        Comparison("mismatch, perplexity ratio", "mismatch", "ratio"),
        Comparison("adaptive KL", "controller", "adaptive", {"kl": [0.1, 0.02, 9.0, 0.11]}),
    ]


def measured(case: Comparison, t: dict[str, Any]) -> dict[str, Tensor]:
    """Compute a case of `measure_cases` with Quadriga."""
    mask = t["mask"]
    if case.kind.endswith("logits"):
        logits = t["logits"].clone().requires_grad_()
        values = dict(
            zip(("log_prob", "entropy"), log_probs_and_entropy(logits, t["labels"]), strict=True)
        )[case.name]
        (grad,) = torch.autograd.grad((values * mask * t["values"]).sum(), logits)
        return {"value": values * mask, "grad": grad}
    if case.kind == "mismatch":
        found = mismatch_metrics(t["log_prob"], t["old_log_prob"], mask)
        names = ("mismatch_k1", "mismatch_k3", "ppl_gap") if "k1" in case.name else ("ppl_ratio",)
        return {"value": torch.tensor([found[name] for name in names])}
    controller = make_kl_controller("adaptive", kl_coef=0.1, target_kl=0.1, horizon=100.0)
    betas = []
    for kl in case.options["kl"]:
        controller.update(kl, 24)
        betas.append(controller.value)
    return {"value": torch.tensor(betas, dtype=torch.float64)}


def ours(case: Comparison, t: dict[str, Any]) -> dict[str, Tensor]:
    """Compute a case with Quadriga. Return {"value": …}, and {"grad": …} if it has a gradient."""
    mask = t["mask"]
    if case.kind == "trl":
        return quadriga_side(case, t)
    if case.kind in ("logits", "trl logits", "mismatch", "controller"):
        return measured(case, t)
    if case.kind == "advantage":
        value, returns = compute_advantages(
            case.name,
            token_level_rewards_BT=t["rewards"],
            response_mask_BT=mask,
            group_ids=t["groups"],
            values_BT=t["values"],
            reward_baselines_B=t["baselines"],
            reward_components_BK=(t["rewards"] * mask).sum(-1, keepdim=True),
            **case.options,
        )
        return {"value": value, "returns": returns}
    if case.kind == "importance":
        weights = importance_correction(t["log_prob"], t["old_log_prob"], mask, **case.options)
        return {"value": weights.weights_BT}
    log_prob = t["log_prob"].clone().requires_grad_()
    if case.kind == "loss":
        selecting = get_policy_loss(case.name).select_settings
        chosen = select_tokens(
            case.name,
            old_log_prob_BT=t["old_log_prob"],
            advantages_BT=t["advantages"],
            response_mask_BT=mask,
            **{key: value for key, value in case.options.items() if key in selecting},
        )
        loss_BT = compute_policy_loss(
            case.name,
            selected_BT=chosen,
            log_prob_BT=log_prob,
            old_log_prob_BT=t["old_log_prob"],
            advantages_BT=t["advantages"],
            response_mask_BT=mask,
            **case.options,
        ).loss_BT
    elif case.kind == "kl":
        loss_BT = kl_estimate(log_prob, t["old_log_prob"], case.name)
    elif case.kind == "value":
        loss_BT = value_loss(
            log_prob, t["old_log_prob"], t["rewards"], mask, **case.options
        ).loss_BT
    else:
        loss_BT = log_prob
    tokens, sequences = count_mask(mask)
    loss = aggregate(
        loss_BT,
        mask,
        case.name if case.kind == "aggregation" else case.mode,
        global_tokens=tokens,
        global_sequences=sequences,
        loss_scale_length=case.options.get("loss_scale_length"),
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"value": loss, "grad": grad}


def theirs(peer: Peer, cases: list[Comparison], batch: dict[str, Any]) -> tuple[Any, Any]:
    """Compute the cases with a peer. Return (arrays by "case|key", errors by case)."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.npz", Path(folder) / "out.npz"
        arrays = {k: v.numpy() for k, v in batch.items() if isinstance(v, Tensor)}
        np.savez(
            source,
            **arrays,
            groups=np.array(batch["groups"]),
            cases=json.dumps([case.request() for case in cases]),
        )
        result = peer.ask(compare=str(source), to=str(target))
        with np.load(target) as found:
            return {key: found[key] for key in found.files}, result["failed"]


def compare(case: Comparison, mine: dict[str, Tensor], found: Any, failed: Any) -> tuple[str, str]:
    """Return (outcome, details) of one case. An outcome in capitals is an error."""
    if case.id in failed:
        return "PEER FAILED", failed[case.id]
    gaps = {
        key: float(np.abs(found[f"{case.id}|{key}"] - value.detach().numpy()).max())
        for key, value in mine.items()
    }
    numbers = ", ".join(f"{key} {gap:.1e}" for key, gap in gaps.items())
    differs, known = max(gaps.values()) > TOLERANCE, EXPLAINED.get(case.id)
    if differs:
        return ("differs", f"{numbers}: {known}") if known else ("UNEXPLAINED", numbers)
    return ("EXPLAINED BUT EQUAL", numbers) if known else ("equal", numbers)


def compare_all(peer: Peer, everything: list[Comparison]) -> int:
    """Print a line for each case. Return the number of errors."""
    wrong = 0
    for variant in dict.fromkeys(case.batch for case in everything):
        cases = [case for case in everything if case.batch == variant]
        batch = make_batch(variant)
        found, failed = theirs(peer, cases, batch)
        for case in cases:
            outcome, detail = compare(case, ours(case, batch), found, failed)
            wrong += outcome.isupper()
            print(f"{outcome:<12} {case.id:<45} {detail}")
    peer.close()
    return wrong


def main() -> None:
    """Compare with the given peers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer-python", help="a Python that has verl 0.9.1")
    parser.add_argument("--trl-python", help="a Python that has trl 1.16")
    options = parser.parse_args()
    if not (options.peer_python or options.trl_python):
        parser.error("give --peer-python, --trl-python, or both")
    wrong = 0
    if options.peer_python:
        cases = [*advantage_cases(), *loss_cases(), *distance_cases(), *measure_cases()]
        wrong += compare_all(Peer(options.peer_python, threads=1), cases)
    if options.trl_python:
        peer = Peer(options.trl_python, threads=1, script="trl_peer.py")
        wrong += compare_all(peer, trl_cases())
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
