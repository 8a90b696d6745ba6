"""What every peer does with a file of cases: compute each, keep what failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def compute_cases(
    source: str, target: str, compute: Callable[[dict[str, Any], Tensors, Any], Tensors]
) -> dict[str, Any]:
    """Run `compute(case, tensors, groups)` for every case of `source`; write values and gradients
    to `target`. The answer names what failed, and how."""
    data = np.load(source, allow_pickle=False)
    tensors = {k: torch.from_numpy(data[k]) for k in data.files if k not in ("cases", "groups")}
    groups = data["groups"].astype(object)
    results: dict[str, np.ndarray] = {}
    failed: dict[str, str] = {}
    for case in json.loads(str(data["cases"])):
        try:
            outcome = compute(case, tensors, groups)
        except Exception as error:  # whatever the peer raises is a result of the comparison
            failed[case["id"]] = f"{type(error).__name__}: {error}"
            continue
        for key, value in outcome.items():
            results[f"{case['id']}|{key}"] = value.detach().numpy()
    np.savez(target, **results)
    return {"failed": failed}
