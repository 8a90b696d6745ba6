"""Every example in examples/controller runs and returns what its docstring says."""

import sys
from pathlib import Path

import pytest

from processes import run_python
from quadriga.backends import get_backend
from quadriga.containment import import_file
from quadriga.single_controller import Dispatch, Execute

on_ray_nightly = pytest.mark.parametrize(
    "backend_name", ["local", pytest.param("ray", marks=pytest.mark.nightly)], indirect=True
)
FOLDER = Path(__file__).parents[2] / "examples" / "controller"


@pytest.fixture(scope="module")
def backend_name(request):
    """Both backends. All examples run on one Ray cluster, which receives their files."""
    backend = get_backend(request.param)
    backend.start(num_cpus=4, object_store_memory=150 * 2**20)
    yield request.param
    backend.shutdown()


@pytest.fixture
def example(monkeypatch):
    def load(name):
        monkeypatch.setitem(sys.modules, name, None)  # removed after the test
        return import_file(FOLDER / f"{name}.py", "example", name)

    yield load
    for registry in (Dispatch, Execute):
        for mode in registry.added():
            registry.remove(mode.name)


@on_ray_nightly
def test_accumulator(example, backend_name):
    assert example("accumulator").main(backend_name) == [1, 2, 3, 4]


@on_ray_nightly
def test_data_parallel(example, backend_name):
    by_hand, as_method = example("data_parallel").main(backend_name)
    assert by_hand.shape == (4,)
    assert by_hand.tolist() == as_method.tolist()


@on_ray_nightly
def test_padding(example, backend_name):
    result = example("padding").main(backend_name)
    assert result.batch["y"].tolist() == [i * i for i in range(10)]
    assert result.batch["rows_of_rank"].tolist() == [3] * 10


@on_ray_nightly
def test_own_modes(example, backend_name):
    doubled, half, counted = example("own_modes").main(backend_name)
    assert doubled == [20, 40]
    assert half == [0, 1]
    assert counted.batch["tokens"].tolist() == [8, 7, 1, 2, 6, 3, 5, 4]
    assert counted.batch["of_rank"].tolist() == [9] * 8  # 8+1, 7+2, 6+3, 5+4


@on_ray_nightly
def test_kl_divergence(example, backend_name):
    kl = example("kl_divergence").main(backend_name)
    assert kl.shape == (4, 2)
    assert kl.abs().max() < 1e-6


@on_ray_nightly
def test_new_role(example, backend_name):
    assert example("new_role").main(backend_name) == [-2.0, -1.0, -3.0, 0.0]


@on_ray_nightly
def test_fused_roles(example, backend_name):
    seen = example("fused_roles").main(backend_name)
    assert list(seen.values()) == [[1, 2], [10, 20], [10, 20], [1, 2], [10, 20]]


@on_ray_nightly
def test_hooks(example, backend_name):
    assert example("hooks").main(backend_name) == [
        "Adder.add receives [5]",
        "Adder.add returns [5, 6]",
    ]


@on_ray_nightly
def test_two_policies(example, backend_name):
    counts = example("two_policies").main(backend_name)
    assert len(counts) == 6
    for first, *_, last in zip(*counts, strict=True):  # of one policy
        assert first < 1 and last > 3, counts


@on_ray_nightly
def test_tree_search(example, backend_name):
    sampled, found = example("tree_search").main(backend_name)
    assert found > sampled + 2


def test_by_hand(example):
    assert example("by_hand").main() == ["rank 0 of 2: 12", "rank 1 of 2: 16"]


@pytest.mark.parametrize("backend_name", ["ray"], indirect=True)
def test_detached_group(example, backend_name):
    assert "the second program counts [2, 2]" in example("detached_group").main()


@pytest.mark.nightly
def test_an_example_runs_as_a_script():
    assert "[1, 2, 3, 4]" in run_python(FOLDER / "accumulator.py", "ray").stdout
