"""Parameters, buffers, optimizer state and everything computed are on the device of the engine."""

import json
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

import conformance
import pytest
import torch

import pretended_device
from pretended_device import TYPE, PretendedDevice
from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.architectures import ARCHITECTURES
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.weight_sync.sync import WeightSync
from rank_groups import fork_ranks

sys.path.append(str(Path(__file__).parents[1] / "architectures"))
import naive_loop
import small_models

NIGHTLY = (pytest.mark.nightly, pytest.mark.timeout(900))
FAMILIES = [family for family in conformance.FAMILIES if "deep" not in family]
FSDP = [
    *(("fsdp", family, "lm", "generates") for family in ("llama", "mistral", "mixtral")),
    *(("fsdp", "qwen3", "lm", kind) for kind in ("adapters", "recomputed")),
    *(("fsdp", "llama", head, "") for head in ("value", "score")),
    *(("fsdp", name, "lm", "") for name in ("deepseek_v3", "gpt_oss", "mamba2", "qwen3_next")),
]
ON_MEGATRON = [
    *(("megatron", family, "lm", "recomputed") for family in FAMILIES),
    *(("megatron", "llama", head, "") for head in ("value", "score")),
]


def write(root: Path, family: str) -> dict[str, torch.Tensor]:
    """Write a small model of the conformance tables, or of a `model_type`; return a batch."""
    if family in conformance.FAMILIES:
        conformance.write_models(root, {family: conformance.FAMILIES[family]})
        return conformance.batch_of()
    small_models.small_model(family).save_pretrained(root / family)
    batch = naive_loop.make_batch(small_models.VOCABULARY)
    return batch | {"weight": torch.ones(batch["response_mask"].shape)}


def elsewhere(case, root: Path, device: PretendedDevice) -> list[str]:
    """Train an engine, generate with its weights; return the tensors that are on the CPU."""
    name, family, head, kind = case
    batch, lora = write(root, family), LoraConfig(rank=3) if kind == "adapters" else LoraConfig()
    model = ModelConfig(str(root / family), lora=lora, gradient_checkpointing=kind == "recomputed")
    engine_class, float32, optim = FSDPEngine, EngineConfig(dtype="float32"), conformance.OPTIM
    if name == "megatron":
        from quadriga.engines.megatron.engine import MegatronEngine as engine_class
    with device.operations, device:
        engine = engine_class(model, float32, optim, head=head, total_steps=8, device=TYPE)
        engine.forward(batch, entropy=head == "lm")
        conformance.step(engine, batch, head)
        found = dict(engine.optimizer.tensors())
        if name == "megatron":
            buffers = engine.pipeline.gradient_buffers()
            found |= engine._parameters | {f"gradients {n}": x for n, x in enumerate(buffers)}
        else:
            found |= dict(engine.module.named_parameters()) | dict(engine.module.named_buffers())
        if kind == "generates":
            rollout = build_rollout("hf", model, device=TYPE, dtype="float32")
            WeightSync(engine, rollout, bucket_bytes=4096).run(1)
            prompt = slice(0, -batch["response_mask"].shape[1])
            ids, mask = (batch[name][:, prompt] for name in ("input_ids", "attention_mask"))
            rollout.generate(ids, mask, SamplingParams(4, (), 0), torch.arange(len(ids)))
            found |= {f"rollout {name}": tensor for name, tensor in rollout.weights()}
        return [name for name, tensor in found.items() if not device.has(tensor)]


def rank_main(_: int, __: int, root: str, cases) -> None:
    """Write what is wrong with each case."""
    pretended_device.install()
    if find_spec("megatron"):
        import megatron_on_cpu

        megatron_on_cpu.install(pretended_device.DEVICE)
    found = {}
    for case in cases:
        try:
            found[" ".join(case)] = elsewhere(case, Path(root), PretendedDevice())
        except Exception:
            found[" ".join(case)] = traceback.format_exc()
    Path(root, "found.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "cases",
    [
        FSDP + (ON_MEGATRON if find_spec("megatron") else []),
        pytest.param([("fsdp", name, "lm", "") for name in ARCHITECTURES], marks=NIGHTLY),
    ],
    ids=["each kind", "every architecture"],
)
def test_all_of_an_engine_is_on_its_device(cases, tmp_path):
    fork_ranks(rank_main, 1, str(tmp_path), cases, limit=500)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == len(cases)
    assert {name: problem for name, problem in found.items() if problem} == {}
