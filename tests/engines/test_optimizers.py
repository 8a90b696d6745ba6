"""Each optimizer: the same numbers on any number of ranks, its state, clipping, skipped steps.

The tests of several ranks run in `make nightly`.
"""

from dataclasses import replace

import engine_cases
import optimizer_cases as cases
import pytest
import torch
from engine_cases import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import NonFiniteError
from rank_groups import fork_ranks

weights = engine_cases.weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2, which computes in the dtype of its parameters. Its rows do not divide by 2 or 3."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"vocab_size": 201, "n_positions": 33, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, n_inner=67, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=[2, 3])
def several(request, folder, tmp_path_factory):
    results = tmp_path_factory.mktemp("ranks")
    fork_ranks(cases.rank_main, request.param, folder, str(results), limit=120)
    found = torch.load(results / f"{request.param}.pt", weights_only=True)
    return found, results, request.param


def state(engine):
    return {name: tensor.clone() for name, tensor in engine.optimizer.tensors().items()}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_parameters_of_several_ranks_equal_those_of_one(dtype, folder, several):
    found, _, _ = several
    norms, expected = found[dtype]
    engine = cases.build(folder, dtype)
    assert cases.steps(engine, engine_cases.make_batch()) == pytest.approx(norms, rel=1e-4)
    assert_close(weights(engine), expected, atol=cases.TOLERANCE[dtype])
    if "hybrid" in found and dtype == "float64":
        assert_close(found["hybrid"][1], expected, atol=1e-10)


@pytest.mark.nightly
def test_state_of_several_ranks_continues_on_one(folder, several):
    found, results, ranks = several
    engine = cases.build(folder, "float64")
    engine.load(results / f"{ranks}")
    cases.steps(engine, engine_cases.make_batch(), 1)
    assert_close(weights(engine), found["float64"][1], atol=1e-10)


def test_steps_below_the_digits_of_bfloat16_add_up(folder):
    """Computed in bfloat16; parameters and moments are float32."""
    engine = FSDPEngine(
        ModelConfig(path=folder),
        EngineConfig(dtype="bfloat16"),
        OptimConfig(lr=1e-6, weight_decay=0.0),
        min_unit_parameters=1,
    )
    rows, before = engine_cases.make_batch(), weights(engine)
    found = []
    for _ in range(4):
        cases.steps(engine, rows, 1)
        found.append(weights(engine))
    tensors = [*engine.module.parameters(), *engine.optimizer.existing_moments()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}

    def moved(after) -> torch.Tensor:
        return torch.cat([(after[name] - before[name]).abs().flatten() for name in before])

    # AdamW moves most weights by about the learning rate in each step.
    trained = moved(found[0]) > 0.5e-6
    assert float(trained.float().mean()) > 0.5
    for steps, after in enumerate(found, 1):
        assert 0.8 * steps < float(moved(after)[trained].mean()) / 1e-6 < 1.01 * steps
    # Weights near 0.1 have steps of 5e-4 in bfloat16.
    equal = [found[-1][name].bfloat16() == before[name].bfloat16() for name in before]
    assert float(torch.cat([e.flatten() for e in equal]).float().mean()) > 0.9


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(folder, tmp_path):
    rows = engine_cases.make_batch()
    engine, resumed = cases.build(folder), cases.build(folder)
    cases.steps(engine, rows, 2)
    engine.save(tmp_path)
    resumed.forward(rows)  # gathers weights, which `load` must replace
    resumed.load(tmp_path)
    assert_close(state(resumed), state(engine), atol=0)
    assert cases.steps(resumed, rows) == cases.steps(engine, rows)
    assert_close(weights(resumed), weights(engine), atol=0)
    assert_close(state(resumed), state(engine), atol=0)


def test_a_frozen_model_reads_a_checkpoint_with_the_state_of_an_optimizer(folder, tmp_path):
    engine = cases.build(folder)
    cases.steps(engine, engine_cases.make_batch(), 1)
    engine.save(tmp_path)
    frozen = FSDPEngine(ModelConfig(path=folder), engine.config)
    frozen.load(tmp_path)
    assert_close(weights(frozen), weights(engine), atol=0)


def test_a_skipped_step_changes_neither_weights_nor_state(folder):
    rows = engine_cases.make_batch()
    damaged = rows | {"weight": rows["weight"] * float("nan")}
    engine, plain = cases.build(folder), cases.build(folder)
    engine.optimizer.config = replace(engine.optimizer.config, max_skipped_steps=1)
    cases.steps(engine, rows, 1)
    before = weights(engine), state(engine)
    cases.steps(engine, damaged, 1)
    assert_close(weights(engine), before[0], atol=0)
    assert_close(state(engine), before[1], atol=0)
    with pytest.raises(NonFiniteError, match="2 optimizer steps in a row"):
        cases.steps(engine, damaged, 1)
    cases.steps(plain, rows, 1)
    plain.optimizer.step_count = 3  # the schedule counts skipped steps, the bias correction not
    assert cases.steps(engine, rows, 1) == cases.steps(plain, rows, 1)
    assert_close(weights(engine), weights(plain), atol=0)
