"""Experts of the rollout, recorded by the engine hf and taken again in training."""

from functools import partial
from types import SimpleNamespace

import naive_loop
import pytest
import torch
from naive_loop import END_TOKENS, PROMPT_WIDTH, RESPONSE_WIDTH
from small_models import VOCABULARY, each, small_config, small_model
from torch.nn.functional import linear

from quadriga.config.schema import ModelConfig, RolloutConfig
from quadriga.engines.loading import load_model
from quadriga.engines.micro_batches import check_fields
from quadriga.engines.token_model import TokenModel
from quadriga.errors import FieldError, ModelError
from quadriga.models.architectures import ARCHITECTURES
from quadriga.models.routes import CHOOSE_OTHERWISE, UNKNOWN, Routers
from quadriga.protocol import DataProto, fields
from quadriga.rollout import rollout_of
from quadriga.rollout.base import SamplingParams
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker, generate_batch
from quadriga.workers.method_fields import BEGUN_RESPONSES

TOLERANCE = 3e-4
CPU = torch.device("cpu")
SAMPLING = SamplingParams(RESPONSE_WIDTH, END_TOKENS, pad_token_id=0)
ROUTES = fields.ROUTED_EXPERTS


def normalised(weights):
    return weights / weights.sum(-1, keepdim=True)


# Of the scores [N, E] of a router, the weights of the experts `chosen` [N, K].
WEIGHTS = {
    "qwen3_moe": lambda scores, chosen: scores.softmax(-1).gather(-1, chosen),
    "mixtral": lambda scores, chosen: normalised(scores.softmax(-1).gather(-1, chosen)),
    "olmoe": lambda scores, chosen: scores.softmax(-1).gather(-1, chosen),
    "deepseek_v3": lambda scores, chosen: 2.5 * normalised(scores.sigmoid().gather(-1, chosen)),
    "gpt_oss": lambda scores, chosen: scores.gather(-1, chosen).softmax(-1),
}


def rollout_of_folder(folder, **settings):
    return rollout_of(RolloutConfig(replay_routes=True, **settings)).build(
        ModelConfig(path=str(folder)), "cpu", releasable=False, copies=None
    )


def prompts_of(batch, **more):
    prompts = {name: batch[name][:, :PROMPT_WIDTH] for name in ("input_ids", "attention_mask")}
    seeds = torch.arange(len(batch["input_ids"]))
    return DataProto.from_dict({**prompts, "sample_seed": seeds, **more})


def naive_log_probs(model, model_type, batch):
    """Log-probabilities of the targets, of the experts of the batch and the scores of `model`."""
    layers = [m for m in model.modules() if hasattr(m, "experts")]
    given = list[torch.Tensor]()

    def replace_experts(layer, number, module, args):
        hidden, chosen = args[0], given[-1][:, number].long()
        router = getattr(layer, "gate", None) or layer.router
        scores = linear(hidden.flatten(0, -2), router.weight, getattr(router, "bias", None))
        return hidden, chosen, WEIGHTS[model_type](scores, chosen)

    hooks = [
        layer.experts.register_forward_pre_hook(partial(replace_experts, layer, number))
        for number, layer in enumerate(layers)
    ]
    rows = []
    for ids, mask, routes, targets in zip(
        batch["input_ids"], batch["attention_mask"].bool(), batch[ROUTES], batch["response_mask"],
        strict=True,
    ):  # fmt: skip
        given.append(routes[mask].clamp(min=0))
        log_p = model(input_ids=ids[mask][None]).logits[0, :-1].log_softmax(-1)
        chosen = log_p.gather(-1, ids[mask][1:, None])[:, 0][int(mask[:PROMPT_WIDTH].sum()) - 1 :]
        rows.append(torch.cat([chosen, chosen.new_zeros(RESPONSE_WIDTH - len(chosen))]) * targets)
    for hook in hooks:
        hook.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("model_type", WEIGHTS)
def test_training_takes_the_experts_of_the_rollout(model_type, tmp_path):
    """The weights differ by noise, so that routers prefer others. Log-probabilities and gradients
    equal those of a plain forward pass that is given the experts."""
    small_model(model_type).save_pretrained(tmp_path)
    prompts = prompts_of(naive_loop.make_batch(VOCABULARY))
    engine = rollout_of_folder(tmp_path, micro_batch_size=4)
    batch = dict(generate_batch(engine, prompts, SAMPLING).batch)
    model = small_model(model_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.requires_grad_(True)
    expected = naive_log_probs(model, model_type, batch)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    for packed in (True, False):
        config = ModelConfig(path=str(tmp_path), gradient_checkpointing=True)
        trained = load_model(config, "lm", torch.float32, trained=True)
        trained.load_state_dict(model.state_dict())
        token_model = TokenModel(trained, "lm", CPU, packed=packed)
        found = token_model(batch, temperature=1.0, entropy=False)["log_probs"]
        assert torch.allclose(found, expected, atol=TOLERANCE)
        (found * weights).sum().backward()
        grads = {name: one.grad for name, one in trained.named_parameters()}
        for name, other in model.named_parameters():
            if other.grad is not None:
                scale = float(other.grad.abs().max())
                assert torch.allclose(grads[name], other.grad, atol=2e-3 * scale + 1e-4), name
        alone = {name: value for name, value in batch.items() if name != ROUTES}
        own = token_model(alone, temperature=1.0, entropy=False)["log_probs"]
        assert (own - expected).abs().max() > 10 * TOLERANCE, "the routers prefer other experts"


def test_calls_that_continue_responses_record_the_same_experts(tmp_path):
    """With and without kept caches; an end that was not computed has none."""
    small_model("qwen3_moe").save_pretrained(tmp_path)
    engine, batch = rollout_of_folder(tmp_path), naive_loop.make_batch(VOCABULARY)
    whole = generate_batch(engine, prompts_of(batch), SAMPLING).batch
    computed = whole["attention_mask"].clone()
    computed[torch.arange(len(computed)), PROMPT_WIDTH - 1 + whole["response_mask"].sum(1)] = 0
    assert torch.equal(whole[ROUTES][..., 0, 0] != UNKNOWN, computed.bool())
    assert whole[ROUTES].dtype == torch.int8
    for keep in (0, 8):
        rows, numbers = prompts_of(batch), torch.arange(len(computed))
        while len(numbers):
            found = generate_batch(engine, rows, SAMPLING, 3, keep).batch
            paused = found["paused"].bool()
            assert torch.equal(found[ROUTES][~paused], whole[ROUTES][numbers[~paused]])
            begun = {name: found[name][paused] for name in (*BEGUN_RESPONSES, ROUTES)}
            numbers = numbers[paused]
            rows = prompts_of(batch)[numbers].union(DataProto.from_dict(begun))


def test_rows_without_experts_are_refused(tmp_path):
    """A padded row and the last token need none."""
    small_model("mixtral").save_pretrained(tmp_path)
    engine = rollout_of_folder(tmp_path)
    prompts = prompts_of(naive_loop.make_batch(VOCABULARY))
    batch = dict(generate_batch(engine, prompts, SAMPLING).batch)
    check_fields(batch)
    batch[ROUTES][1, PROMPT_WIDTH - 2] = UNKNOWN
    with pytest.raises(FieldError, match="row 1 lacks them at 1 tokens"):
        check_fields(batch)
    batch["attention_mask"] = mask = batch["attention_mask"].clone()
    mask[1, PROMPT_WIDTH - 1 :] *= 2  # another context begins
    check_fields(batch)
    del batch[ROUTES]
    worker = SimpleNamespace(config=SimpleNamespace(rollout=RolloutConfig(replay_routes=True)))
    with pytest.raises(FieldError, match="needs the field 'routed_experts'"):
        ActorRolloutRefWorker._routes(worker, DataProto.from_dict(batch))


def has_experts(model_type):
    return any("expert" in name for name in small_config(model_type).to_dict())


@pytest.mark.parametrize("model_type", each(filter(has_experts, ARCHITECTURES), CHOOSE_OTHERWISE))
def test_every_architecture_records_its_experts_or_is_refused(model_type):
    model = small_model(model_type)
    routers = Routers(model)
    routers.follow(None, record=True)
    model(input_ids=torch.arange(5, 12)[None])
    if model_type in CHOOSE_OTHERWISE or not routers.layers:
        with pytest.raises(ModelError, match="whose choice can be replayed"):
            routers.chosen()
        return
    other = (routers.chosen() + 1) % routers.experts
    routers.follow(other)
    model(input_ids=torch.arange(5, 12)[None])
    assert torch.equal(routers.chosen(), other)
