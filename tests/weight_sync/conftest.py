"""What the tests of this folder share."""

import torch

torch.set_num_threads(1)
