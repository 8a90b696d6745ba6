"""Saving, resuming and exporting an engine; skipped steps; invalid input."""

from dataclasses import replace

import engine_cases as cases
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from quadriga import errors
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.loading import load_causal_lm

build, step, weights = cases.trainable, cases.step, cases.weights


def total(outputs, micro):
    return outputs["log_probs"].sum(), {"rows": len(micro["weight"])}


@pytest.mark.parametrize("saved", ["two_ranks", "hybrid"])
def test_checkpoint_moves_from_one_rank_to_two_and_back(model_folder, work, two_ranks, saved):
    engine = build(model_folder)
    engine.load(work / "one_rank")
    metrics = step(engine)
    for name in ("loss", "grad_norm", "lr"):
        assert two_ranks["metrics"][name] == pytest.approx(metrics[name], rel=1e-4)
    again = build(model_folder)
    again.load(work / saved)
    expected = weights(engine)
    for name, tensor in weights(again).items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name
    assert step(again)["lr"] == step(engine)["lr"]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_export_loads_with_transformers(model_folder, tmp_path, head):
    engine = build(model_folder, head=head)
    if head == "lm":
        step(engine)
    engine.save_hf(tmp_path / "out")
    loader = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    model = loader.from_pretrained(tmp_path / "out")
    assert model.config.architectures == [type(model).__name__]
    assert all(torch.equal(model.state_dict()[name], t) for name, t in weights(engine).items())
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    if head == "lm":
        load_causal_lm(tmp_path / "out")


def test_skipped_steps_in_a_row_are_counted_over_a_resume(model_folder, tmp_path):
    damaged = cases.make_batch()
    damaged["weight"][:] = float("nan")
    settings = replace(cases.OPTIM, max_skipped_steps=2)
    engine = build(model_folder, settings)
    engine.save(tmp_path / "none")
    step(engine, damaged)
    engine.save(tmp_path / "one")
    resumed = build(model_folder, settings)
    resumed.load(tmp_path / "one")
    step(resumed, damaged)
    with pytest.raises(errors.NonFiniteError, match="3 optimizer steps in a row"):
        step(resumed, damaged)
    resumed.load(tmp_path / "none")  # to before the first of them
    for _ in range(2):
        step(resumed, damaged)
    with pytest.raises(errors.NonFiniteError, match="3 optimizer steps in a row"):
        step(resumed, damaged)


class Failure:
    """Raises in the second micro-batch of a step, or in a forward pass without gradients."""

    def __init__(self, engine, where):
        self.engine, self.where, self.calls = engine, where, 0
        layer = engine.module.model.layers[-1].mlp
        self.hook = layer.register_forward_hook(self.after_layer)

    def count(self):
        self.calls += 1
        if self.calls == 2:
            raise ValueError(f"in {self.where}")

    def after_layer(self, module, inputs, output):
        if self.where == "forward":
            self.count()
        if self.where == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self.count())

    def loss(self, outputs, micro):
        if self.where == "loss":
            self.count()
        return outputs["log_probs"].sum(), {}

    def happen(self):
        rows = cases.make_batch()
        with pytest.raises(ValueError, match=f"in {self.where}"):
            self.engine.train_step(rows, self.loss, micro_batch_size=2)
        self.calls = 1
        if self.where == "forward":
            with pytest.raises(ValueError, match="in forward"):
                self.engine.forward(rows)
        self.hook.remove()


@pytest.mark.parametrize("early", [False, True], ids=["not reduced", "reduced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["loss", "forward", "backward"])
def test_a_step_after_one_that_failed_equals_the_first_one(model_folder, where, dtype, early):
    engine, plain = (
        FSDPEngine(
            ModelConfig(path=model_folder), EngineConfig(dtype=dtype), OptimConfig(lr=0.01),
            min_unit_parameters=1,
        )
        for _ in range(2)
    )  # fmt: skip
    engine.reduces_each_micro_batch = early
    Failure(engine, where).happen()
    engine.reduces_each_micro_batch = plain.reduces_each_micro_batch
    assert cases.step(engine) == cases.step(plain)
    assert cases.same_weights(engine, plain)


def test_steps_equal_torch_adamw(model_folder):
    engine = build(model_folder, OptimConfig(lr=0.01, grad_clip=0.5))
    model = load_causal_lm(model_folder)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    rows = cases.rows_of(cases.make_batch(), 5, 6)  # 6 prompt and 3 response tokens, columns 1 … 9
    for _ in range(3):
        metrics = step(engine, rows)
        ids = rows["input_ids"][:, 1:10]
        log_probs = model(ids).logits[0].log_softmax(-1)
        chosen = log_probs[5:8].gather(1, ids[0, 6:, None])[:, 0]
        adamw.zero_grad()
        (-(chosen * rows["weight"][0, :3].float()).sum() / 3).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = model.state_dict()
    for name, tensor in weights(engine).items():
        assert torch.allclose(tensor, expected[name], atol=2e-5), name


def test_rank_without_rows_returns_empty_outputs(model_folder):
    engine = build(model_folder)
    empty = cases.rows_of(cases.make_batch(), 0, 0)
    outputs = engine.forward(empty, entropy=True)
    assert {name: tuple(t.shape) for name, t in outputs.items()} == {
        "log_probs": (0, cases.R),
        "entropy": (0, cases.R),
    }
    assert (
        engine.train_step(empty, lambda out, micro: (out["log_probs"].sum(), {}))["grad_norm"] == 0
    )


def test_invalid_input_is_rejected(model_folder, tmp_path):
    with pytest.raises(errors.ConfigError, match="no optimizer"):
        step(build(model_folder, None))
    with pytest.raises(errors.FieldError, match="response_mask"):
        build(model_folder).forward(
            {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}
        )
    with pytest.raises(errors.ConfigError, match="total_steps"):
        build_engine(
            ModelConfig(path=model_folder), EngineConfig(), OptimConfig(lr_scheduler="cosine")
        )
    with pytest.raises(errors.UnknownNameError, match="did you mean 'fsdp'"):
        build_engine(ModelConfig(path=model_folder), EngineConfig(name="fsdp2"))
    with pytest.raises(errors.ConfigError, match="fsdp_size"):
        build_engine(ModelConfig(path=model_folder), EngineConfig(fsdp_size=3))
    with pytest.raises(errors.CheckpointError, match="missing"):
        build(model_folder).load(tmp_path)
