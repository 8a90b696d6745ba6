"""What the tests of this folder share."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
