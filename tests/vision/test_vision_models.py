"""Rollout, log-probabilities and update of prompts with images are one function of the weights."""

from dataclasses import replace

import pytest
import torch
import vision_cases as cases

from fake_rollout import full_abilities
from quadriga.config import schema
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError, FieldError, ModelError, RolloutAbilityError
from quadriga.models.images import MultiModalRows, image_tokens
from quadriga.models.loading import load_causal_lm, load_value_model
from quadriga.protocol import DataProto, fields
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine
from quadriga.workers.actor_rollout_ref import generate_batch, sampling_params
from quadriga.workers.method_fields import GENERATE_SEQUENCES
from rank_groups import run_ranks


@pytest.fixture(scope="module")
def batch(folder):
    return cases.responses(folder, cases.prompts(folder))


def naive_log_probs(model, data, row):
    """One row alone, without padding and without a cache, with the positions of transformers."""
    ids = data.batch[fields.INPUT_IDS][row][data.batch[fields.ATTENTION_MASK][row].bool()][None]
    images = data.non_tensor_batch[fields.MULTI_MODAL_INPUTS][row]
    kinds = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **images).logits[0]
    chosen = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[-int(data.batch[fields.RESPONSE_MASK][row].sum()) :]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_rollout_and_training_give_the_numbers_of_a_naive_loop(folder, kind, tmp_path):
    if kind == "qwen2_5_vl":
        cases.write_window_model(tmp_path / kind, folder)
        folder = tmp_path / kind
    batch = cases.responses(folder, cases.prompts(folder))
    tensors, images = cases.inputs(batch)
    engine = FSDPEngine(schema.ModelConfig(path=str(folder)), schema.EngineConfig())
    model = load_causal_lm(folder)
    rollout, mask = batch.batch[fields.ROLLOUT_LOG_PROBS], tensors[fields.RESPONSE_MASK].bool()
    for row in range(len(batch)):
        expected = naive_log_probs(model, batch, row)
        torch.testing.assert_close(rollout[row][mask[row]], expected, atol=3e-6, rtol=0)
    for micro in (1, 3, None):
        found = engine.forward(tensors, images=images, micro_batch_size=micro)["log_probs"]
        torch.testing.assert_close(found, rollout, atol=3e-6, rtol=0)


def test_prompts_with_equal_tokens_and_different_images_are_different_prompts(folder, batch):
    ids = batch.batch[fields.PROMPTS]
    assert torch.equal(ids[0], ids[2])
    tensors, images = cases.inputs(batch)
    swapped = MultiModalRows((*images.inputs[2:4], *images.inputs[:2], *images.inputs[4:]),
                             images.position_ids)  # fmt: skip
    engine = FSDPEngine(schema.ModelConfig(path=str(folder)), schema.EngineConfig())
    found, other = (engine.forward(tensors, images=rows)["log_probs"] for rows in (images, swapped))
    assert (found[:4] - other[:4]).abs().max() > 1e-3
    torch.testing.assert_close(found[4:], other[4:])
    assert images.image_numbers().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_responses_to_images_go_on(folder, batch):
    """Row i goes on behind i % 4 of its tokens, with positions behind those of its images."""
    rows, mask = cases.prompts(folder), batch.batch[fields.RESPONSE_MASK]
    kept = torch.arange(6) < (torch.arange(len(rows)) % 4).clamp(max=mask.sum(1) - 1)[:, None]
    params = sampling_params(
        schema.SamplingConfig(), schema.ModelConfig(path=str(folder)), max_new_tokens=6
    )
    begun = {key: batch.batch[key] for key in (fields.RESPONSES, fields.ROLLOUT_LOG_PROBS)}
    begun |= {fields.RESPONSE_MASK: kept.long(), fields.TOKEN_VERSIONS: torch.full_like(mask, -1)}
    engine = build_rollout("hf", schema.ModelConfig(path=str(folder)))
    found = generate_batch(engine, rows.union(DataProto.from_dict(begun)), params, at_most=6).batch
    for name in set(GENERATE_SEQUENCES.writes) - {fields.ROLLOUT_LOG_PROBS}:
        assert torch.equal(found[name], batch.batch[name]), name
    log_probs = found[fields.ROLLOUT_LOG_PROBS]
    torch.testing.assert_close(log_probs, batch.batch[fields.ROLLOUT_LOG_PROBS], atol=3e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_image_tokens_are_never_sampled(folder, temperature):
    model = load_causal_lm(folder)
    tokens = image_tokens(folder)
    with torch.no_grad():  # an image token is the most likely one everywhere
        model.lm_head.weight[list(tokens.never_sampled)] = 0.0
        model.lm_head.weight.mul_(0.01)
    engine = build_rollout("hf", schema.ModelConfig(path=str(folder)))
    engine.update_weights(model.state_dict().items(), 0)
    head = engine.module.lm_head
    head.register_forward_hook(lambda m, i, out: out.index_fill(-1, torch.tensor(tokens.image), 9))
    data = cases.responses(folder, cases.prompts(folder), engine, temperature=temperature)
    found = set(data.batch[fields.RESPONSES].flatten().tolist())
    assert found and not found & set(tokens.never_sampled)
    # Their probability still counts: the numbers are those that training computes.
    assert data.batch[fields.ROLLOUT_LOG_PROBS][data.batch[fields.RESPONSE_MASK].bool()].max() < -8


def test_one_step_is_equal_for_every_micro_batch_and_on_two_ranks(folder, batch, tmp_path):
    """Rank 1 has text alone, and the image encoder computes on both ranks."""
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(2, cases.rank_main, str(folder), str(tmp_path / "batch.pt"), str(tmp_path / "r.pt"))
    steps = [cases.step(cases.trainer(folder), batch, micro) for micro in (None, 1, 3)]
    before = dict(cases.trainer(folder).state_stream())
    moved = [name for name in before if not torch.equal(before[name], steps[0][name])]
    assert any(name.startswith("model.visual.") for name in moved)
    for weights in (*steps[1:], torch.load(tmp_path / "r.pt")):
        for name, tensor in steps[0].items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=0, msg=name)


def test_adapters_are_merged_into_text_model_and_image_encoder(folder, batch, tmp_path):
    tensors, images = cases.inputs(batch)
    model = schema.ModelConfig(path=str(folder), lora=schema.LoraConfig(rank=2))
    engine = FSDPEngine(model, schema.EngineConfig(), schema.OptimConfig(lr=0.05), total_steps=2)
    before = engine.forward(tensors, images=images)["log_probs"]
    cases.step(engine, batch)
    after = engine.forward(tensors, images=images)["log_probs"]
    assert (after - before).abs().max() > 1e-2
    base = engine.without_adapters().forward(tensors, images=images)["log_probs"]
    assert torch.equal(base, before)
    engine.save_hf(tmp_path / "export")
    merged = FSDPEngine(schema.ModelConfig(path=str(tmp_path / "export")), schema.EngineConfig())
    found = merged.forward(tensors, images=images)["log_probs"]
    torch.testing.assert_close(found, after, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_refused_by_name(folder, batch):
    tensors, images = cases.inputs(batch)
    model = schema.ModelConfig(path=str(folder))
    engine = FSDPEngine(model, schema.EngineConfig())
    wrong = MultiModalRows(images.inputs[::-1], images.position_ids)
    with pytest.raises(FieldError, match=r"row 0 has 4 image tokens, and its images have 40 patc"):
        engine.forward(tensors, images=wrong)
    with pytest.raises(FieldError, match=r"row 0 has 4 image tokens, and its images have 0 patch"):
        engine.forward(tensors)
    with pytest.raises(ModelError, match="is not known to give the same numbers with packed rows"):
        FSDPEngine(model, schema.EngineConfig(), packed=True)
    with pytest.raises(ConfigError, match=r"engine\.attention=flex needs packed rows"):
        FSDPEngine(model, schema.EngineConfig(attention="flex"))
    with pytest.raises(ModelError, match="takes images, and such a model cannot have a head"):
        load_value_model(folder)
    flat = batch.select(batch_keys=[fields.INPUT_IDS])
    flat.batch[fields.POSITION_IDS] = tensors[fields.INPUT_IDS]
    with pytest.raises(FieldError, match=r"'position_ids' of shape \[B, 3, T\]; got \[8, "):
        MultiModalRows.of(flat)


def test_an_engine_of_text_refuses_images(folder):
    class TextEngine(RolloutEngine):
        name, abilities = "text", replace(full_abilities(vocabulary=1000), window=None)
        score = update_weights = None

        def generate(self, *request):
            self._check_generates("generate", *request[4:])

    engine = TextEngine()
    with pytest.raises(RolloutAbilityError, match="'text' cannot generate from prompts with image"):
        cases.responses(folder, cases.prompts(folder), engine)
