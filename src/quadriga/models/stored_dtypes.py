"""The dtypes of the weights in a model folder, in which a trained model is exported.

A model is trained in float32 although its folder may hold bfloat16. An export in the dtypes of the
folder has the size of the original, and loads wherever the original loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.models.folder import local_folder

# Dtypes of weights that can be trained, by their names in safetensors files. Quantized weights have
# other dtypes; their layers are exported in the folder's most frequent dtype.
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes of the weights of a folder.

    Attributes:
        by_name: checkpoint name -> dtype.
        default: the dtype of most elements, for weights of other names (a new value head, or a
            weight that transformers renames when it loads). None: the folder has no floats.
    """

    by_name: dict[str, torch.dtype]
    default: torch.dtype | None

    def cast(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each floating-point weight in its stored dtype, and other tensors unchanged."""
        for name, tensor in weights:
            dtype = self.by_name.get(name, self.default)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield name, tensor

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a copy of `config` that names the default dtype."""
        config = deepcopy(config)
        if self.default is not None:
            config.dtype = self.default
        return config


def stored_dtypes(path: str | Path) -> StoredDtypes:
    """Read the dtypes of the weights in a model folder. Reads headers only."""
    by_name: dict[str, torch.dtype] = {}
    elements: Counter[torch.dtype] = Counter()
    for file in sorted(local_folder(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                header = tensors.get_slice(name)
                dtype = _FLOATS.get(header.get_dtype())
                if dtype is not None:
                    by_name[name] = dtype
                    elements[dtype] += torch.Size(header.get_shape()).numel()
    most = elements.most_common(1)
    return StoredDtypes(by_name, most[0][0] if most else None)
