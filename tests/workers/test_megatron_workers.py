"""The workers compute with Megatron-core on two ranks what they compute with FSDP on one."""

import megatron_cases
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quadriga.config.schema import EngineConfig
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.single_controller import RankLayout, Worker
from quadriga.workers.runtime import register_engine_ranks
from rank_groups import fork_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("roles")
    shape = TinyModel(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48
    )
    write_tiny_model(root / "policy", ["one two three"], shape)
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(root / "policy", num_labels=1)
    judge.save_pretrained(root / "judge")
    AutoTokenizer.from_pretrained(root / "policy").save_pretrained(root / "judge")
    return root


@pytest.mark.parametrize(
    ("divides", "parts", "collected"),
    [
        ("tensor", [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),
        ("context", [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),
        ("both", [0] * 8, [4]),
    ],
)
def test_the_ranks_that_compute_the_same_rows_receive_them(monkeypatch, divides, parts, collected):
    tensor, context = (2 if divides in (name, "both") else 1 for name in ("tensor", "context"))
    engine = EngineConfig(
        name="megatron", tensor_parallel_size=tensor, context_parallel_size=context,
        pipeline_parallel_size=2,
    )  # fmt: skip
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        worker = Worker()
        register_engine_ranks(worker, "actor", engine)
        found.append((*worker._query_mesh("actor"), worker._query_rank_layout()))
    assert [part for part, *_ in found] == parts
    assert [rank for rank, (_, collects, _) in enumerate(found) if collects] == collected
    sizes = (tensor, context, 4 // tensor // context, 2)
    assert [at for *_, at in found] == [RankLayout.of_rank(r, *sizes) for r in range(8)]


@pytest.fixture(scope="module")
def steps(folders, tmp_path_factory):
    """What the steps have found: with FSDP on one rank, and with Megatron-core on two."""
    pytest.importorskip("megatron.core")
    policy, judge = folders / "policy", folders / "judge"
    file = str(tmp_path_factory.mktemp("steps") / "found.pt")
    fork_ranks(
        megatron_cases.rank_main, 2, str(policy), str(judge), file, limit=300.0,
        modules=["quadriga.engines.megatron.engine"],
    )  # fmt: skip
    found = torch.load(file, weights_only=False)  # layouts are dataclasses; this test wrote them
    return megatron_cases.Roles(megatron_cases.settings(policy, judge)).step(), found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", megatron_cases.SIZES)
def test_a_step_through_all_workers_gives_the_numbers_of_fsdp(steps, name):
    expected, by_layout = steps
    found = by_layout[name]
    of_rank = {
        "tensor_parallel_size": lambda rank: RankLayout.of_rank(rank, tp=2),
        "pipeline_parallel_size": lambda rank: RankLayout.of_rank(rank, pp=2),
        "context_parallel_size": lambda rank: RankLayout.of_rank(rank, cp=2),
    }[name]
    assert found.pop("layouts") == [of_rank(0), of_rank(1)]
    assert found.keys() == expected.keys()
    assert torch.equal(found["responses"], expected["responses"])
    for key in found:
        if "/" in key and isinstance(found[key], torch.Tensor):
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-5, msg=key)
    for role in ("actor", "critic"):
        assert found[f"{role}/partials"] > 0  # from the last stage, which computes the loss
        for key, value in expected[f"{role}/metrics"].items():
            if not key.endswith("micro_batches"):
                assert found[f"{role}/metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-6)
        assert expected[f"{role}/metrics"][f"{role}/grad_norm"] > 1e-3
    assert found["version"] == expected["version"] == 2
    for key, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], tensor, rtol=0, atol=1e-5, msg=key)
        assert torch.equal(found["held"][key], found["weights"][key])  # the rollout of rank 0
    assert torch.equal(found["after"], expected["after"])
