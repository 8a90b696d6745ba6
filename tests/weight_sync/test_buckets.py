"""Weights in buckets: what is sent is what arrives, and every mistake is named."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from fakes import Source, Target

from quadriga.config.schema import ModelConfig
from quadriga.errors import RolloutError, WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.remote import JoinedReceiver, JoinedSender, WeightReceiver, WeightSender
from quadriga.weight_sync.transport import needs_of


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


REQUEST = (
    torch.tensor([[1, 2]]),
    torch.ones(1, 2, dtype=torch.int64),
    SamplingParams(max_new_tokens=2, eos_token_ids=(0,), pad_token_id=0),
    torch.tensor([3]),
)


def rounds(sent, target, limit, version=7):
    source = sent if isinstance(sent, Source) else Source(sent)
    sender = WeightSender(source, limit)
    return [[bucket] for bucket in sender.send(needs_of(target), version)]


def delivered(found, target):
    """The version of a target that has received some rounds."""
    receiver = WeightReceiver(target)
    for parts in found:
        receiver.receive(parts)
    return receiver.finish()


BEHIND_BYTES = {"flag": torch.tensor([True]), "one element": torch.randn(12)[::6][:1]}


@pytest.mark.parametrize("limit", [32, 64, 200, 4096, 1 << 20])
@pytest.mark.parametrize("sent", [weights(), BEHIND_BYTES])
def test_every_weight_arrives_bit_for_bit(sent, limit):
    guard = GuardedRollout(target := Target(sent))
    assert delivered(rounds(sent, target, limit), guard) == target.version == 7
    assert guard.moved == {"store": sum(weight.nbytes for weight in sent.values())}
    for name, weight in sent.items():
        assert torch.equal(weight, target.weights[name]), name


def test_a_joined_group_brings_every_weight_once():
    guard = GuardedRollout(target := Target(weights()))
    sender = JoinedSender(Source(weights()), bucket_bytes=200, device="cpu")
    ticket = sender.offer([needs_of(guard)], 3)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, ticket)
        assert JoinedReceiver(guard, device="cpu").receive(ticket) == target.version == 3
        sending.result()
    assert guard.moved == {"group": sum(weight.nbytes for weight in weights().values())}


def test_staged_weights_are_copied_to_an_engine_that_does_not_share_them():
    sent = weights()
    guarded = GuardedRollout(target := Target(sent))
    receiver = WeightReceiver(guarded)
    for parts in rounds(sent, target, 64):
        receiver.receive(parts, stage=True)
        assert not any(weight.any() for weight in target.weights.values())
    assert receiver.finish() == target.version == 7
    assert all(torch.equal(weight, target.weights[name]) for name, weight in sent.items())


def test_a_tied_name_is_written_with_its_weight():
    sent = {"embed": torch.randn(4)}
    target = Target({"embed": torch.zeros(4), "head": torch.zeros(4)})
    found = rounds(Source(sent, {"embed": "head"}), target, 1024)
    assert [part.batch["weight_bytes"].numel() for [part] in found] == [16, 0], "sent once"
    delivered(found, target)
    assert torch.equal(target.weights["head"], sent["embed"])


def test_a_bucket_that_is_lost_or_sent_twice_is_named():
    sent = weights()
    target = Target(sent)
    first, second, *rest = rounds(sent, target, 200)
    receiver = WeightReceiver(target)
    receiver.receive(first)
    with pytest.raises(WorkerError, match=r"received bucket 0 .*: it was sent twice"):
        receiver.receive(first)
    with pytest.raises(WorkerError, match=r"expected bucket 1 .*received bucket 2 .*: one is lost"):
        receiver.receive(rest[0])
    receiver.receive(second)
    with pytest.raises(WorkerError, match="ended before all buckets were received"):
        receiver.finish()


def test_boxes_that_were_sent_twice_in_one_bucket_are_named():
    sent = {"a": torch.randn(8)}
    target = Target(sent)
    [data], _ = rounds(sent, target, 4096)
    header = data.meta_info["header"]
    data.meta_info["header"] = replace(header, transfers=header.transfers * 2)
    data.batch["weight_bytes"] = data.batch["weight_bytes"].repeat(1, 2)
    receiver = WeightReceiver(target)
    with pytest.raises(WorkerError, match=r"box .* of weight 'a' was sent twice"):
        receiver.receive([data])


def test_a_bucket_that_arrives_changed_is_named():
    sent = {"a": torch.randn(8), "b": torch.randn(8)}
    target = Target(sent)
    data, last = rounds(sent, target, 4096)
    data[0].batch["weight_bytes"][0, 40] ^= 1
    with pytest.raises(WorkerError, match="'b' differs"):
        delivered([data, last], target)


def test_nothing_of_a_failed_sync_counts_for_the_next():
    sent = weights()
    target = Target(sent)
    receiver = WeightReceiver(target)
    receiver.receive(rounds(sent, target, 200, version=1)[0])
    for parts in rounds(sent, target, 200, version=2):
        receiver.receive(parts)
    assert receiver.finish() == 2
    with pytest.raises(WorkerError, match="no bucket of weights was received"):
        receiver.finish()
    receiver.receive(rounds(sent, target, 200, version=3)[0])
    with pytest.raises(WorkerError, match="of version 4: one is lost"):
        receiver.receive(rounds(sent, target, 200, version=4)[1])


@pytest.mark.parametrize("fault", ["a bucket does not arrive", "a weight is not taken over"])
def test_a_rollout_generates_nothing_after_a_sync_that_failed(model_folder, fault):
    engine = build_rollout("hf", ModelConfig(path=model_folder))
    guarded = GuardedRollout(engine)
    guarded.generate(*REQUEST)
    sent = {name: weight + 0.1 for name, weight in engine.module.state_dict().items()}
    receiver = WeightReceiver(guarded)
    first, *others = rounds(sent, guarded, 1 << 14)
    receiver.receive(first)
    if fault == "a bucket does not arrive":
        with pytest.raises(WorkerError, match="one is lost"):
            receiver.receive(others[1])
    else:
        for parts in others:
            receiver.receive(parts)
        engine.module.state_dict()["model.norm.weight"].zero_()
        with pytest.raises(WorkerError, match=r"'model\.norm\.weight' differs"):
            receiver.finish()
    with pytest.raises(RolloutError, match="the weight sync to version 7 has not ended with equal"):
        guarded.generate(*REQUEST)
    delivered(rounds(sent, guarded, 1 << 14, version=8), guarded)
    assert guarded.generate(*REQUEST).weight_versions.tolist() == [8]


def test_staged_weights_leave_the_engine_alone_until_they_are_used(model_folder, monkeypatch):
    guarded = GuardedRollout(build_rollout("hf", ModelConfig(path=model_folder)))
    before = guarded.generate(*REQUEST)
    receiver = WeightReceiver(guarded)
    for version in (7, 8):
        held = dict(guarded.weights())
        sent = {name: weight * 1.5 for name, weight in held.items()}
        for parts in rounds(sent, guarded, 1 << 14, version):
            receiver.receive(parts, stage=True)
            between = guarded.generate(*REQUEST)
            assert between.weight_versions.equal(before.weight_versions)
            assert between.rollout_log_probs.equal(before.rollout_log_probs)
        with monkeypatch.context() as patch:
            patch.setattr("quadriga.rollout.guard.tensor_digest", None)  # all are known by now
            assert receiver.finish() == version
        for name, weight in guarded.weights():
            assert weight.equal(sent[name]) and weight.data_ptr() != held[name].data_ptr()
        before = guarded.generate(*REQUEST)
        assert before.weight_versions.tolist() == [version]
    first, *others = rounds(sent, guarded, 1 << 14, version=9)
    first[0].batch["weight_bytes"][0, 40] ^= 1
    for parts in (first, *others):
        receiver.receive(parts, stage=True)
    assert guarded.generate(*REQUEST).rollout_log_probs.equal(before.rollout_log_probs)
    with pytest.raises(WorkerError, match="differs between trainer and rollout"):
        receiver.finish()
