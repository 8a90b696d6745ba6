"""Registries of modes and what `@register` records."""

import pickle
from functools import partial

import pytest
import torch

from group_fixtures import local_group
from quadriga.errors import DispatchError, LengthError, UnknownNameError
from quadriga.single_controller import (
    Dispatch,
    Execute,
    Worker,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
    update_execute_mode,
    with_hooks,
)
from quadriga.single_controller.worker import registered_methods


@pytest.fixture(autouse=True)
def clean_registries():
    yield
    for registry in (Dispatch, Execute):
        for mode in registry.added():
            registry.remove(mode.name)


start = partial(local_group, ranks=4)


def test_the_builtin_modes():
    named = (
        "RANK_ZERO ONE_TO_ALL ALL_TO_ALL DP_COMPUTE DP_COMPUTE_PROTO DP_COMPUTE_PROTO_WITH_FUNC "
        "DP_COMPUTE_METRIC DIRECT_ROLLOUT_METHOD MEGATRON_COMPUTE MEGATRON_COMPUTE_PROTO "
        "MEGATRON_PP_AS_DP MEGATRON_PP_AS_DP_PROTO MEGATRON_PP_ONLY"
    )
    assert {mode.name for mode in Dispatch} == set(named.split())
    assert {mode.name for mode in Execute} == {"ALL", "RANK_ZERO"}
    assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) == Dispatch.ONE_TO_ALL


def test_unknown_mode_names_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean ONE_TO_ALL"):
        Dispatch.ONE_TO_AL  # noqa: B018
    assert not hasattr(Dispatch, "NOWHERE")


def test_records():
    class W(Worker):
        @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, blocking=False)
        async def f(self):
            return 1

        @register()
        def g(self, x):
            return x

    class V(W):
        def g(self, x):
            return -x

    record = registered_methods(W)["f"]
    assert (record.dispatch_mode, record.execute_mode) == (Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    assert (record.blocking, record.materialize_futures) == (False, True)
    assert registered_methods(W)["g"].dispatch_mode == Dispatch.ALL_TO_ALL
    assert start(V).g([1, 2, 3, 4]) == [-1, -2, -3, -4]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("ONE_TO_ALL", "must be a member of Dispatch"),
        ({"dispatch_fn": len}, "exactly the keys"),
        ({"dispatch_fn": len, "collect_fn": 3}, "collect_fn must be a function"),
    ],
)
def test_register_refuses(mode, words):
    with pytest.raises(DispatchError, match=words):
        register(dispatch_mode=mode)
    with pytest.raises(DispatchError, match="member of Execute"):
        register(execute_mode="ALL")


def to_even_ranks(group, items):
    """One item for each even rank, nothing for the others."""
    even = iter(items)
    return ([next(even) if rank % 2 == 0 else None for rank in range(group.world_size)],), {}


def from_even_ranks(group, outputs):
    return outputs[::2]


def test_even_ranks_only():
    mode = register_dispatch_mode("EVEN_RANKS", to_even_ranks, from_even_ranks)

    class W(Worker):
        @register(dispatch_mode=mode)
        def twice(self, x):
            return None if x is None else (self.rank, 2 * x)

        @register(dispatch_mode={"dispatch_fn": to_even_ranks, "collect_fn": from_even_ranks})
        def thrice(self, x):
            return None if x is None else (self.rank, 3 * x)

    group = start(W)
    assert group.twice([10, 20]) == [(0, 20), (2, 40)]
    assert group.thrice([10, 20]) == [(0, 30), (2, 60)]
    with pytest.raises(DispatchError, match=r"Dispatch\.EVEN_RANKS exists already"):
        register_dispatch_mode("EVEN_RANKS", to_even_ranks, from_even_ranks)
    # A mode that is replaced affects methods that are registered already.
    update_dispatch_mode(mode, to_even_ranks, lambda group, outputs: outputs[1::2])
    assert group.twice([1, 2]) == [None, None]


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda x: (([x],), {}), LengthError, r"W\.call: .* split into 1 parts for 4"),
        (lambda x: ((x,), {}), DispatchError, r"W\.call: .*got int"),
        (lambda x: x, DispatchError, r"W\.call: .*\(args, kwargs\)"),
    ],
)
def test_wrong_results_of_a_dispatch_function_are_refused(result, error, words):
    mode = {"dispatch_fn": lambda group, x: result(x), "collect_fn": lambda group, outputs: outputs}

    class W(Worker):
        @register(dispatch_mode=mode)
        def call(self, x): ...

    with pytest.raises(error, match=words):
        start(W).call(1)


def test_hooks_before_and_after_each_call_and_future():
    seen = []
    factory = with_hooks(
        before=lambda label, args, kwargs: seen.append((label, args, kwargs)),
        after=lambda label, value: seen.append((label, value)),
    )

    class W(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def add(self, x, y=0):
            return x + y

    group = start(W, ranks=2, method_factory=factory, role="adder")
    assert group.add(1, y=2) == [3, 3]
    assert seen == [("adder.add", (1,), {"y": 2}), ("adder.add", [3, 3])]
    assert group.add.options(timeout=5)(1) == [1, 1]
    assert len(seen) == 4
    future = group.add.submit(5)
    assert len(seen) == 5
    assert future.get() == future.get() == [5, 5]
    assert len(seen) == 6  # once, although read twice
    assert pickle.loads(pickle.dumps(group.add.submit(3))).get() == [3, 3]
    assert len(seen) == 7  # a pickled future has no hook


def test_an_adopted_mode_may_be_added_once_more_by_its_file():
    """A worker process adopts the modes of the controller first. It then imports the file that adds
    them, because it needs a class of that file."""
    mode = register_dispatch_mode("MINE", to_even_ranks, from_even_ranks)
    Dispatch.remove("MINE")
    Dispatch.adopt([mode])
    assert register_dispatch_mode("MINE", to_even_ranks, from_even_ranks) == mode
    with pytest.raises(DispatchError, match="exists already"):
        register_dispatch_mode("MINE", to_even_ranks, from_even_ranks)


def test_a_tensordict_is_a_batch():
    from tensordict import TensorDict

    class W(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def twice(self, data):
            data["a"] = data["a"] * 2
            return data

    group = start(W, ranks=2)
    ragged = torch.nested.nested_tensor(
        [torch.arange(n) for n in (2, 1, 3, 2)], layout=torch.jagged
    )
    doubled = group.twice(TensorDict({"a": torch.arange(4), "ids": ragged}, [4]))
    assert isinstance(doubled, TensorDict)
    assert doubled["a"].tolist() == [0, 2, 4, 6]
    assert [row.tolist() for row in doubled["ids"].unbind()] == [[0, 1], [0], [0, 1, 2], [0, 1]]
    with pytest.raises(LengthError, match="has 3 rows"):
        group.twice(TensorDict({"a": torch.arange(3)}, [3]))


def test_a_mode_that_is_replaced_is_given_itself_and_not_by_name():
    with pytest.raises(DispatchError, match="must be a member of Dispatch, got 'ONE_TO_ALL'"):
        update_dispatch_mode("ONE_TO_ALL", max, max)
    with pytest.raises(DispatchError, match="must be a member of Execute, got 'ALL'"):
        update_execute_mode("ALL", max)


def test_tracebacks_show_the_name_of_the_method():
    import traceback

    class W(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def update_actor(self):
            raise ValueError

    with pytest.raises(Exception) as caught:
        start(W, ranks=1).update_actor()
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert "update_actor" in frames[:4]
