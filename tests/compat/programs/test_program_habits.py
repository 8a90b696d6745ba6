"""Habits of programs written for verl: names that they replace, and the errors that they catch."""

from unittest import mock

import pytest
import torch
import verl.trainer.ppo.core_algos
import verl.utils.torch_functional
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs
from verl.single_controller.ray.base import create_colocated_worker_raw_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est
from verl.utils import tensordict_utils
from verl.utils.ray_utils import parallel_put

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.compat.verl import core_algos
from quadriga.errors import ConflictError, DispatchError, LengthError, MeshError

MODULE = verl.trainer.ppo.core_algos


@pytest.fixture
def added_estimator():
    """The name of an estimator, which the trainer forgets after the test."""
    yield "twice"
    ADVANTAGES.pop("twice", None)


def test_a_replaced_registry_is_the_one_that_is_read_and_written(monkeypatch, added_estimator):
    before = core_algos.ADV_ESTIMATOR_REGISTRY
    monkeypatch.setattr(MODULE, "ADV_ESTIMATOR_REGISTRY", {"one": lambda: 1})
    assert get_adv_estimator_fn("one")() == 1
    register_adv_est(added_estimator)(lambda: 2)
    assert MODULE.ADV_ESTIMATOR_REGISTRY[added_estimator]() == 2
    with pytest.raises(ValueError, match="gae"):
        get_adv_estimator_fn("gae")
    monkeypatch.undo()
    assert MODULE.ADV_ESTIMATOR_REGISTRY is core_algos.ADV_ESTIMATOR_REGISTRY is before
    assert added_estimator not in before


def test_a_function_that_is_replaced_for_a_while_is_called_by_the_others_of_its_module():
    first = MODULE.get_adv_estimator_fn
    original = MODULE.compute_gae_advantage_return
    MODULE.__dict__.pop("kl_penalty", None)  # as if no program had read it before
    for name in ("get_adv_estimator_fn", "kl_penalty"):
        with mock.patch.object(MODULE, name, lambda *args: "mine"):
            assert getattr(MODULE, name)() == getattr(core_algos, name)() == "mine"
        assert getattr(MODULE, name) is getattr(core_algos, name)
    assert MODULE.get_adv_estimator_fn is first
    assert MODULE.compute_gae_advantage_return is original
    with mock.patch("verl.utils.torch_functional.masked_sum", lambda values, mask, axis=None: 7):
        assert verl.utils.torch_functional.masked_sum(0, 0) == 7
    ones = torch.ones(2)
    assert verl.utils.torch_functional.masked_sum(ones, ones) == 2


def test_a_name_of_the_core_is_replaced_in_the_module_of_verl_alone(monkeypatch):
    import verl.protocol

    import quadriga.protocol

    monkeypatch.setattr(verl.protocol, "DataProto", "mine")
    assert verl.protocol.DataProto == "mine"
    assert quadriga.protocol.DataProto is DataProto


def batch_of(*values, **options):
    return DataProto.from_dict(tensors={"x": torch.tensor(values)}, **options)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (LengthError, lambda: batch_of(1, 2, 3).chunk(2)),
        (LengthError, lambda: parallel_put([])),
        (ConflictError, lambda: batch_of(1).union(batch_of(2))),
    ],
)
def test_what_verl_asserts_is_an_assertion_error_here_too(error, wrong):
    with pytest.raises(AssertionError):
        wrong()
    with pytest.raises(error):
        wrong()


def test_a_key_of_meta_info_with_two_values_is_named():
    parts = [batch_of(1, meta_info={"config": "A"}), batch_of(2, meta_info={"config": "B"})]
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'config'"):
        DataProto.concat(parts)


def test_a_mesh_that_is_registered_twice(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    policy, both = Worker(), Worker()
    policy._register_dispatch_collect_info("actor", dp_rank=1, is_collect=False)
    both.set_dispatch_collect(mesh_name="actor", **policy.get_dispatch_collect())
    assert both._query_dispatch_info("actor") == 1
    with pytest.raises(AssertionError):
        both.set_dispatch_collect(mesh_name="actor", **policy.get_dispatch_collect())
    with pytest.raises(MeshError, match="registered already"):
        both.set_dispatch_collect(mesh_name="actor", **policy.get_dispatch_collect())


def test_columns_of_lists():
    labels = [["a1", "a2"], ["b1", "b2"]]
    batch = DataProto.from_dict(
        tensors={"x": torch.tensor([[1, 2], [3, 4]])}, non_tensors={"labels": labels}
    )
    parts = batch.unfold_column_chunks(2, split_keys=["x", "labels"])
    assert parts.batch["x"].tolist() == [[1], [2], [3], [4]]
    assert parts.non_tensor_batch["labels"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    odd = DataProto.from_dict(non_tensors={"labels": [["a"], ["b", "c"]]})
    with pytest.raises(LengthError, match="row 0 of field 'labels' is no list"):
        odd.unfold_column_chunks(2, split_keys=["labels"])


def test_a_mesh_is_registered_under_another_name():
    reference, both = Worker(), Worker()
    reference._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)
    both.set_dispatch_collect(mesh_name="ref", **reference.get_dispatch_collect())
    assert (both._query_dispatch_info("ref"), both._query_collect_info("ref")) == (3, True)
    reference._register_dispatch_collect_info("second", dp_rank=0, is_collect=False)
    with pytest.raises(MeshError, match=r"not among the registered meshes \['actor', 'second'\]"):
        Worker().set_dispatch_collect(mesh_name="ref", **reference.get_dispatch_collect())


def test_a_fused_class_is_marked_as_one():
    fused = create_colocated_worker_raw_cls({"a": RayClassWithInitArgs(Worker)})
    held = RayClassWithInitArgs(fused)
    held.fused_worker_used = True
    assert held.fused_worker_used
    with pytest.raises(DispatchError, match="Worker, which is not a class of several roles"):
        RayClassWithInitArgs(Worker).fused_worker_used = True


def test_the_union_of_tensordicts_with_objects():
    def rows(*names):
        return tensordict_utils.get_tensordict(
            {"x": torch.arange(2), "source": list(names)}, non_tensor_dict={"top_p": 0.8}
        )

    joined = tensordict_utils.union_tensor_dict(rows("a", "b"), rows("a", "b"))
    assert list(joined["source"]) == ["a", "b"]
    assert joined["top_p"] == 0.8
    with pytest.raises(AssertionError, match="field 'source' has different values"):
        tensordict_utils.union_tensor_dict(rows("a", "b"), rows("a", "c"))
