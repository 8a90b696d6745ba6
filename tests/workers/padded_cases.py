"""Updates of batches that do not divide, on one or several ranks, for `test_padded_updates.py`."""

from unittest.mock import patch

import torch
from parity_cases import norm_in_float64
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quadriga.config import schema
from quadriga.config.commands import RMConfig
from quadriga.protocol import DataProto, fields
from quadriga.single_controller.padding import add_padding
from quadriga.workers import CriticWorker, PairTrainingWorker, RankRuntime, SFTWorker

P, R = 4, 5
UPDATES = ("update_actor", "update_critic", "update_sft", "update_rm")
# Method and rows; on three ranks, 10 rows are left over in the first part, 2 in the second.
CASES = [*((method, 10) for method in UPDATES), ("update_actor", 2)]
_ENGINE = schema.EngineConfig(dtype="float64", reduce_dtype="float64")
_RUNTIME = RankRuntime(device="cpu", max_response_length=R, threads=1)


def batch(rows: int) -> DataProto:
    """Rows of different lengths. The first one, which becomes padding, has the largest gradient."""
    random = torch.Generator().manual_seed(rows)
    prompt = torch.arange(P) >= P - torch.randint(1, P + 1, (rows, 1), generator=random)
    mask = (torch.arange(R) < torch.randint(1, R + 1, (rows, 1), generator=random)).long()
    attention = torch.cat([prompt.long(), mask], 1)
    noise = torch.rand(rows, R, generator=random, dtype=torch.float64) - 0.5
    noise[0] = 3.0
    return DataProto.from_dict(
        {
            fields.INPUT_IDS: torch.randint(5, 200, (rows, P + R), generator=random) * attention,
            fields.ATTENTION_MASK: attention,
            fields.RESPONSE_MASK: mask,
            fields.OLD_LOG_PROBS: (noise - 4) * mask,
            fields.ADVANTAGES: noise * mask,
            fields.VALUES: 0.1 * noise * mask,
            fields.RETURNS: noise * mask,
            "margins": 0.1 * noise[:, 0],
        },
        auto_padding=True,
    )


def part_of(data: DataProto, rank: int, ranks: int) -> DataProto:
    """Return what a rank receives."""
    padded = data if ranks == 1 else add_padding({}, "argument 0", data, ranks)
    return padded.chunk(ranks)[rank]


def worker_of(method: str, folder: str, rows: int):
    model, optim = schema.ModelConfig(path=folder), schema.OptimConfig(lr=1e-2)
    if method == "update_critic":
        # One mini-batch of all rows, which do not divide among three ranks.
        config = schema.CriticConfig(
            model=model, engine=_ENGINE, optim=optim, ppo_mini_batch_size=rows, ppo_epochs=2
        )
        return CriticWorker(config, 1, _RUNTIME)
    if method == "update_rm":
        return PairTrainingWorker(RMConfig(model=model, engine=_ENGINE, optim=optim), _RUNTIME)
    actor = schema.ActorConfig(engine=_ENGINE, optim=optim, ppo_mini_batch_size=rows, ppo_epochs=2)
    config = schema.ActorRolloutRefConfig(
        model=model, actor=actor, rollout=schema.RolloutConfig(n=1)
    )
    return SFTWorker(config, "actor", _RUNTIME)


@patch.object(LlamaRMSNorm, "forward", norm_in_float64)
def result_of(method: str, rows: int, folder: str, rank: int = 0, ranks: int = 1):
    """Make one update. Return the metrics of the rank, its partials, and all parameters."""
    worker = worker_of(method, folder, rows)
    worker.init_model()
    part = part_of(batch(rows), rank, ranks)
    report = getattr(worker, method)(part)
    partials = [*report.non_tensor_batch[fields.PARTIALS][0]] if len(report) else []
    engine = worker._engine("actor") if isinstance(worker, SFTWorker) else worker._engine()
    weights = {name: tensor.clone() for name, tensor in engine.state_stream()}
    return report.meta_info["metrics"], partials, weights


def rank_main(rank: int, ranks: int, folder: str, files: str) -> None:
    """Make every update as one rank of a process group, and write the results to a file."""
    found = {case: result_of(*case, folder, rank, ranks) for case in CASES}
    torch.save(found, files.format(rank=rank))
