"""Small functions on masks and models, under verl's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quadriga.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Module


class RatioError(InputError, AssertionError):
    """The ratios of a random mask do not fit into a row. verl asserts the same."""


class UnsupportedScaleError(InputError, NotImplementedError):
    """A number of parameters has no such unit. verl raises NotImplementedError."""


_SCALES = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Return an attention mask [B, T] int64: left padding, tokens, right padding in each row.

    The numbers are drawn uniformly with torch's generator: 0 to `max_ratio_of_left_padding · T` of
    left padding, and at least 1 token between the two ratios of valid tokens. Raises `RatioError`
    for ratios that do not fit into a row.
    """
    rows, length = input_ids.shape
    most = int(length * max_ratio_of_valid_token)
    least = max(1, int(length * min_ratio_of_valid_token))
    padding = int(length * max_ratio_of_left_padding)
    if not 1 <= least <= most or padding < 0 or most + padding > length:
        raise RatioError(
            f"create_random_mask: {least} to {most} tokens and up to {padding} tokens of left "
            f"padding do not fit into rows of {length}. Use ratios from 0 to 1 with a sum of 1 at "
            "most."
        )
    start_B = torch.randint(0, padding + 1, (rows, 1), device=input_ids.device)
    count_B = torch.randint(least, most + 1, (rows, 1), device=input_ids.device)
    position_T = torch.arange(length, device=input_ids.device)
    return ((position_T >= start_B) & (position_T < start_B + count_B)).long()


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return the position of each token among the tokens of its row, 0 for left padding.

    `mask`: [B, T]. A position to the right of the last token keeps the position of that token.
    """
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def get_model_size(model: Module, scale: str = "auto") -> tuple[float, str]:
    """Return (number of parameters, unit): (0.6, "B"). `scale`: "B", "M", "K", "" or "auto".

    Raises `UnsupportedScaleError` for another scale.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    if scale == "auto":
        scale = next((name for name, size in _SCALES.items() if total > size), "")
    if scale not in _SCALES:
        raise UnsupportedScaleError(
            f"get_model_size: scale must be 'auto' or one of {list(_SCALES)}, got {scale!r}"
        )
    return total / _SCALES[scale], scale


def print_model_size(model: Module, name: str | None = None) -> None:
    """Print the number of parameters of a model."""
    size, unit = get_model_size(model)
    print(f"{name or type(model).__name__} has {size:.2f}{unit} parameters")
