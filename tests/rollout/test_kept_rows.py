"""Paused rows whose caches the engine hf keeps for the next call: found again, or computed again.

`tests/architectures` compares the numbers for every architecture.
"""

import copy
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from quadriga.config.schema import ModelConfig
from quadriga.data.loader import pad_rows
from quadriga.rollout import build_rollout
from quadriga.rollout.base import Continued, SamplingParams
from rollout_slices import in_slices, in_turns

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = [LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=6)]
SAMPLING = SamplingParams(19, eos_token_ids=tuple(range(5)), pad_token_id=0)
PROMPTS = [[7, 8, 9], [7, 8, 9], [20], [30, 31], [50, 51, 52], [50, 51, 52], [60], [61]]


@pytest.fixture(scope="module", params=CONFIGS, ids=["shared prompts", "windows"])
def engine(request, tmp_path_factory):
    """An engine that counts the tokens that its model computes."""
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_config(request.param).save_pretrained(folder)
    engine = build_rollout("hf", ModelConfig(path=folder))
    forward = engine._cached.forward

    def counted(cache, ids, *more):
        engine.computed += ids.numel()
        return forward(cache, ids, *more)

    engine._cached.forward = counted
    return engine


def run(engine, at_most, keep, between=lambda call: None):
    """The responses, and how many tokens the model computed."""
    engine.computed = 0
    engine._kept.clear()
    return in_slices(engine, PROMPTS, SAMPLING, at_most, keep, between), engine.computed


def assert_close(found, expected):
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, one), (_, other) in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=2e-5)


@pytest.mark.parametrize("at_most", [1, 3, 8])
def test_rows_join_and_leave_and_no_token_is_computed_twice(engine, at_most):
    whole, _ = run(engine, 19, 0)
    assert len({len(ids) for ids, _ in whole}) > 3, "rows leave in different calls"
    again, many = run(engine, at_most, 0)
    kept, few = run(engine, at_most, 8)
    assert_close(again, whole)
    assert_close(kept, whole)
    # The three prompts of each half, of 3 columns, and each token but the last one of a row. Rows
    # that have ended are computed until they are removed.
    new = sum(len(ids) - 1 for ids, _ in whole)
    assert new <= few - 2 * 3 * 3 < min(1.2 * new, many)
    assert run(engine, at_most, 8)[0] == kept, "the same calls give the same numbers, to the bit"


FORGETS = {
    "an update": lambda engine: engine.update_weights(engine.weights(), engine.version + 1),
    "a release": lambda engine: (engine.release(), engine.resume()),
    "a call that keeps nothing": lambda engine: continue_rows(engine, torch.zeros(0, 3), [], 0),
    "others": lambda engine: continue_rows(engine, torch.full((8, 3), 9), range(90, 98), 0, keep=8),
}


@pytest.mark.parametrize("event", FORGETS)
def test_what_is_not_kept_is_computed_again(engine, event):
    again, many = run(engine, 5, 0)

    def forget(call):
        before = engine.computed
        FORGETS[event](engine)
        engine.computed = before

    assert run(engine, 5, 8, forget) == (again, many)


def test_rows_go_on_with_keys_and_values_of_earlier_weights(engine, monkeypatch):
    """With `rollout.reset_caches=false`. A new response is of the new weights alone."""
    monkeypatch.setattr(engine, "_resets_caches", False)
    engine.computed, old, model = 0, dict(engine.weights()), copy.deepcopy(engine.module)
    old = {name: weight.clone() for name, weight in old.items()}
    new = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in old.items()}
    prompt = torch.tensor([[5, 6, 7]])
    first = continue_rows(engine, prompt, [5], 0, keep=3)
    engine.update_weights(new.items(), engine.version + 1)
    engine.computed, row = 0, torch.cat([prompt, first.response_ids], 1)
    again = continue_rows(engine, row, [5], 2, keep=3)
    assert engine.computed == 2 and again.weight_versions.tolist() == [engine.version]
    begun = continue_rows(engine, prompt, [6], 0)
    engine.update_weights(old.items(), engine.version + 1)

    def expected(cache, tokens):
        """The log-probabilities of the last two tokens by the new weights."""
        logits = model(input_ids=tokens[:, :-1], past_key_values=cache).logits[:, -2:]
        return logits.log_softmax(-1).gather(-1, tokens[:, -2:, None])[..., 0]

    cache = model(input_ids=row[:, :-1], use_cache=True).past_key_values
    model.load_state_dict(new)
    behind = torch.cat([row[:, -1:], again.response_ids], 1)
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=0)
    close(again.rollout_log_probs[:, :2], expected(cache, behind))
    close(begun.rollout_log_probs, expected(None, torch.cat([prompt, begun.response_ids], 1)))


def test_a_cache_is_of_the_same_row(engine):
    """A row with another seed or token is computed again, and a row may be there twice."""
    ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    for what in ("seed", "prompt", "sampled", "twice"):
        engine._kept.clear()
        first = continue_rows(engine, ids, [3, 4], 0, keep=3).response_ids
        assert "logits" not in vars(engine._kept[0]), "a number for each entry of the vocabulary"
        given, seeds = torch.cat([ids, first], 1), [3, 4]
        if what == "seed":
            seeds = [4, 3]
        elif what == "twice":
            given, seeds = given[[0, 1, 1]], [3, 4, 4]
        else:
            given[:, {"prompt": 0, "sampled": -1}[what]] += 1
        engine.computed = 0
        found = continue_rows(engine, given, seeds, 2, keep=3)
        assert engine.computed == (6 if what == "twice" else 2 * (5 + 1)), what
        engine._kept.clear()
        assert found.response_ids.equal(continue_rows(engine, given, seeds, 2).response_ids), what


def continue_rows(engine, ids, seeds, sampled, keep=0):
    """Two more tokens of each row."""
    given = SamplingParams(9, eos_token_ids=(), pad_token_id=0)
    seeds, ids = torch.tensor(list(seeds)).long(), ids.long()
    continued = Continued(torch.full_like(seeds, sampled), 2, keep)
    return engine.generate(ids, torch.ones_like(ids), given, seeds, continued=continued)


def turns(engine, keep):
    engine.computed = 0
    engine._kept.clear()
    sampling = SamplingParams(40, eos_token_ids=tuple(range(5)), pad_token_id=0)
    return in_turns(engine, PROMPTS, sampling, 3, keep, 5)


def test_turns_go_on_behind_observations_from_what_is_kept(engine):
    rows, log_probs = turns(engine, 0)
    many = engine.computed
    kept, others = turns(engine, 64)
    assert kept == rows
    for one, other in zip(others, log_probs, strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    if engine._cached.adds_several:
        assert engine.computed < min(sum(map(len, rows)), many / 4)  # prompts are shared
        assert all(part.rows.visible.shape[1] <= max(map(len, rows)) for part in engine._kept)
    assert turns(engine, 64) == (kept, others), "the same calls give the same numbers, to the bit"
    assert turns(engine, 4)[0] == rows, "some are forgotten"


def test_a_kept_row_goes_on_as_it_is_and_with_more_tokens(engine):
    engine.computed = 0
    first = continue_rows(engine, torch.tensor([[5, 6, 7]]), [5], 0, keep=3).response_ids
    row = [5, 6, 7, *first[0].tolist()]
    request = *pad_rows([row, [*row, 40, 41]], 0, 9, "left"), SAMPLING, torch.tensor([5, 5])
    sampled = torch.tensor([2, 4])
    kept, again = (
        engine.generate(*request, continued=Continued(sampled, 2, keep)) for keep in (3, 0)
    )
    assert kept.response_ids.equal(again.response_ids)


def test_an_error_in_a_call_leaves_no_wrong_cache(engine, monkeypatch):
    engine.computed = 0
    engine._kept.clear()
    first = continue_rows(engine, torch.tensor([[5, 6, 7]]), [5], 0, keep=3).response_ids
    row = [5, 6, 7, *first[0].tolist()]
    request = *pad_rows([row, [*row, 40, 41]], 0, 9, "left"), SAMPLING, torch.tensor([5, 5])
    forward = engine._cached.forward

    def fails(*arguments):
        forward(*arguments)
        raise RuntimeError("lost")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr(engine._cached, "forward", fails)
        engine.generate(*request, continued=Continued(torch.tensor([2, 4]), 2, 3))
    kept, again = (
        engine.generate(*request, continued=Continued(torch.tensor([2, 4]), 2, keep))
        for keep in (3, 0)
    )
    assert kept.response_ids.equal(again.response_ids)
    torch.testing.assert_close(kept.rollout_log_probs, again.rollout_log_probs, atol=2e-5, rtol=0)
