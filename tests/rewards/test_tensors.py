"""A reward function that returns a tensor: scores, and what it returns besides them."""

import numpy as np
import pytest
import torch

from quadriga.errors import ConfigError, FieldError
from quadriga.protocol import DataProto, fields
from quadriga.rewards.tensors import TensorReward
from quadriga.trainer.stages import score_responses

BATCH = DataProto.from_dict({"responses": torch.zeros(2, 3)})
SCORES = torch.tensor([[0.0, 0, 1], [0, 2, 0]])


def returning(value, components=()):
    return TensorReward(lambda data, return_dict=False: value, components)


def extras(value):
    return {"reward_tensor": SCORES, "reward_extra_info": value}


def test_what_a_reward_function_returns_besides_its_scores_is_measured():
    extra = {
        "acc": [True, False],
        "format": np.array([0.5, 1.5]),
        "length": torch.tensor([3, 4]),
        "exact": list(np.array([True, True])),
        "prediction": ["a", "b"],
    }
    reward = returning(extras(extra))
    scored = score_responses(BATCH, reward)
    assert scored.metrics == {
        "reward/extra/acc": 0.5,
        "reward/extra/format": 1.0,
        "reward/extra/length": 3.5,
        "reward/extra/exact": 1.0,
    }
    assert scored.batch.batch[fields.TOKEN_LEVEL_SCORES].tolist() == SCORES.tolist()


def test_extras_are_the_components_that_the_settings_name():
    extra = {"format": [0.5, 1.5], "acc": [1, 0], "text": ["a", "b"]}
    value = extras(extra)
    scored = returning(value, ("acc", "format"))(BATCH)
    assert scored.batch[fields.REWARD_COMPONENTS].tolist() == [[1.0, 0.5], [0.0, 1.5]]
    for missing in ("speed", "text"):
        with pytest.raises(FieldError, match=rf"reward_components names \['{missing}'\]"):
            returning(value, (missing,))(BATCH)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (extras([1, 0]), "a dict of lists, got list"),
        (extras({"acc": [1]}), r"\['acc'\] must have one value for each of the 2 rows, got 1"),
        (extras({"acc": 0.5}), r"\['acc'\] must have one value for each of the 2 rows, got 0\.5"),
        (torch.ones(2), r"a tensor \[2, 3\], .* got shape \[2\]"),
        (torch.ones(2, 1), r"a tensor \[2, 3\], .* got shape \[2, 1\]"),
        (5, "got int"),
    ],
)
def test_a_value_that_does_not_fit_the_rows_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        returning(value)(BATCH)
