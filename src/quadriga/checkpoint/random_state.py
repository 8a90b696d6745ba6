"""Random states as plain tensors and JSON, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_tensors() -> dict[str, Tensor]:
    """States of torch's generators (uint8): the CPU's and the current accelerator's."""
    states = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def random_scalars() -> dict[str, Any]:
    """States of Python's and numpy's global generators, as JSON values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = np.random.get_state(legacy=False)
    numbers = {"key": state["state"]["key"].tolist(), "pos": int(state["state"]["pos"])}
    return {
        "python": [version, list(words), gauss],
        "numpy": {**state, "state": numbers},
    }


def restore_random(tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
    """Set the generators to what the two functions above gave."""
    torch.set_rng_state(tensors["random.torch"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    version, words, gauss = scalars["python"]
    random.setstate((version, tuple(words), gauss))
    state = scalars["numpy"]
    key = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})
