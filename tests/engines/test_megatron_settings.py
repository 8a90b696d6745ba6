"""What the Megatron engine says before it starts; needs neither Megatron-core nor processes."""

import itertools
from dataclasses import replace

import conformance
import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig
from quadriga.engines import build_engine
from quadriga.engines.megatron import families
from quadriga.engines.megatron.families import (
    FAMILIES,
    Family,
    check_engine,
    check_sizes,
    degrees_of,
    family_of,
    megatron_model,
    register_family,
)
from quadriga.errors import ConfigError, ModelError
from quadriga.parallel.layouts import Degrees, Weight, count, parallel_layout

MEGATRON = EngineConfig(name="megatron")
MODEL = ModelConfig(path="somewhere")


def weights_of(config) -> dict[str, Weight]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: Weight(name, tuple(p.shape)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", conformance.FAMILIES)
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("expert", [1, 2])
def test_ranks_have_each_element_once(family, tensor, pipeline, expert):
    config = conformance.FAMILIES[family]()
    weights = weights_of(config)
    engine = EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    model = megatron_model(config, weights, engine)
    layout = parallel_layout(model, Degrees(tensor=tensor, expert=expert, pipeline=pipeline))
    boxes = {name: set() for name in weights}
    for tensor in itertools.chain(*layout.ranks.values()):
        for piece in tensor.pieces:
            boxes[piece.weight].add(piece.box)
    for name, found in boxes.items():
        # Distinct boxes are disjoint: they come from splits into equal parts.
        assert sum(map(count, found)) == count(tuple((0, n) for n in weights[name].shape)), name


@pytest.mark.parametrize(
    "degrees, message",
    [
        ({"tensor": 3}, "engine.tensor_parallel_size=3 does not divide the 4 attention heads"),
        ({"tensor": 4}, "tensor_parallel_size=4 does not divide the 2 key-value heads"),
        ({"pipeline": 3}, "engine.pipeline_parallel_size=3 does not divide the 2 hidden layers"),
        ({"expert": 2}, "expert_parallel_size=2, but model_type 'llama' has no experts"),
        (
            {"pipeline": 2, "virtual_pipeline": 2},
            "virtual_pipeline_parallel_size=2 does not divide the 1 hidden layers of a stage",
        ),
        ({"expert": 3}, "expert_parallel_size=3 does not divide the 4 experts"),
        ({"tensor": 2}, "of a model with experts needs"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(degrees, message):
    engine = EngineConfig(**{f"{name}_parallel_size": n for name, n in degrees.items()})
    family = "mixtral" if "experts" in message and "no experts" not in message else "llama"
    with pytest.raises(ConfigError, match=message):
        check_sizes(conformance.FAMILIES[family](), engine, "engine")


@pytest.mark.parametrize(
    "model, engine, message",
    [
        (MODEL, {"dtype": "float16"}, "engine.dtype=float16 is not built"),
        (MODEL, {"sequence_parallel": True}, "engine.tensor_parallel_size is 1"),
        (MODEL, {"virtual_pipeline_parallel_size": 2}, "engine.pipeline_parallel_size is 1"),
        (MODEL, {"expert_tensor_parallel_size": 3}, "set it to 1, 1 or null"),
        (
            MODEL,
            {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "engine.expert_parallel_size is 1; set it above 1",
        ),
        (replace(MODEL, lora=LoraConfig(rank=2)), {}, "model.lora is not built"),
        (replace(MODEL, freeze=("x",)), {}, "model.freeze is not built"),
        (replace(MODEL, use_shm=True), {}, "model.use_shm is not built"),
        (replace(MODEL, trust_remote_code=True), {}, "trust_remote_code is not built"),
        (replace(MODEL, gradient_checkpointing="selective"), {}, "=selective is not built"),
        (replace(MODEL, attn_implementation="eager"), {}, "=eager is not built"),
    ],
)
def test_settings_that_the_engine_does_not_follow_are_refused(model, engine, message):
    with pytest.raises(ConfigError, match=message):
        check_engine(model, replace(MEGATRON, **engine), None)


def test_a_second_engine_of_a_process_has_the_same_ranks(monkeypatch):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    from quadriga.engines.megatron import ranks

    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
        monkeypatch.setattr(parallel_state, f"get_{name}_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    assert ranks.join_ranks(EngineConfig()).engine == EngineConfig()
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"are \(1, 1, 2, 1, 1\), but another .* has \(1, 1, 1, 1, 1\)"
    ):
        ranks.join_ranks(EngineConfig(context_parallel_size=2))


@pytest.mark.parametrize(
    "ranks, spread, message",
    [(4, 2, None), (4, 4, None), (6, 4, "expert_parallel_size = 4 does not divide the 6 ranks"),
     (3, 2, "tensor_parallel_size = 2 does not divide the 3 ranks")],
)  # fmt: skip
def test_whole_experts_divide_over_all_ranks_of_a_stage(ranks, spread, message):
    engine = EngineConfig(
        tensor_parallel_size=2,
        expert_parallel_size=spread,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
    )
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            degrees_of(engine, ranks)
        return
    config = conformance.FAMILIES["mixtral"]()
    model = megatron_model(config, weights_of(config), engine)
    degrees = degrees_of(engine, ranks)
    layout = parallel_layout(model, degrees)
    kept = [
        {piece.box[0][0] for tensor in layout.ranks[rank] for piece in tensor.pieces
         if piece.weight == "model.layers.0.mlp.experts.down_proj"}
        for rank in range(ranks)
    ]  # fmt: skip
    each = 4 // spread
    assert kept == [set(range(rank % spread * each, (rank % spread + 1) * each))
                    for rank in range(ranks)]  # fmt: skip
    assert [degrees.expert_place(rank) for rank in range(ranks)] == [
        (rank % spread, rank // spread) for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(pipeline_parallel_size=2),
        replace(MEGATRON, fsdp_size=2),
        replace(MEGATRON, sequence_parallel_size=2),
        replace(MEGATRON, offload_policy=True),
    ],
)
def test_an_engine_refuses_settings_of_the_other(tmp_path, engine):
    with pytest.raises(ConfigError, match=r"engine\.\w+=(2|true) is read by engine\.name=\w+ only"):
        build_engine(ModelConfig(path=str(tmp_path)), engine)


def test_another_version_is_named(monkeypatch):
    monkeypatch.setattr(families, "_version", lambda: "0.15.0")
    with pytest.raises(
        ConfigError, match=r"needs megatron-core 0\.16\.1, and this environment has"
    ):
        build_engine(MODEL, MEGATRON)


def test_an_architecture_without_a_map_is_named_until_a_file_adds_it(monkeypatch):
    config = GemmaConfig(hidden_act="silu")
    with pytest.raises(ModelError, match="no map for model_type 'gemma'"):
        family_of(config)
    monkeypatch.setattr("quadriga.engines.megatron.families.FAMILIES", {**FAMILIES})
    register_family("gemma", Family())
    assert family_of(config) == Family()
    with pytest.raises(ConfigError, match="in the table of the Megatron engine already"):
        register_family("gemma", Family(qk_norm=True))


@pytest.mark.parametrize(
    "family, change, problem",
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rotary positions of type 'yarn'",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers without experts"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ],
)
def test_a_config_that_the_engine_does_not_compute_is_refused(family, change, problem):
    config = conformance.FAMILIES[family]()
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=f"does not compute {problem}"):
        family_of(config)


@pytest.mark.parametrize(
    "installed", [(), ("transformer_engine", "fused_weight_gradient_mlp_cuda")]
)
def test_flags_of_a_gpu_are_on_where_their_packages_are_installed(monkeypatch, installed):
    monkeypatch.setattr(families, "find_spec", lambda package: package in installed)
    flags = families.core_flags("cuda", conformance.FAMILIES["mixtral"]())
    needy = ["gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"]
    assert [not flags[name] for name in needy] == [bool(installed)] * 3
    assert not flags["bias_activation_fusion"] and "transposed" in flags["moe_grouped_gemm"]
    on_cpu = families.core_flags("cpu", conformance.FAMILIES["llama"]())
    assert [name for name, off in on_cpu.items() if not off] == ["overlap_grad_reduce"]
