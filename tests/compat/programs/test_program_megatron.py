"""The MEGATRON dispatch modes on ranks whose groups Megatron-core has made."""

import pytest
import torch
from verl import DataProto
from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import build_engine

EMBEDDING, NORM, HEAD = (
    "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
)  # fmt: skip


def batch_of():
    ids = torch.randint(5, 60, (8, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[3, :2] = mask[5, 7:] = 0
    return {
        "input_ids": ids * mask, "attention_mask": mask, "response_mask": mask[:, 5:].clone(),
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (1, 2)])
def test_the_megatron_modes_follow_the_groups_of_megatron(start, model_folder, tensor, data):
    pytest.importorskip("megatron.core")
    from megatron_workers import OldActor

    group = start(OldActor, model_folder, tensor, 2, ranks=4)
    sizes = DistGlobalInfo(tp_size=tensor, dp_size=data, pp_size=2, cp_size=1)
    places = [(rank % tensor, rank // tensor % data, rank // 2) for rank in range(4)]
    assert group.init_model() == [
        (DistRankInfo(tp_rank=tp, dp_rank=dp, pp_rank=pp, cp_rank=0), sizes)
        for tp, dp, pp in places
    ]
    rows = batch_of()
    found = group.compute_log_prob(DataProto.from_dict(rows))
    engine = build_engine(ModelConfig(path=model_folder), EngineConfig())
    expected = engine.forward(rows)["log_probs"]
    torch.testing.assert_close(found.batch["log_probs"], expected, rtol=0, atol=1e-5)
    last = [2] if tensor == 2 else [2, 3]  # tensor-parallel rank 0 of the last stage
    assert found.batch["rank"].tolist() == [rank for rank in last for _ in range(8 // data)]
    assert group.scaled(list("ab")[:data]) == list(zip(last, "ab", strict=False))
    # Stages count as further data-parallel ranks: those of one replica have adjacent parts.
    order = [0, 2] if tensor == 2 else [0, 2, 1, 3]
    own = group.own_rows(DataProto.from_dict({"row": torch.arange(8)})).batch
    assert own["row"].tolist() == list(range(8))
    assert own["rank"].tolist() == [rank for rank in order for _ in range(8 // len(order))]
    assert group.own_item(list("abcd")[: len(order)]) == list(zip(order, "abcd", strict=False))
    assert group.layers_of_stage() == [(0, [EMBEDDING]), (2, [NORM, HEAD])]
