"""Compute a file of cases with a peer. Used by the scripts of all peers."""

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
    """Run `compute(case, tensors, groups)` for every case of `source`.

    Write values and gradients to `target`. Return `{"failed": {case: error}}`.
    """
    data = np.load(source, allow_pickle=False)
    tensors = {k: torch.from_numpy(data[k]) for k in data.files if k not in ("cases", "groups")}
    groups = data["groups"].astype(object)
    results: dict[str, np.ndarray] = {}
    failed: dict[str, str] = {}
    for case in json.loads(str(data["cases"])):
        try:
            outcome = compute(case, tensors, groups)
        except Exception as error:  # an error of the peer is a result too
            failed[case["id"]] = f"{type(error).__name__}: {error}"
            continue
        for key, value in outcome.items():
            results[f"{case['id']}|{key}"] = value.detach().numpy()
    np.savez(target, **results)
    return {"failed": failed}
