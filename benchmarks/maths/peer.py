"""verl 0.9.1's side of `algorithms.py` and `compare_algorithms.py`, run by its own Python.

Reads requests from standard input, one line of JSON each, and prints one result for each:
{"time": name} → seconds, and the spread of a partition;
{"compare": input.npz, "to": output.npz} → the errors; values and gradients are in output.npz.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import inputs  # in the folder of this script, which is on the path
import torch
from computing import Tensors, compute_cases


def advantage_call(name: str) -> Callable[[], Any]:
    """Return a function that computes advantages with verl's estimator."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    data = inputs.advantage_inputs()
    rewards, values, mask = (torch.from_numpy(data[k]) for k in ("rewards", "values", "mask"))
    config = AlgoConfig(gamma=inputs.GAMMA, lam=inputs.LAM)
    estimator = core_algos.get_adv_estimator_fn(name)
    common = {"token_level_rewards": rewards, "response_mask": mask}
    if name == "gae":
        return lambda: estimator(**common, values=values, gamma=inputs.GAMMA, lam=inputs.LAM)
    if name == "reinforce_plus_plus":
        return lambda: estimator(**common, config=config)
    return lambda: estimator(**common, index=data["groups"], config=config)


def balance_call(name: str) -> Callable[[], Any]:
    """Return a function that balances by verl's Karmarkar–Karp; partitions differ in size."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    lengths, parts = inputs.balance_lengths(name)
    return lambda: get_seqlen_balanced_partitions(lengths, parts, equal_size=False)


def logits_call() -> Callable[[], Any]:
    """Return a function that runs verl's fused operator and its backward pass."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    data = {key: torch.from_numpy(value) for key, value in inputs.logit_inputs().items()}
    hidden, weight = (data[k].requires_grad_() for k in ("hidden", "weight"))
    op = FusedLinearForPPO()

    def run() -> None:
        hidden.grad = weight.grad = None
        log_prob, entropy = op(hidden[None], weight, data["labels"][None])
        loss = -(data["advantages"] * log_prob[0]).sum() - 0.01 * entropy.sum()
        (loss / len(hidden)).backward()

    return run


def timed(calls: dict[str, Callable[[], Any]], name: str) -> dict[str, float]:
    """Return the seconds of one call. The first request for `name` also runs it once before."""
    if name not in calls:
        if name in inputs.BALANCES:
            calls[name] = balance_call(name)
        else:
            calls[name] = logits_call() if name == "log_prob" else advantage_call(name)
        calls[name]()
    start = time.perf_counter()
    result = calls[name]()
    measured = {"seconds": time.perf_counter() - start}
    if name in inputs.BALANCES:
        lengths, _ = inputs.balance_lengths(name)
        totals = [sum(lengths[i] for i in part) for part in result]
        measured["spread"] = max(totals) - min(totals)
    return measured


def loss_config(options: dict[str, Any]) -> Any:
    """Return verl's actor configuration with the given settings."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    named = {k: v for k, v in options.items() if k.startswith(("clip_cov", "kl_cov", "ppo_kl"))}
    rest = {k: v for k, v in options.items() if k not in named}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**named),
        **rest,
    )


def compare(source: str, target: str) -> dict[str, Any]:
    """Compute every case of `source` with verl and write the results to `target`."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    def compute(case: dict[str, Any], tensors: Tensors, groups: Any) -> Tensors:
        return compare_one(core_algos, AlgoConfig, case, tensors, groups)

    return compute_cases(source, target, compute)


def compare_one(
    core: Any, algo_config: Any, case: dict[str, Any], t: dict[str, torch.Tensor], groups: Any
) -> dict[str, torch.Tensor]:
    """Compute one case. Return {"value": …}, and {"grad": …} if it has a gradient."""
    kind, name, options = case["kind"], case["name"], case["options"]
    mask = t["mask"]
    if kind in ("logits", "mismatch", "controller"):
        return other_case(core, case, t)
    if kind == "importance":
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

        weights, _ = compute_rollout_correction_weights(
            t["log_prob"] - t["old_log_prob"],
            mask,
            rollout_is=options["level"],
            rollout_is_threshold=case["threshold"],
        )
        return {"value": weights}
    if kind == "advantage":
        return advantage(core, algo_config, case, t, groups)
    log_prob = t["log_prob"].clone().requires_grad_()
    if kind == "loss":
        loss, _ = core.get_policy_loss_fn(case.get("peer", name))(
            old_log_prob=t["old_log_prob"],
            log_prob=log_prob,
            advantages=t["advantages"],
            response_mask=mask,
            loss_agg_mode=case["mode"],
            config=loss_config(options),
        )
    elif kind == "kl":
        loss = core.agg_loss(core.kl_penalty(log_prob, t["old_log_prob"], name), mask, case["mode"])
    elif kind == "value":
        loss, _ = core.compute_value_loss(
            log_prob, t["rewards"], t["old_log_prob"], mask, loss_agg_mode=case["mode"], **options
        )
    elif kind == "aggregation":
        loss = core.agg_loss(log_prob, mask, name, loss_scale_factor=options["loss_scale_length"])
    else:
        raise ValueError(kind)
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"value": loss, "grad": grad}


def advantage(
    core: Any, algo_config: Any, case: dict[str, Any], t: dict[str, torch.Tensor], groups: Any
) -> dict[str, torch.Tensor]:
    """Compute advantages and returns of an estimator."""
    name, options, mask = case["name"], case["options"], t["mask"]
    arguments: dict[str, Any] = {
        "token_level_rewards": t["rewards"].clone(),
        "response_mask": mask,
    }
    if name == "gae":
        arguments |= {"values": t["values"], "gamma": options["gamma"], "lam": options["lam"]}
    else:
        arguments |= {"index": groups, "config": algo_config(gamma=options.get("gamma", 1.0))}
    if name == "grpo":
        arguments["norm_adv_by_std_in_grpo"] = options.get("norm_adv_by_std", True)
    if name == "remax":
        arguments["reward_baselines"] = t["baselines"]
    value, returns = core.get_adv_estimator_fn(case.get("peer", name))(**arguments)
    return {"value": value * mask, "returns": returns * mask}


def other_case(core: Any, case: dict[str, Any], t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Compute a case of logits, of the rollout mismatch or of the adaptive KL controller."""
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils import torch_functional

    mask = t["mask"]
    if case["kind"] == "logits":
        logits = t["logits"].clone().requires_grad_()
        if case["name"] == "entropy":
            values = torch_functional.entropy_from_logits(logits)
        else:
            values = torch_functional.logprobs_from_logits_v2(logits, t["labels"])
        (grad,) = torch.autograd.grad((values * mask * t["values"]).sum(), logits)
        return {"value": values * mask, "grad": grad}
    if case["kind"] == "mismatch":
        found = compute_offpolicy_metrics(t["log_prob"], t["old_log_prob"], mask)
        gap = found["training_ppl"] - found["rollout_ppl"]
        wanted = (
            [found["kl"], found["k3_kl"], gap] if "k1" in case["name"] else [found["ppl_ratio"]]
        )
        return {"value": torch.tensor(wanted)}
    controller = core.AdaptiveKLController(0.1, 0.1, 100.0)
    betas = []
    for kl in case["options"]["kl"]:
        controller.update(kl, 24)
        betas.append(controller.value)
    return {"value": torch.tensor(betas)}


def main() -> None:
    """Process requests until standard input ends."""
    calls: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "time" in request:
            result: dict[str, Any] = timed(calls, request["time"])
        else:
            torch.set_default_dtype(torch.float64)
            result = compare(request["compare"], request["to"])
        print("result " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
