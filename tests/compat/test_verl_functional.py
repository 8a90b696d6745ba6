"""verl's small functions, and the classes of the errors that verl raises."""

import os
from types import SimpleNamespace

import pytest
import torch

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.errors import AlgorithmError, ConflictError, ModelError, UnknownNameError
from quadriga.protocol import DataProto

ONES = torch.ones(2, 2)


@pytest.mark.parametrize("kind", ["batch_keys", "non_tensor_batch_keys", "meta_info_keys"])
def test_pop_of_a_missing_key_is_an_assertion_error_as_in_verl(kind):
    data = DataProto.from_dict(tensors={"a": ONES})
    with pytest.raises(AssertionError, match="no field 'x'") as caught:
        data.pop(**{kind: ["x"]})
    assert isinstance(caught.value, KeyError)


def test_a_wrong_aggregation_is_a_value_error_as_in_verl():
    from verl.trainer.ppo import core_algos

    with pytest.raises(ValueError, match="aggregation 'mine'") as caught:
        core_algos.agg_loss(ONES, ONES, "mine")
    assert isinstance(caught.value, UnknownNameError)
    assert (caught.value.name, "token-mean" in caught.value.known) == ("mine", True)
    with pytest.raises(ValueError, match="aggregation 'mine'"):
        core_algos.compute_value_loss(ONES, ONES, ONES, ONES, 0.2, "mine")


def test_a_wrong_kl_is_not_implemented_as_in_verl():
    from verl.trainer.ppo import core_algos

    for function in (core_algos.kl_penalty, core_algos.kl_penalty_forward):
        with pytest.raises(NotImplementedError, match="KL estimator 'mine'") as caught:
            function(ONES, ONES, "mine")
        assert isinstance(caught.value, UnknownNameError)
        with pytest.raises(NotImplementedError, match="sums over the vocabulary") as caught:
            function(ONES, ONES, "full")
        assert isinstance(caught.value, AlgorithmError)
    settings = SimpleNamespace(type="mine", kl_coef=0.1, target_kl=1.0, horizon=10)
    with pytest.raises(NotImplementedError, match="KL controller 'mine'"):
        core_algos.get_kl_controller(settings)


def test_a_model_of_text_has_no_processor(tmp_path):
    from verl.utils import hf_processor

    assert hf_processor(str(tmp_path), trust_remote_code=False, use_fast=True) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has a preprocessor_config\.json"):
        hf_processor(str(tmp_path))


def test_functional():
    from verl.utils.py_functional import append_to_dict, temp_env_var, union_two_dict
    from verl.utils.ray_utils import ray_noset_visible_devices

    with temp_env_var("QUADRIGA_TEST", "1"):
        assert os.environ["QUADRIGA_TEST"] == "1"
    assert "QUADRIGA_TEST" not in os.environ
    metrics: dict = {}
    append_to_dict(metrics, {"loss": 1.0})
    append_to_dict(metrics, {"loss": [2.0, 3.0]})
    assert metrics == {"loss": [1.0, 2.0, 3.0]}
    with pytest.raises(ConflictError, match="'a'"):
        union_two_dict({"a": 1}, {"a": 2})
    assert not ray_noset_visible_devices({})
