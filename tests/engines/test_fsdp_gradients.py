"""Gradients do not depend on how the mini-batch is split, packed or distributed over ranks, nor on
the fused head, nor on whether a reference has one."""

import json
import shutil
from pathlib import Path

import engine_cases as cases
import gradient_cases
import pytest
import torch
from gradient_cases import Case
from transformers import AutoConfig, AutoModelForCausalLM

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError
from quadriga.models.loading import load_value_model


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((found[name] - gradient).abs().max() / scale) < 2e-6, name


@pytest.fixture(scope="module")
def expected(folders):
    return {tied: gradient_cases.naive(folders, tied=tied) for tied in (True, False)}


def check(case, found, expected) -> dict[str, float]:
    (gradients, metrics), (naive, kl) = found, expected[case.tied]
    assert_close(gradients, naive)
    assert metrics["kl"] == pytest.approx(kl, rel=1e-6)
    assert metrics["rows"] == len(cases.LENGTHS)
    return metrics


@pytest.mark.parametrize("case", gradient_cases.ONE_RANK, ids=str)
def test_gradients_on_one_rank(case, folders, expected):
    engines = gradient_cases.engines(case, folders)
    metrics = check(case, gradient_cases.gradients(case, *engines, cases.make_batch()), expected)
    assert metrics["micro_batches"] == {1: 7, 2: 4, 3: 3, None: 1}[case.micro]


@pytest.mark.parametrize("case", gradient_cases.TWO_RANKS, ids=str)
def test_gradients_on_two_ranks(case, two_ranks, expected):
    check(case, two_ranks["gradients"][case], expected)


@pytest.mark.parametrize("unit", [1, 10**9], ids=["layer units", "one unit"])
def test_gradients_reduced_after_each_micro_batch(folders, expected, unit):
    case = Case(True, False, micro=3, unit=unit, early=True)
    engine, reference = gradient_cases.engines(case, folders)
    kept = []
    accumulate = engine._accumulate

    def look_between_micro_batches(*args):
        for metrics in accumulate(*args):
            kept.append(unsharded_tensors(engine))
            yield metrics

    engine._accumulate = look_between_micro_batches
    check(case, gradient_cases.gradients(case, engine, reference, cases.make_batch()), expected)
    assert kept == [0, 0, 0]
    engine.reduces_each_micro_batch = False
    kept.clear()
    check(case, gradient_cases.gradients(case, engine, reference, cases.make_batch()), expected)
    assert min(kept[:2]) > 0 == kept[2]


def unsharded_tensors(engine) -> int:
    """Count gathered parameters and whole gradients that the FSDP units hold."""
    parameters = [
        parameter
        for unit in engine._units
        for parameter in unit._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]
    gathered = [t for p in parameters for t in p.all_gather_outputs if t.untyped_storage().nbytes()]
    return len(gathered) + sum(p.unsharded_accumulated_grad is not None for p in parameters)


def test_gradients_are_reduced_early_by_default_only_if_they_are_large(model_folder, monkeypatch):
    from quadriga.engines import sharding

    engine = cases.trainable(model_folder)
    parameters = sum(p.numel() for p in engine.module.parameters())
    assert not engine.reduces_each_micro_batch
    monkeypatch.setattr(sharding, "MAX_UNSHARDED_BYTES", parameters * 8 - 1)
    assert cases.trainable(model_folder).reduces_each_micro_batch
    monkeypatch.setattr(sharding, "MAX_UNSHARDED_BYTES", parameters * 8)
    assert not cases.trainable(model_folder).reduces_each_micro_batch


def naive_values(folder: str):
    """Compute gradients one row at a time, without padding or sharding.

    A token's value is at the position before it.
    """
    model = load_value_model(folder, dtype=torch.float64)
    torch.nn.init.ones_(model.score.weight)
    batch = cases.make_batch()
    weight = batch["weight"] * batch["response_mask"]
    for row, (prompt, response) in enumerate(cases.LENGTHS):
        ids = batch["input_ids"][row, cases.P - prompt : cases.P + response]
        values = model(ids[None]).logits[0, prompt - 1 : -1, 0].double()
        (values * weight[row, :response]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_of_the_value_head(model_folder, packed):
    engine = gradient_cases.engine(model_folder, Case(packed, False), head="value")
    with torch.no_grad():
        dict(engine.module.named_parameters())["score.weight"].to_local().fill_(1.0)

    def loss(outputs, micro):
        return (outputs["values"] * micro["weight"] * micro["response_mask"]).sum(), {}

    found, _ = cases.gradients(engine, cases.make_batch(), loss, 2)
    assert_close(found, naive_values(model_folder))


@pytest.mark.parametrize("damage", ["loss", "hybrid loss", "shard"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(two_ranks, damage):
    skipped, changed = two_ranks["skipped"][damage]
    assert (skipped, changed) == (2, 0)


def test_fused_head_never_returns_all_logits(folders, monkeypatch):
    """The output layer returns targets × vocabulary logits, the fused head three columns."""
    monkeypatch.setattr("quadriga.models.log_probs.CPU_TILE", 64)
    monkeypatch.setattr("quadriga.models.log_probs._CPU_CHUNK", 64)
    largest = {}
    for fused in (True, False):
        case = Case(packed=True, fused=fused, ref_fused=fused)
        policy, reference = gradient_cases.engines(case, folders, dtype="float32")
        vocabulary = policy.module.config.vocab_size
        targets = int(cases.make_batch()["response_mask"].sum())
        sizes: list[int] = []
        layer = policy.module.get_output_embeddings()
        layer.register_forward_hook(lambda m, i, out, sizes=sizes: sizes.append(out.numel()))
        policy.train_step(
            cases.make_batch(), gradient_cases.loss, entropy=True, reference=reference
        )
        largest[fused] = max(sizes)
    assert largest == {True: 3 * targets, False: targets * vocabulary}


@pytest.fixture
def scaled(tmp_path, model_folder):
    """A small Granite model, which divides its logits after the output layer."""
    config = AutoConfig.for_model(
        "granite", vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, logits_scaling=4.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in Path(model_folder).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    return str(tmp_path)


def test_model_that_scales_its_logits_cannot_use_the_fused_head(scaled, monkeypatch):
    with pytest.raises(ConfigError, match=r"fused_head=true: Granite\w+ changes its logits after"):
        FSDPEngine(ModelConfig(path=scaled), EngineConfig(fused_head=True), OptimConfig())
    monkeypatch.setattr("quadriga.engines.token_model.MIN_FUSED_LOGITS", 1)
    engine = FSDPEngine(ModelConfig(path=scaled), EngineConfig(), OptimConfig())
    assert not engine._token_model.fused
    batch = cases.make_batch()
    found = engine.forward(batch)["log_probs"][0, 0]
    model, (prompt, response) = AutoModelForCausalLM.from_pretrained(scaled), cases.LENGTHS[0]
    ids = batch["input_ids"][0, cases.P - prompt : cases.P + response]
    log_p = model(ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, log_p[prompt - 1, ids[prompt]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "fused"), [(16384, False), (2**30, True)], ids=["few logits", "many logits"]
)
def test_fused_head_is_used_by_default_for_many_logits(model_folder, tokens, fused):
    settings = EngineConfig(max_tokens_per_micro_batch=tokens)
    engine = FSDPEngine(ModelConfig(path=model_folder), settings, OptimConfig())
    vocabulary = json.loads((Path(model_folder) / "config.json").read_text())["vocab_size"]
    assert (tokens * vocabulary >= 2**26) is fused
    assert engine._token_model.fused is fused
