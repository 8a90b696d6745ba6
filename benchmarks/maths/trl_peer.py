"""TRL's side of `compare_algorithms.py`, run by its own Python. Requests are those of `peer.py`.

TRL's losses are in a method of its trainer. This script calls the method on an object that has only
the settings that the method reads.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from computing import Tensors, compute_cases  # in the folder of this script, which is on the path


def fake_trainer(case: dict[str, Any], log_prob: torch.Tensor) -> SimpleNamespace:
    """Return an object with the attributes that `GRPOTrainer._compute_loss` reads."""
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
    """Compute value and gradient of one case."""
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
    empty = mask[:, :0]
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": t["baselines"],
        "old_per_token_logps": t["old_log_prob"],
        "ref_per_token_logps": t["values"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(fake_trainer(case, log_prob), None, inputs)
    (grad,) = torch.autograd.grad(loss, log_prob)
    return {"value": loss, "grad": grad}


def main() -> None:
    """Process requests until standard input ends."""
    torch.set_default_dtype(torch.float64)
    for line in sys.stdin:
        request = json.loads(line)
        result = compute_cases(request["compare"], request["to"], compare_one)
        print("result " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
