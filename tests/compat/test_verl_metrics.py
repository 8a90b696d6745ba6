"""The metrics of a batch under verl's names. The numbers are computed by hand.

Four rows, three prompt positions and three response positions. Lengths count `attention_mask`;
`response_mask` is 0 for the second token of row 1, which a tool wrote:

    row   prompt   response   response_mask   score   reward
    0     2        2          1 1 0           1       0.5
    1     3        3          1 0 1           3       2.5
    2     1        0          0 0 0           8       8      aborted: no response
    3     2        1          1 0 0           -1      -3
"""

import numpy as np
import pytest
import torch

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.errors import FieldError
from quadriga.protocol import DataProto

ATTENTION = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
MASK = [[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]]


def batch(leave_out=(), **non_tensors):
    tensors = {
        "prompts": torch.zeros(4, 3, dtype=torch.long),
        "responses": torch.zeros(4, 3, dtype=torch.long),
        "attention_mask": torch.tensor(ATTENTION),
        "response_mask": torch.tensor(MASK),
        "token_level_scores": torch.tensor([[0, 1.0, 0], [0, 0, 3], [8, 0, 0], [-1, 0, 0]]),
        "token_level_rewards": torch.tensor([[0, 0.5, 0], [0, 0, 2.5], [8, 0, 0], [-3, 0, 0]]),
        "advantages": torch.tensor([[1.0, 1, 9], [2, 9, 2], [9, 9, 9], [-1, 9, 9]]),
        "returns": torch.tensor([[1.0, 2, 9], [3, 9, 4], [9, 9, 9], [0, 9, 9]]),
        "values": torch.tensor([[1.0, 1, 9], [3, 9, 3], [9, 9, 9], [0, 9, 9]]),
    }
    kept = {name: value for name, value in tensors.items() if name not in leave_out}
    return DataProto.from_dict(tensors=kept, non_tensors=non_tensors)


def test_data_metrics():
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    # Returns 1 2 3 4 0: mean 2, variance 10 / 4. Returns minus values 0 1 0 1 0: variance 1.2 / 4.
    explained = 1 - (1.2 / 4) / (10 / 4 + 1e-5)
    statistics = {  # mean, maximum, minimum
        "critic/score": (1.0, 3.0, -1.0),
        "critic/rewards": (0.0, 2.5, -3.0),
        "critic/advantages": (1.0, 2.0, -1.0),
        "critic/returns": (2.0, 4.0, 0.0),
        "critic/values": (pytest.approx(1.6), 3.0, 0.0),
        "response_length": (1.5, 3.0, 0.0),
        "response_length_non_aborted": (2.0, 3.0, 1.0),
        "prompt_length": (2.0, 3.0, 1.0),
    }
    metrics = compute_data_metrics(batch())
    for name, expected in statistics.items():
        assert tuple(metrics.pop(f"{name}/{kind}") for kind in ("mean", "max", "min")) == expected
    assert metrics == {
        "critic/vf_explained_var": pytest.approx(explained),
        "response_length/clip_ratio": 0.25,
        "response_length_non_aborted/clip_ratio": pytest.approx(1 / 3),
        "response/aborted_ratio": 0.25,
        "prompt_length/clip_ratio": 0.25,
    }


def test_data_metrics_without_a_critic_and_with_turns():
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    turns = {"__num_turns__": np.array([1, 2, 3, 6])}
    metrics = compute_data_metrics(batch(leave_out=["values"], **turns), use_critic=False)
    assert not [name for name in metrics if "values" in name or "vf_" in name]
    assert [metrics[f"num_turns/{kind}"] for kind in ("min", "max", "mean")] == [1, 6, 3.0]
    with pytest.raises(KeyError, match="values"):
        compute_data_metrics(batch(leave_out=["values"]))


def test_timing_metrics():
    """6 response tokens; 14 tokens with the prompts."""
    from verl.trainer.ppo.metric_utils import compute_timing_metrics

    spans = {"gen": 3.0, "ref": 7.0, "update_actor": 1.4, "step": 20.0}
    each = {"gen": 500.0, "ref": 500.0, "update_actor": pytest.approx(100.0)}
    assert compute_timing_metrics(batch(), spans) == {
        **{f"timing_s/{name}": seconds for name, seconds in spans.items()},
        **{f"timing_per_token_ms/{name}": value for name, value in each.items()},
    }


def test_throughput_metrics():
    from verl.trainer.ppo.metric_utils import compute_throughout_metrics

    data = batch()
    data.meta_info["global_token_num"] = [4, 6, 1, 3]
    expected = {"total_num_tokens": 14, "time_per_step": 2.0, "throughput": 3.5}
    found = compute_throughout_metrics(data, {"step": 2.0}, n_gpus=2)
    assert found == {f"perf/{name}": value for name, value in expected.items()}
    with pytest.raises(FieldError, match="'global_token_num'"):
        compute_throughout_metrics(batch(), {"step": 2.0}, n_gpus=2)
    with pytest.raises(KeyError, match="'step'"):
        compute_throughout_metrics(data, {}, n_gpus=2)


def test_a_reduced_metric_is_a_mean_or_the_extreme_that_its_name_says():
    from verl.utils.metric import reduce_metrics

    rows = {
        "actor/loss": ([1.0, 2.0, 6.0], 3.0),
        "actor/grad_norm_max": ([1, 5], 5.0),
        "reward/min": ([2, 1], 1.0),
        "tensors": ([torch.tensor(1.0), torch.tensor(2.0)], 1.5),
        "arrays": (np.array([1.0, 4.0]), 2.5),
        "nested": ([[1, 2], [3, 4]], 2.5),
        "one": (3, 3.0),
    }
    metrics = {name: values for name, (values, _) in rows.items()}
    assert reduce_metrics(metrics) is metrics  # as in verl, the dict itself is changed
    assert metrics == {name: reduced for name, (_, reduced) in rows.items()}
    for wrong in ([None], ["1.5", "2"]):
        with pytest.raises(FieldError, match="must hold numbers"):
            reduce_metrics({"x": wrong})
    from verl.trainer.ppo import metric_utils, ray_trainer

    assert metric_utils.reduce_metrics is ray_trainer.reduce_metrics is reduce_metrics
