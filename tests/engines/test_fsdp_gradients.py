"""Gradients do not depend on how the mini-batch is split, packed or distributed over ranks."""

from __future__ import annotations

import engine_cases as cases
import pytest
import torch

from quadriga.models.loading import load_causal_lm, load_value_model


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((found[name] - gradient).abs().max() / scale) < 2e-6, name


def naive(folder: str, head: str):
    """Compute gradients one row and one token at a time, without padding or sharding.

    A token's output is at the position before it.
    """
    load = load_causal_lm if head == "lm" else load_value_model
    model = load(folder, dtype=torch.float64)
    if head == "value":
        torch.nn.init.ones_(model.score.weight)
    batch = cases.make_batch()
    tokens = batch["response_mask"].sum()
    for row, (prompt, response) in enumerate(cases.LENGTHS):
        ids = batch["input_ids"][row, cases.P - prompt : cases.P + response]
        logits = model(ids[None]).logits[0].double()
        for t in range(response):
            before = prompt + t - 1
            output = logits[before, 0]
            if head == "lm":
                output = logits[before].log_softmax(-1)[ids[prompt + t]]
            share = output * batch["weight"][row, t] * batch["response_mask"][row, t] / tokens
            share.backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def expected(model_folder):
    return naive(model_folder, "lm")


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def engine(request, model_folder):
    return cases.make_engine(model_folder, packed=request.param)


@pytest.mark.parametrize("micro", [1, 2, 3, None])
def test_gradients_on_one_rank(engine, expected, micro):
    found, metrics = cases.gradients(engine, cases.make_batch(), micro)
    assert_close(found, expected)
    assert metrics["rows"] == len(cases.LENGTHS)
    assert metrics["micro_batches"] == {1: 7, 2: 4, 3: 3, None: 1}[micro]


@pytest.mark.parametrize("unit", [1, 10**9], ids=["layer units", "one unit"])
def test_gradients_reduced_after_each_micro_batch(model_folder, expected, unit):
    engine = cases.make_engine(model_folder, min_unit_parameters=unit)
    engine.reduces_each_micro_batch = True
    kept = []
    accumulate = engine._accumulate

    def look_between_micro_batches(*args):
        for metrics in accumulate(*args):
            kept.append(unsharded_tensors(engine))
            yield metrics

    engine._accumulate = look_between_micro_batches
    assert_close(cases.gradients(engine, cases.make_batch(), 3)[0], expected)
    assert kept == [0, 0, 0]
    engine.reduces_each_micro_batch = False
    kept.clear()
    assert_close(cases.gradients(engine, cases.make_batch(), 3)[0], expected)
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
    from quadriga.engines.sharding import unsharded_bytes

    engine = cases.trainable(model_folder)
    parameters = sum(p.numel() for p in engine.module.parameters())
    size = unsharded_bytes(engine.module, torch.bfloat16, torch.float32)
    assert size == parameters * (2 + 4)
    assert not engine.reduces_each_micro_batch
    monkeypatch.setattr(sharding, "MAX_UNSHARDED_BYTES", parameters * 8 - 1)
    assert cases.trainable(model_folder).reduces_each_micro_batch
    monkeypatch.setattr(sharding, "MAX_UNSHARDED_BYTES", parameters * 8)
    assert not cases.trainable(model_folder).reduces_each_micro_batch


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("packed", [True, False])
def test_gradients_of_the_value_head(model_folder, packed):
    engine = cases.make_engine(model_folder, packed=packed, head="value")
    with torch.no_grad():
        dict(engine.module.named_parameters())["score.weight"].to_local().fill_(1.0)
    assert_close(cases.gradients(engine, cases.make_batch(), 2)[0], naive(model_folder, "value"))


@pytest.mark.parametrize("case", [*cases.CASES, "hybrid", "early", "hybrid early"], ids=str)
def test_gradients_on_two_ranks(two_ranks, expected, case):
    found, metrics = two_ranks["gradients"][case]
    assert_close(found, expected)
    assert metrics["rows"] == len(cases.LENGTHS)


@pytest.mark.parametrize("damage", ["loss", "hybrid loss", "shard"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(two_ranks, damage):
    skipped, changed = two_ranks["skipped"][damage]
    assert (skipped, changed) == (2, 0)
