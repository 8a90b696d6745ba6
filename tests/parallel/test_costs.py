"""The cost of sequences, by hand and against a loop over queries and keys."""

import numpy as np
import pytest

from quadriga.parallel.costs import TOKENS, AttentionCost, CostModel, ModelShape

SHAPE = ModelShape(
    hidden_size=4, attention_size=4, key_value_size=2, mlp_size=8, vocabulary=10,
    windows=(None, None, None),
)  # fmt: skip


def tokens(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.int64)


def pairs(first: int, last: int, window: int | None) -> int:
    """Count the keys of the queries `first` … `last` − 1 one by one."""
    return sum(
        1
        for query in range(first, last)
        for key in range(query + 1)
        if window is None or query - key < window
    )


def test_the_example_in_the_code() -> None:
    model = CostModel.of_shape(SHAPE)
    assert (model.token, model.output) == (864, 80)
    assert model.attention == (AttentionCost(48, None),)
    assert CostModel.of_shape(SHAPE, outputs=1).output == 8
    assert AttentionCost(1, 3).of_first(tokens(5)).tolist() == [12]


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("once", [True, False])
def test_prompt_and_responses_cost_every_pair_of_query_and_key(window, once) -> None:
    model = CostModel(2.0, 5.0, (AttentionCost(7.0, window),), prompt_attention_once=once)
    for prompt, response in [(1, 0), (1, 1), (4, 3), (9, 12), (0, 2)]:
        in_prompt, whole = pairs(0, prompt, window), pairs(0, prompt + response, window)
        shared = 2 * prompt + 7 * in_prompt * once
        own = (2 + 5) * response + 7 * (whole - in_prompt * once)
        assert model.of_prompts(tokens(prompt)).tolist() == [shared]
        assert model.of_responses(tokens(prompt), tokens(response)).tolist() == [own]


def test_layers_are_counted_by_window_and_layers_without_attention_have_no_pairs() -> None:
    shape = ModelShape(4, 4, 2, 8, 10, windows=(None, 16, 0, 16))
    model = CostModel.of_shape(shape)
    assert model.token == 864 / 3 * 4
    assert set(model.attention) == {AttentionCost(16, None), AttentionCost(32, 16)}


def test_the_default_counts_tokens() -> None:
    assert TOKENS.of_prompts(tokens(3, 7)).tolist() == [3, 7]
    assert TOKENS.of_responses(tokens(3, 7), tokens(2, 0)).tolist() == [2, 0]


def test_long_sequences_cost_more_than_their_share_of_the_tokens() -> None:
    model = CostModel.of_shape(SHAPE)
    short, long = model.of_responses(tokens(10, 10), tokens(100, 1000))
    assert long > 10 * short
