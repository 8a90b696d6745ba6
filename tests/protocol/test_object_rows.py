"""Objects in rows that only the pickler of Ray can send, and batches pickled outside calls."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import time

import numpy as np
import pytest
import ray
import torch
from plane_workers import Plane
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.backends.ray.store import RayStore
from quadriga.protocol import DataProto
from quadriga.protocol.boundary import pack_argument
from quadriga.protocol.columns import encode
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.storage import traffic
from quadriga.protocol.values import object_array
from quadriga.single_controller import Dispatch, register


class Holder:
    def __init__(self, data):
        self.data = data


class Reader(Plane):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def show(self, data):
        rows = data.non_tensor_batch["o"]
        return [ray.get(row["ref"]) if isinstance(row, dict) else row.show() for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first_row(self, holder):
        assert isinstance(holder.data.batch, RemoteBatch)
        return int(holder.data.batch["big"][0, 0])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def show_nested(self, data):
        for row in data.batch["nested"].get("o").tolist():
            row["shown"] = ray.get(row["ref"]) if "ref" in row else row["note"].show()
        return data


@pytest.fixture(scope="module")
def group(plane_backends):
    host = plane_backends["ray"]
    pool = host.resource_pool([2], use_gpu=False)
    group = host.worker_group(pool, host.class_with_args(Reader))
    yield group
    pool.release()


def test_references_in_rows_are_kept(group):
    data = DataProto.from_dict(non_tensors={"o": [{"ref": ray.put(i)} for i in range(4)]})
    assert encode(data.non_tensor_batch["o"], "o")[0].kind == "raw"
    future = group.show.submit(data)
    del data
    gc.collect()
    assert future.get() == [[0, 1], [2, 3]]


def loaded_by_path(tmp_path, name):
    path = tmp_path / "a_file_of_the_user.py"
    path.write_text("class Note:\n    def show(self):\n        return 'shown'\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["a_file_of_the_user", "email.a_file_of_the_user", "this"]
)  # no other module has the name; a package has no such module; another file has the name
def test_classes_of_files_loaded_by_path_are_left_to_the_transport(
    tmp_path, group, name, monkeypatch
):
    monkeypatch.setitem(sys.modules, name, None)  # removed after the test
    # One class: pickle itself refuses one that was replaced.
    note = loaded_by_path(tmp_path, name).Note
    rows = object_array([note() for _ in range(4)])
    assert encode(rows, "o")[0].kind == "raw"
    assert group.show(DataProto.from_dict(non_tensors={"o": rows})) == [["shown"] * 2] * 2
    assert encode(object_array([np.float32(1), {"k": {1}}]), "o")[0].kind == "objects"


def nested_batch(rows):
    objects = NonTensorStack(*map(NonTensorData, rows))
    nested = TensorDict({"o": objects, "n": torch.arange(len(rows))}, batch_size=[len(rows)])
    return DataProto.from_dict({"nested": nested})


def test_a_batch_with_such_objects_in_a_nested_tensordict_is_left_to_the_transport():
    message = pack_argument(nested_batch([lambda: 1, lambda: 2]), RayStore())
    assert message.data_bytes() is None
    plain = pack_argument(nested_batch([{"k": 1}, "text"]), RayStore())
    assert plain.data_bytes() is not None


def test_such_objects_in_a_nested_tensordict_arrive_and_come_back(tmp_path, group):
    note = loaded_by_path(tmp_path, "another_file_of_the_user").Note
    rows = [{"ref": ray.put("a")}, {"note": note()}, {"note": note()}, {"ref": ray.put("b")}]
    shown = group.show_nested(nested_batch(rows)).batch["nested"]
    assert [row["shown"] for row in shown.get("o").tolist()] == ["a", "shown", "shown", "b"]
    assert shown["n"].tolist() == [0, 1, 2, 3]


def test_a_pickled_batch_has_its_bytes(group):
    data = group.generate(DataProto.from_dict({"row": torch.arange(4)}))
    assert isinstance(data.batch, RemoteBatch)
    dumped = [pickle.dumps(value) for value in (data, data.batch, data.select(["big"]))]
    del data
    gc.collect()
    time.sleep(0.5)
    for value in map(pickle.loads, dumped):
        batch = value.batch if isinstance(value, DataProto) else value
        assert batch["big"][:, 0].tolist() == [0, 1, 2, 3]


def test_a_batch_inside_an_object_is_sent_as_references(group):
    data = group.generate(DataProto.from_dict({"row": torch.arange(4)}))
    again = ray.get(ray.put({"inside": [data]}))["inside"][0]
    assert isinstance(again.batch, RemoteBatch)
    keys = [[h.key for h in batch.batch.columns["big"].handles] for batch in (data, again)]
    assert keys[0] == keys[1]
    traffic.reset()
    assert group.first_row(Holder(data)) == [0, 0]  # in a call, too
    assert traffic.reset().fetched_bytes == 0
