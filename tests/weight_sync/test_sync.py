"""Weight sync: all weights arrive, a missing or wrong weight is named; weight digests."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from quadriga.checkpoint.shards import Block
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import WorkerError
from quadriga.models.weights import FilePart
from quadriga.rollout import build_rollout
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine, tensor_digest
from quadriga.rollout.guard import compare_digests
from quadriga.weight_sync.sync import WeightSync
from quadriga.weight_sync.transport import named_as_files
from training_step import train_once


@pytest.fixture
def rollout(model_folder):
    return build_rollout("hf", ModelConfig(path=model_folder))


@pytest.fixture(scope="module")
def engine(model_folder):
    """An engine after one step, so that every weight differs from the folder's."""
    engine = build_engine(ModelConfig(path=model_folder), EngineConfig(), OptimConfig(lr=0.01))
    train_once(engine)
    return engine


class Faulty:
    """An engine whose stream of weights is changed by a function."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def shard_stream(self, part="merged"):
        yield from self.change(self.engine.shard_stream(part))


def test_all_weights_arrive(engine, rollout):
    moved = WeightSync(engine, rollout).run(7)
    held = rollout.module.state_dict()
    assert moved == {"local": sum(w.nbytes for w in {id(w): w for w in held.values()}.values())}
    sent = dict(engine.state_stream())
    assert sent.keys() == held.keys()
    assert "lm_head.weight" in sent, "a tied weight is sent under each of its names"
    assert all(torch.equal(sent[name], held[name]) for name in held)
    assert rollout.version == 7


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_what_a_rank_has_of_experts_is_cut_into_the_tensors_of_the_files(dim):
    """Two experts with gates and ups of 2 rows, on three ranks that divide one dimension."""
    both = torch.arange(2 * 4 * 3).view(2, 4, 3)
    spans = {f"{expert}.{kind}": (expert, rows) for expert in (0, 1) for kind, rows in ROWS.items()}
    parts = [
        FilePart(name, ((expert, expert + 1), rows, (0, 3)), (1, 2))
        for name, (expert, rows) in spans.items()
    ]
    found = {name: torch.full((2, 3), -1) for name in spans}
    step = -(-both.shape[dim] // 3)  # the last of 3 ranks has less, or nothing
    for rank in range(3):
        start = min(rank * step, both.shape[dim])
        held = both.narrow(dim, start, min(step, both.shape[dim] - start))
        offset = tuple(start if other == dim else 0 for other in range(3))
        stream = iter([("both", Block(held, (2, 4, 3), offset, True)), ("norm", torch.ones(3))])
        cut = dict(named_as_files((item for item in stream), {"both": parts}, rank))
        assert list(cut) == [*spans, "norm"]
        for name in spans:
            block = cut[name]
            assert block.shape == (2, 3) and block.data.untyped_storage().data_ptr() in (
                both.untyped_storage().data_ptr(), torch.empty(0).data_ptr()
            )  # fmt: skip
            at = zip(block.offset, block.data.shape, strict=True)
            place = found[name][tuple(slice(first, first + size) for first, size in at)]
            assert place.eq(-1).all(), "sent twice"
            place.copy_(block.data)
    for name, (expert, rows) in spans.items():
        assert found[name].equal(both[expert, slice(*rows)]), name


ROWS = {"gate": (0, 2), "up": (2, 4)}


class NamedAsFiles(RolloutEngine):
    """Holds what it was sent."""

    name = "named as files"
    generate = score = None

    def __init__(self, weights):
        self.held = weights
        self.abilities = RolloutAbilities(9, 9, file_names=True)

    def update_weights(self, stream, version):
        for name, tensor in stream:
            self.held[name] = tensor.clone()
        self._version = version

    def weights(self):
        return self.held.items()


def test_experts_are_sent_under_the_names_of_the_files(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 64}
    config = MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=1, num_local_experts=3)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    assert before["model.layers.0.block_sparse_moe.experts.2.w3.weight"].shape == (8, 16)
    engine = build_engine(ModelConfig(path=str(tmp_path)), EngineConfig(), OptimConfig(lr=0.01))
    target = NamedAsFiles({name: torch.zeros_like(tensor) for name, tensor in before.items()})
    sync = WeightSync(engine, target)
    sync.run(1)
    assert target.held.keys() == before.keys()
    assert all(target.held[name].equal(tensor) for name, tensor in before.items())
    train_once(engine)
    sync.run(2)
    assert not target.held["model.layers.0.block_sparse_moe.experts.2.w3.weight"].equal(
        before["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    )
    engine.save_hf(tmp_path / "trained")
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(target.held[name].equal(tensor) for name, tensor in after.items())


class Wrapped(RolloutEngine):
    """The engine hf, which exposes its weights or not.

    `lost` changes what arrives at its process, of which it has receipts. `fault` changes what its
    model gets of that; the caller cannot see it.
    """

    name = "wrapped"
    generate = score = None

    def __init__(self, folder, dtype="float32", *, exposes=False):
        self.engine = build_rollout("hf", ModelConfig(path=folder), dtype=dtype)
        self.abilities = replace(self.engine.abilities, exposes_weights=exposes)
        self.score, self.weight_dtypes = self.engine.score, self.engine.weight_dtypes
        self.weights_digest = self.engine.weights_digest
        self.lost = self.fault = lambda weights: weights
        self.digests = {}

    @property
    def version(self):
        return self.engine.version

    def update_weights(self, stream, version):
        dtypes, weights = self.weight_dtypes(), self.lost(dict(stream))
        self.digests |= {n: tensor_digest(w.to(dtypes.get(n))) for n, w in weights.items()}
        self.engine.update_weights(self.fault(weights).items(), version)

    def received_digests(self):
        return self.digests


LAYER = "model.layers.1."


def without(name):
    return lambda weights: {n: w for n, w in weights.items() if n != name}


def exchanged(weights):
    """The rows of k and v in each other's place, as in a fused projection of wrong order."""
    k, v = (f"{LAYER}self_attn.{part}_proj.weight" for part in "kv")
    other = {k: v, v: k}
    return {other.get(name, name): w for name, w in weights.items()}


def test_a_weight_that_was_not_sent_again_is_reported(engine, model_folder):
    """A rollout that keeps one weight of an earlier version."""
    stale = Wrapped(model_folder, exposes=True)
    stale.lost = without(f"{LAYER}mlp.down_proj.weight")
    with pytest.raises(WorkerError, match=r"1 of 21 weights are wrong: .*down_proj.* differs"):
        WeightSync(engine, stale).run(1)


def test_an_engine_of_16_bits_without_a_fault_passes(engine, model_folder):
    hidden = Wrapped(model_folder, "bfloat16")
    sync = WeightSync(engine, hidden)
    for version in (1, 2, 3):
        sync.run(version)
        held = hidden.engine.module.state_dict()
        sent = dict(engine.state_stream())
        assert all(torch.equal(sent[n].to(torch.bfloat16), w) for n, w in held.items())
        train_once(engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_fused_projection_in_a_wrong_order_are_found_in_the_first_sync(
    engine, model_folder, dtype
):
    hidden = Wrapped(model_folder, dtype)
    hidden.fault = exchanged
    message = "the log-probabilities of 248 probe tokens differ by"
    with pytest.raises(WorkerError, match=message) as caught:
        WeightSync(engine, hidden).run(1)
    assert caught.value.difference > 1e-3


def test_receipts_name_a_stale_weight_at_once(engine, model_folder):
    hidden = Wrapped(model_folder, "bfloat16")
    sync = WeightSync(engine, hidden)
    sync.run(1)
    name = f"{LAYER}self_attn.k_proj.weight"
    hidden.lost = without(name)
    with torch.no_grad():  # a change far below the rounding of the scores
        for weight in engine.module.parameters():
            weight.mul_(1.01)
    with pytest.raises(WorkerError, match=f"1 of 21 weights are wrong: '{name}' differs"):
        sync.run(2)


def test_a_sync_that_breaks_off_ends_the_stream_of_the_engine(engine, rollout, monkeypatch):
    """The engine may have loaded its weights for the stream, and frees them when it ends."""
    ended = []

    def noted(stream):
        try:
            yield from stream
        finally:
            ended.append(True)

    def refuse(weights, version):
        next(iter(weights))
        raise WorkerError("the rollout engine refuses the weights")

    sync = WeightSync(Faulty(engine, noted), rollout)
    sync.run(1)
    monkeypatch.setattr(rollout, "update_weights", refuse)
    ended.clear()
    with pytest.raises(WorkerError, match="refuses the weights") as caught:
        sync.run(2)
    assert ended == [True] and caught.value is not None, "while the error is still held"


def test_a_later_sync_with_other_weights_is_reported(engine, rollout):
    faulty = Faulty(engine, lambda stream: stream)
    sync = WeightSync(faulty, rollout)
    sync.run(1)
    name = "model.norm.weight"
    faulty.change = lambda stream: (item for item in stream for _ in range(2))
    with pytest.raises(WorkerError, match="twice"):
        sync.run(2)
    faulty.change = lambda stream: (item for item in stream if item[0] != name)
    with pytest.raises(WorkerError, match=r"did not yield weight 'model\.norm\.weight'"):
        sync.run(3)
    faulty.change = lambda stream: (("new" if n == name else n, t) for n, t in stream)
    with pytest.raises(WorkerError, match="yielded weight 'new', which it did not have before"):
        sync.run(4)


def test_all_wrong_weights_are_listed_up_to_a_bound():
    sent = {f"w{i}": i for i in range(50)}
    with pytest.raises(WorkerError, match=r"50 of 50 .* 'w19' differs .*; and 30 more") as caught:
        compare_digests(sent, dict.fromkeys(sent, -1), 3)
    assert len(caught.value.tensors) == 50 and caught.value.version == 3


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_weight_is_reported(engine, rollout, left_out):
    faulty = Faulty(engine, lambda stream: (item for item in stream if item[0] != left_out))
    with pytest.raises(WorkerError, match=f"{left_out}.*never sent") as caught:
        WeightSync(faulty, rollout).run(1)
    assert (caught.value.tensor, caught.value.version) == (left_out, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digests_of_different_tensors_differ(dtype):
    base = torch.arange(1, 13).view(3, 4).to(dtype)
    same = base.t().contiguous().t()
    changed, swapped = base.clone(), base.clone()
    changed[2, 1] += 1
    swapped[0, 0], swapped[0, 1] = base[0, 1], base[0, 0]
    assert tensor_digest(base) == tensor_digest(same)
    digests = [tensor_digest(t) for t in (base, changed, swapped, base.flatten()[:-1])]
    assert len(set(digests)) == 4
