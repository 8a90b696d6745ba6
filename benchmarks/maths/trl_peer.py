"""TRL's side of `compare_algorithms.py`, run by its own Python; JSON lines as `peer.py` has them.

Its losses live in a method of the trainer, which is called here on a stand-in that has nothing but
the settings that the method reads.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from computing import Tensors, compute_cases  # beside this file, which runs as a script


def stand_in(case: dict[str, Any], log_prob: torch.Tensor) -> SimpleNamespace:
    """What `GRPOTrainer._compute_loss` reads of its trainer."""
    options = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, **case["options"]}
    read = ("epsilon_low", "epsilon_high", "beta")
    return SimpleNamespace(
        **{name: options[name] for name in read},
        loss_type=case["name"],
        importance_sampling_level=options.get("level", "token"),
        max_completion_length=options.get("max_completion_length", 1),
        args=SimpleNamespace(
            delta=options.get("delta"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=options.get("tau_pos"),
            sapo_temperature_neg=options.get("tau_neg"),
        ),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (log_prob, log_prob, None),
    )


def compare_one(case: dict[str, Any], t: Tensors, groups: Any) -> Tensors:
    """One case: value and gradient."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    mask = t["mask"]
    if case["kind"] == "trl logits":
        logits = t["logits"].clone().requires_grad_()
        if case["name"] == "entropy":
            values = entropy_from_logits(logits)
        else:
            values = selective_log_softmax(logits, t["labels"])
        (grad,) = torch.autograd.grad((values * mask * t["values"]).sum(), logits)
        return {"value": values * mask, "grad": grad}
    log_prob = t["log_prob"].clone().requires_grad_()
    nothing = mask[:, :0]
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": t["baselines"],
        "old_per_token_logps": t["old_log_prob"],
        "ref_per_token_logps": t["values"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(stand_in(case, log_prob), None, inputs)
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"value": loss, "grad": grad}


def main() -> None:
    """Answer requests until standard input ends."""
    torch.set_default_dtype(torch.float64)
    for line in sys.stdin:
        request = json.loads(line)
        answer = compute_cases(request["compare"], request["to"], compare_one)
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
