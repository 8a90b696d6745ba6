"""Weights in buckets: what is sent is what arrives, and every mistake is named."""

from __future__ import annotations

import pytest
import torch

from quadriga.errors import WorkerError
from quadriga.rollout.base import tensor_digest
from quadriga.weight_sync import WeightReceiver, weight_buckets


class Source:
    def __init__(self, weights):
        self.weights = weights

    def state_stream(self):
        yield from self.weights.items()


class Target:
    def __init__(self, weights):
        self.weights = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.version = -1

    def update_weights(self, stream, version):
        for name, weight in stream:
            self.weights[name].copy_(weight)
        self.version = version

    def weights_digest(self):
        return {name: tensor_digest(weight) for name, weight in self.weights.items()}

    def weight_dtypes(self):
        return {name: weight.dtype for name, weight in self.weights.items()}


def weights():
    torch.manual_seed(0)
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "odd": torch.randn(7, dtype=torch.float64),
        "half": torch.randn(3, 5, dtype=torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(6, 4).t(),
        "large": torch.randn(100, 10),
    }


def buckets(sent, target, limit, keep=True):
    source = Source(sent)
    return list(weight_buckets(source, target.weight_dtypes(), 7, limit=limit, keep=keep))


@pytest.mark.parametrize("limit", [1, 64, 200, 4096, 1 << 20])
def test_every_weight_arrives_bit_for_bit(limit):
    sent = weights()
    target = Target(sent)
    receiver = WeightReceiver(target)
    for bucket in buckets(sent, target, limit):
        receiver.receive(bucket)
    assert receiver.finish() == target.version == 7
    for name, weight in sent.items():
        assert torch.equal(weight, target.weights[name]), name


@pytest.mark.parametrize("limit", [64, 200, 4096])
def test_a_bucket_is_larger_than_the_limit_only_for_one_weight(limit):
    found = buckets(weights(), Target(weights()), limit)
    for bucket in found:
        nonempty = [row for row in bucket.meta_info["weights"] if 0 not in row[2]]
        assert bucket.batch["weight_bytes"].numel() <= limit or len(nonempty) == 1
    assert len(found) > 1


def test_ranks_that_do_not_send_yield_as_many_items():
    target = Target(weights())
    silent = buckets(weights(), target, 64, keep=False)
    assert silent == [None] * len(buckets(weights(), target, 64))


def test_weights_are_rounded_to_the_dtype_of_the_rollout():
    sent = {"w": torch.tensor([0.1])}
    target = Target({"w": torch.zeros(1, dtype=torch.bfloat16)})
    receiver = WeightReceiver(target)
    [bucket] = buckets(sent, target, 64)
    receiver.receive(bucket)
    receiver.finish()
    assert target.weights["w"].item() == torch.tensor(0.1, dtype=torch.bfloat16).item()


def test_a_weight_that_is_left_out_or_sent_twice_is_named():
    sent = weights()
    target = Target(sent)
    first, *rest = buckets(sent, target, 200)
    receiver = WeightReceiver(target)
    for bucket in rest:
        receiver.receive(bucket)
    with pytest.raises(WorkerError, match="'scalar' was never sent"):
        receiver.finish()
    receiver.receive(first)
    with pytest.raises(WorkerError, match="'scalar' was sent twice"):
        receiver.receive(first)


def test_a_bucket_that_arrives_changed_is_named():
    sent = {"a": torch.randn(8), "b": torch.randn(8)}
    target = Target(sent)
    receiver = WeightReceiver(target)
    [bucket] = buckets(sent, target, 4096)
    bucket.batch["weight_bytes"][0, 40] ^= 1
    receiver.receive(bucket)
    with pytest.raises(WorkerError, match="'b' differs"):
        receiver.finish()


def test_a_sync_after_a_failed_one_begins_anew():
    sent = {"a": torch.randn(8), "b": torch.randn(8)}
    target = Target(sent)
    receiver = WeightReceiver(target)
    receiver.receive(next(weight_buckets(Source(sent), {}, 1, limit=32, keep=True)))
    for bucket in weight_buckets(Source(sent), {}, 2, limit=32, keep=True):
        receiver.receive(bucket)
    assert receiver.finish() == 2


def test_the_buckets_of_a_version_do_not_complete_another():
    sent = {"a": torch.randn(8), "b": torch.randn(8)}
    target = Target(sent)
    receiver = WeightReceiver(target)
    receiver.receive(next(weight_buckets(Source(sent), {}, 1, limit=32, keep=True)))
    second = list(weight_buckets(Source(sent), {}, 2, limit=32, keep=True))[1]
    receiver.receive(second)
    with pytest.raises(WorkerError, match="version 2: 'a' was never sent"):
        receiver.finish()
    with pytest.raises(WorkerError, match="no bucket of weights was received"):
        receiver.finish()
