"""Updates of one model in every division over ranks, for the tests of tp, sp and cp.

Models compute norms and the softmax of routers in float32 whatever the dtype, so a different order
of a sum in float64 can change them by 6e-8. `wide` lets them compute these in float64.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import conformance
import engine_cases as cases
import torch
import transformers

from quadriga.config.schema import ActorConfig, EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.protocol import DataProto
from quadriga.workers.reward_model import update_pairs
from quadriga.workers.updates import update_policy

weights = cases.weights
Degrees = tuple[int, int, int]
"""(tensor, sequence, context)."""

Rows = Literal["packed", "shared", "routed"]
TOLERANCES = {"float64": 1e-10, "float32": 1e-6}
FAMILIES = conformance.FAMILIES | {
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **conformance.SIZES, head_dim=8, sliding_window=4, tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention"],
    )
}  # fmt: skip
MODELS = ("llama", "qwen2 tied", "qwen3", "gemma3", "qwen3_moe", "mixtral")


def write_models(root: Path) -> dict[str, str]:
    """Write all models below `root`; return the folder of each."""
    conformance.write_models(root, {name: FAMILIES[name] for name in MODELS})
    return {name: str(root / name) for name in MODELS}


class _Wide:
    """Stands for the module torch in the file of a model, with float64 in place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@contextmanager
def wide() -> Iterator[None]:
    """Let models compute in float64 what they compute in float32 otherwise."""
    for name in MODELS:
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(FAMILIES[name]())]  # imports its file
    changed = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and getattr(module, "torch", None) is torch
    ]
    narrow, experts = torch.Tensor.float, transformers.integrations.moe

    def widened(x: torch.Tensor) -> torch.Tensor:
        of_model = sys._getframe(1).f_globals["__name__"].startswith("transformers.models.")
        return x if of_model and x.dtype == torch.float64 else narrow(x)

    with ExitStack() as stack:
        for module in changed:
            stack.enter_context(mock.patch.object(module, "torch", _Wide()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", widened))
        # The kernel of experts computes no float64; transformers has a loop in its place.
        stack.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", lambda *_: False))
        yield


@dataclass(frozen=True)
class Case:
    """One update: of which model, how its rows are made, what is trained, and how it is cut."""

    model: str = "llama"
    rows: Rows = "shared"
    lora: bool = False
    aggregation: str = "token-mean"
    dtype: str = "float64"
    micro: int | None = 3
    checkpointing: bool | str = False


def make_batch(rows: Rows) -> dict[str, torch.Tensor]:
    """Make eight rows; but with "packed", two prompts belong to two rows each. "routed": with given
    experts, for a model with 2 layers of experts and 2 experts for each token."""
    batch = cases.make_batch(shared=rows != "packed")
    if rows == "routed":
        batch["routed_experts"] = batch["input_ids"][..., None, None] % 3 + torch.eye(2).to(int)
    last = {name: field[-1:].clone() for name, field in batch.items()}
    last["input_ids"][0, cases.P :] += 1
    return {name: torch.cat([field, last[name]]) for name, field in batch.items()}


def own_rows(batch, part: int, parts: int):
    size = len(batch["input_ids"]) // parts
    return {name: field[part * size : (part + 1) * size] for name, field in batch.items()}


def build(folder: str, case: Case, degrees: Degrees = (1, 1, 1), **settings) -> FSDPEngine:
    torch.manual_seed(11)
    tensor, sequence, context = degrees
    head = settings.pop("head", "lm")
    trained = settings.pop("trained", True)
    # A large eps: without it, Adam would turn the rounding of a gradient that is 0 into a step.
    optim = OptimConfig(lr=0.01, eps=1e-3, grad_clip=0.05) if trained else None
    return FSDPEngine(
        ModelConfig(
            path=folder,
            lora=LoraConfig(rank=3, alpha=8.0) if case.lora else LoraConfig(),
            gradient_checkpointing=case.checkpointing,
        ),
        EngineConfig(
            dtype=case.dtype, reduce_dtype=case.dtype, tensor_parallel_size=tensor,
            sequence_parallel_size=sequence, context_parallel_size=context,
            fsdp_size=settings.pop("fsdp_size", -1), fused_head=settings.pop("fused_head", None),
        ),
        optim,
        head=head,
        total_steps=8,
        **settings,
    )  # fmt: skip


def update(engine: FSDPEngine, case: Case, part: int = 0, parts: int = 1) -> dict[str, float]:
    """Make the steps of an update of this rank's part of the rows. Return its metrics."""
    rows = own_rows(make_batch(case.rows), part, parts)
    mask, dtype = rows["response_mask"], getattr(torch, case.dtype)
    tensors = {
        **rows,
        "advantages": rows["weight"].to(dtype),
        "old_log_probs": -5.0 * mask.to(dtype),
    }
    config = ActorConfig(
        ppo_micro_batch_size_per_gpu=case.micro, loss_agg_mode=case.aggregation, entropy_coeff=0.01
    )
    report = update_policy(
        engine, DataProto.from_dict(tensors=tensors), config, responses_per_prompt=1,
        temperature=0.7, length_scale=6, data_ranks=parts, seed=0,
    )  # fmt: skip
    return report.meta_info["metrics"]


def update_scores(engine: FSDPEngine, case: Case, part: int = 0, parts: int = 1):
    """Make one step on four pairs of neighbouring rows, and return its metrics."""
    rows = own_rows(pair_rows(), part, parts)
    rows["margins"] = torch.full([len(rows["input_ids"])], 0.25)
    data = DataProto.from_dict(tensors=rows)
    report = update_pairs(engine, data, case.micro, forward_rows=case.micro)
    return report.meta_info["metrics"]


def pair_rows() -> dict[str, torch.Tensor]:
    """Return rows whose score is that of the last token."""
    batch = make_batch("shared")
    mask = batch["response_mask"]
    later = mask.flip(1).cumsum(1).flip(1)  # tokens of the response from here on
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "response_mask": mask * (later == 1),
    }


def largest_difference(found, expected) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def result_of(folder: str, case: Case, degrees: Degrees, part: int, parts: int, **settings):
    """Return the weights and the metrics after an update, and the log-probabilities before it."""
    with wide():
        engine = build(folder, case, degrees, **settings)
        rows = own_rows(make_batch(case.rows), part, parts)
        before = engine.forward(rows, temperature=0.7, entropy=True, micro_batch_size=case.micro)
        metrics = update(engine, case, part, parts)
        return weights(engine), metrics, before


def rank_main(rank: int, ranks: int, folders, wanted, results: str) -> None:
    """Make the updates of `wanted`: (case, degrees, settings), in `ranks` processes."""
    found = {}
    for case, degrees, settings in wanted:
        size = math.prod(degrees)
        found[case, degrees, settings] = result_of(
            folders[case.model], case, degrees, rank // size, ranks // size, **dict(settings)
        )
    if (Path(results).parent / STATES).is_dir():
        found[STATES] = states(rank, ranks, folders, Path(results).parent / STATES)
    if rank == 0:
        torch.save(found, results)


STATES = "states"
"""A folder beside the results: the ranks then also compute `states`, and save checkpoints in it."""


def states(rank: int, ranks: int, folders, work: Path) -> dict[str, object]:
    """Return what is left of an engine beside its update: heads, checkpoints, streams, an export.

    `work`: holds the checkpoint `one_rank`, of `Case("qwen2 tied", lora=True)`.
    """
    found: dict[str, object] = {}
    degrees, part, parts = (2, 2, 1), rank // 4, ranks // 4
    with wide():
        case = Case("llama")
        rows = own_rows(make_batch(case.rows), part, parts)
        scorer = build(folders["llama"], case, degrees, head="score")
        found["pairs"] = [update_scores(scorer, case, part, parts) for _ in range(2)]
        found["scorer"] = weights(scorer)
        found["scores"] = scorer.forward(own_rows(pair_rows(), part, parts))["values"]
        case = Case("qwen2 tied", lora=True)
        engine = build(folders["qwen2 tied"], case, degrees)
        engine.load(work / "one_rank")
        found["loaded"] = weights(engine)
        update(engine, case, part, parts)
        found["after"] = weights(engine)
        found["base"] = engine.without_adapters().forward(rows)["log_probs"]
    return found
