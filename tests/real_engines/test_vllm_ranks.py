"""One copy of the weights on two ranks: vLLM with tensor parallelism in the ranks' processes."""

import os

import pytest
import torch
import torch.multiprocessing as multiprocessing
from agreement import needs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from quadriga.config.schema import ModelConfig
from quadriga.errors import WorkerError
from quadriga.parallel.distributed import init_distributed
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.guard import GuardedRollout
from quadriga.single_controller.environment import ReservedPort
from quadriga.weight_sync.sync import WeightSync

pytestmark = [needs("vllm"), pytest.mark.timeout(900), pytest.mark.nightly]

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 197,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Two ranks share the only key-value head of the second model.
MODELS = {
    "llama, two key-value heads": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=2)
    ),
    "qwen2, tied, one key-value head": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
    ),
}
SAMPLING = SamplingParams(max_new_tokens=16, eos_token_ids=(2,), pad_token_id=0)
GREEDY = SamplingParams(max_new_tokens=16, eos_token_ids=(2,), pad_token_id=0, temperature=0.0)
EMBEDDING = "model.embed_tokens.weight"
STALE = "model.layers.1.self_attn.v_proj.weight"


def run(tmp_path, monkeypatch, model, ranks, main):
    """Return what each rank found."""
    torch.manual_seed(0)
    MODELS[model]().save_pretrained(tmp_path / "model")
    port = ReservedPort.choose()
    variables = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    multiprocessing.spawn(main, (str(tmp_path / "model"), str(tmp_path)), nprocs=ranks)
    port.release()
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.parametrize("model", MODELS)
def test_ranks_receive_their_parts_of_the_weights_only(tmp_path, monkeypatch, model):
    """Four ranks of FSDP and two copies, of the ranks 0 and 2 and of the ranks 1 and 3."""
    found = run(tmp_path, monkeypatch, model, 4, _synced_rank)
    for rank, own in enumerate(found):
        assert own["greedy"] == own["expected"] == found[0]["greedy"], rank
        assert own["difference"] < 1e-4
        # Half of what FSDP divides, and norms; less what the rank has itself.
        assert own["received"] < 0.55 * own["whole"], (rank, own["received"], own["whole"])
        assert own["parts"] == own["made"]
        assert own["stale"] == [STALE]
        assert own["padding"] == 0
        assert own["compiled for"] == [[0, 2], [1, 3]]
        assert own["first row"] == (0 if rank < 2 else 128)  # of a vocabulary padded to 256


class Source:
    """FSDP without computation."""

    def __init__(self, weights, mesh, *, tied):
        self.weights, self.mesh, self.tied = weights, mesh, tied

    def shard_stream(self, part="merged"):
        for name, weight in self.weights.items():
            shard = distribute_tensor(weight.clone(), self.mesh, [Shard(0)])
            yield name, shard
            if self.tied and name == EMBEDDING:
                yield "lm_head.weight", shard


def _synced_rank(rank: int, folder: str, output: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    init_distributed("cpu")
    model = ModelConfig(path=folder)
    hf = build_rollout("hf", model, dtype="float32")
    engine = build_rollout(
        "vllm", model, dtype="float32", kv_cache_mb=64, tensor_parallel_size=2,
        copies=[(0, 2), (1, 3)],
    )  # fmt: skip
    tied = hf.module.config.tie_word_embeddings
    torch.manual_seed(1)
    new = {n: w + 0.1 * torch.randn(w.shape) for n, w in hf.module.state_dict().items()}
    new.pop("lm_head.weight" if tied else "", None)
    mesh = init_device_mesh("cpu", (4,))

    source = Source(new, mesh, tied=tied)
    vllm = GuardedRollout(engine)
    made: dict[str, tuple[int, ...]] = {}
    write = engine._weights.write_box

    def noted(name, tensor):
        made[name] = tuple(tensor.shape)
        write(name, tensor)

    engine._weights.write_box = noted
    place = engine._weights._places[EMBEDDING]
    place.local().fill_(9.0)  # the padding too
    report = WeightSync(source, vllm).run(1)
    hf.update_weights([*new.items()] + [("lm_head.weight", new[EMBEDDING])] * tied, 1)
    ids, mask, seeds = torch.arange(3, 43).view(4, 10), torch.ones(4, 10).long(), torch.arange(4)
    found = [one.generate(ids, mask, GREEDY, seeds) for one in (vllm, hf)]
    scores = [one.score(ids, mask) for one in (vllm, hf)]
    boxes = vllm.weight_boxes()
    first, stop = boxes[EMBEDDING][0]
    engine._weights.write_box = lambda name, w: write(name, w + (name == STALE))
    wrong: list[str] = []
    try:
        WeightSync(source, vllm).run(2)
    except WorkerError as error:
        wrong = list(error.tensors)
    result = {
        "greedy": found[0].response_ids.tolist(),
        "expected": found[1].response_ids.tolist(),
        "difference": float((scores[0] - scores[1]).abs().max()),
        "received": report.received,
        "whole": sum(w.numel() * 4 for w in new.values()),
        "parts": {n: tuple(stop - start for start, stop in box) for n, box in boxes.items()},
        "made": made,
        "first row": first,
        "padding": float(place.local()[stop - first :].abs().sum()),
        "compiled for": engine._engine.vllm_config.additional_config["copies"],
        "stale": wrong,
    }
    vllm.close()
    torch.save(result, f"{output}/{rank}.pt")
    torch.distributed.destroy_process_group()
