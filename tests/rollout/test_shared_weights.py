"""The hf engine uses the training engine's weights in place, and knows when they change."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.config.schema import ModelConfig
from quadriga.errors import RolloutError
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=6, eos_token_ids=(), pad_token_id=0)
IDS = torch.tensor([[7, 84, 83], [70, 71, 72]])
MASK, SEEDS = torch.ones_like(IDS), torch.tensor([1, 2])


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path):
    write_tiny_model(
        tmp_path, ["one two"], TinyModel(hidden_size=32, num_heads=4, num_kv_heads=2,
                                         tie_word_embeddings=request.param)
    )  # fmt: skip
    return str(tmp_path)


@pytest.fixture
def engine(folder):
    return build_rollout("hf", ModelConfig(path=folder), dtype="float32")


@pytest.fixture
def trained(folder):
    """A plain model in the place of the training engine: its tensors are the shared ones."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def state(model):
    return {name: t.detach() for name, t in model.state_dict(keep_vars=True).items()}


def addresses(model):
    return {name: t.data_ptr() for name, t in model.state_dict().items()}


def log_probs(engine):
    return engine.generate(IDS, MASK, SAMPLING, SEEDS).rollout_log_probs


def step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


def test_an_optimizer_step_is_seen_and_its_version_is_asked_for(engine, trained):
    engine.update_weights(state(trained).items(), 1, "shared")
    before = log_probs(engine)
    step(trained)
    for call in (log_probs, lambda engine: engine.score(IDS, MASK)):
        with pytest.raises(RolloutError, match="so version 1 is no longer right"):
            call(engine)
    engine.update_weights(state(trained).items(), 2, "shared")
    after = log_probs(engine)
    assert not torch.equal(before, after) and engine.version == 2
    ids = engine.generate(IDS, MASK, SAMPLING, SEEDS).response_ids
    whole = torch.cat([IDS, ids], 1)
    with torch.no_grad():
        found = trained(input_ids=whole).logits[:, 2:-1].log_softmax(-1)
    assert torch.allclose(after, found.gather(-1, ids[..., None])[..., 0], atol=2e-5)


def test_other_weights_are_copied_to_memory_of_the_rollout(engine, trained):
    engine.update_weights(state(trained).items(), 1, "shared")
    kept = {name: t.clone() for name, t in state(trained).items()}
    engine.update_weights([(name, t + 1) for name, t in kept.items()], 2)
    assert all(torch.equal(kept[name], t) for name, t in state(trained).items())
    held = engine.module.state_dict()
    assert all(torch.equal(held[name], t + 1) for name, t in kept.items())
    assert not set(addresses(engine.module).values()) & set(addresses(trained).values())
    step(trained)
    log_probs(engine)  # nothing is shared any more
    engine.update_weights(state(trained).items(), 3, "shared")
    assert addresses(engine.module) == addresses(trained)


@pytest.mark.parametrize("form", ["whole", "shared"])
def test_weights_of_a_stream_that_breaks_off_are_not_used(folder, trained, form):
    engine = build_rollout("hf", ModelConfig(path=folder), dtype="bfloat16")  # which copies all
    weights = list(state(trained).items())

    def broken():
        yield weights[0]
        yield weights[1]
        raise EOFError("the sender has ended")

    with pytest.raises(EOFError):
        engine.update_weights(broken(), 1, form)
    with pytest.raises(RolloutError, match="broke off"):
        log_probs(engine)
    engine.update_weights(weights, 2, form)
    log_probs(engine)


def test_release_and_close_leave_the_weights_of_the_training_engine(engine, trained):
    engine.update_weights(state(trained).items(), 1, "shared")
    before = log_probs(engine)
    engine.release()
    engine.resume()
    assert torch.equal(log_probs(engine), before)
    assert addresses(engine.module) == addresses(trained)
    engine.close()
    trained(input_ids=IDS)
