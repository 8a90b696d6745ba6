"""A training engine and a rollout engine without computation."""

from types import SimpleNamespace

import torch

from quadriga.rollout.base import RolloutEngine, tensor_digest


class Source:
    """Has weights: whole ones, or shards on a mesh. `change` changes what is yielded of them."""

    def __init__(self, weights, tied=None, change=lambda stream: stream):
        self.weights, self.tied, self.change = weights, tied or {}, change

    def shard_stream(self, part="merged"):
        yield from self.change(self._stream())

    def _stream(self):
        for name, weight in self.weights.items():
            yield name, weight
            if name in self.tied:
                yield self.tied[name], weight


class Target(RolloutEngine):
    """Holds zeros in the shapes of `weights`."""

    name = "fake"
    version, generate, score = -1, None, None
    abilities = SimpleNamespace(exposes_weights=True, file_names=False)

    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def update_weights(self, stream, version):
        for name, weight in stream:
            self.weights[name].copy_(weight)
        self.version = version

    def weights_digest(self):
        return {name: tensor_digest(weight) for name, weight in self.weights.items()}

    def weight_dtypes(self):
        return {name: weight.dtype for name, weight in self.weights.items()}
