"""Ports, environment variables, visible devices."""

import os
import socket

import pytest

from quadriga.errors import ConfigError, PlacementError
from quadriga.single_controller import Dispatch, Worker, ray_noset_visible_devices, register
from quadriga.single_controller.environment import (
    NOSET_FLAGS,
    RankEnvironment,
    ReservedPort,
    device_index,
    environment,
    unify_visible_devices,
    visible_devices,
)


def test_a_worker_reads_its_place_from_environment_variables():
    place = RankEnvironment(3, 8, 1, 2, "10.0.0.5", "2345", "run_")

    class Silent(Worker):
        def __init__(self):  # does not call super().__init__()
            self.value = 1

    with environment(place.variables()):
        worker, silent = Worker(), Silent()
    for made in (worker, silent):
        assert (made.rank, made.world_size, made.local_rank, made.local_world_size) == (3, 8, 1, 2)
        assert (made.master_address, made.master_port) == ("10.0.0.5", "2345")
        assert made.worker_group_prefix == "run_"


def test_a_variable_that_is_not_a_number_is_refused():
    with pytest.raises(ConfigError, match="variable LOCAL_RANK must be a whole number, got 'two'"):
        RankEnvironment.read({"RANK": "2", "LOCAL_RANK": "two"})
    assert RankEnvironment.read({"RANK": ""}) == RankEnvironment()


def test_a_port_within_a_range_is_reserved_and_a_server_can_bind_it():
    first = ReservedPort.choose()
    span = (first.port, first.port + 20)
    second = ReservedPort.choose(span)  # the first of the range is taken
    third = ReservedPort.choose(span)
    assert first.port < second.port < third.port < span[1]
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", second.port))
        server.listen()
    with pytest.raises(PlacementError, match="is free on this machine"):
        ReservedPort.choose((first.port, first.port + 1))
    for reserved in (first, second, third):
        reserved.release()


def test_visible_devices_of_all_vendors():
    assert visible_devices({}) is None
    assert visible_devices({"HIP_VISIBLE_DEVICES": "0,1"}) == "0,1"
    same = {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible_devices(same) == "0,1"
    with pytest.raises(PlacementError, match=r"CUDA_VISIBLE_DEVICES=0, ROCR_VISIBLE_DEVICES=1"):
        visible_devices({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"})


def test_visible_devices_are_moved_to_one_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    assert unify_visible_devices() == "4,5"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "ROCR_VISIBLE_DEVICES" not in os.environ


def test_the_eight_noset_flags():
    assert len(NOSET_FLAGS) == 8
    assert not ray_noset_visible_devices({})
    assert not ray_noset_visible_devices({NOSET_FLAGS[0]: "0"})
    assert all(ray_noset_visible_devices({flag: "1"}) for flag in NOSET_FLAGS)


def test_the_device_of_a_rank():
    assert device_index(local_rank=3, devices="5", noset=False) == 0
    assert device_index(local_rank=3, devices="0,1,2,3", noset=True) == 3
    assert device_index(local_rank=1, devices=None, noset=False) == 1


class Reader(Worker):
    def __init__(self):
        super().__init__()
        self.at_start = os.environ.get("MINE")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self):
        return self.at_start, os.environ.get("MINE"), os.environ["RANK"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("worker_env", "values"),
    [
        ({"MINE": "all"}, ["all", "all", "all"]),
        ([{"MINE": "a"}, {}, {"MINE": "c"}], ["a", None, "c"]),
        (lambda rank: {"MINE": str(10 * rank)}, ["0", "10", "20"]),
    ],
    ids=["mapping", "list", "function"],
)
def test_variables_of_each_rank(start, worker_env, values):
    group = start(Reader, 3, worker_env=worker_env)
    assert group.read() == [(value, value, str(rank)) for rank, value in enumerate(values)]
    assert "MINE" not in os.environ


@pytest.mark.parametrize(
    ("worker_env", "words"),
    [
        ([{}, {}], "worker_env has 2 entries for 3 ranks"),
        ({"MINE": 1}, "worker_env of rank 0: .*'MINE': 1"),
        ({"WORLD_SIZE": "9"}, "worker_env of rank 0 has WORLD_SIZE, which the worker group sets"),
        (lambda rank: {"MINE": None} if rank == 2 else {}, "worker_env of rank 2"),
    ],
)
def test_wrong_variables_are_refused_before_the_start(start, worker_env, words):
    with pytest.raises(ConfigError, match=words):
        start(Reader, 3, worker_env=worker_env)
