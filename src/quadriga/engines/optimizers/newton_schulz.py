"""Orthogonalisation of matrices by Newton-Schulz iteration, as Muon uses it.

Shapes: A rows, B columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial in K. Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024). Its slope at 0 is as large as possible, so small singular values grow fast."""
STEPS = 5
EPSILON = 1e-7


def newton_schulz(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """Return each matrix [..., A, B] with its singular values moved to about 1.

    For G = U S Vᵀ the result is U p(p(… p(S / ‖G‖))) Vᵀ with p(s) = a s + b s³ + c s⁵. After five
    steps the singular values are between 0.7 and 1.2, except those that were almost 0. The dtype
    does not change; bfloat16 is precise enough (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    # The products are with the smaller of the two Gram matrices.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # ‖·‖ is the Frobenius norm: it is at least the largest singular value.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div(norm.clamp(min=EPSILON))
    for _ in range(steps):
        gram = x @ x.mT
        x = x.mul(a) + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
