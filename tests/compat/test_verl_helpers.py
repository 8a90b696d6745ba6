"""Helpers of verl's programs: places of workers, files, pools, entry points, options of groups."""

from pathlib import Path

import fsspec
import pytest

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from group_fixtures import local_group
from quadriga.errors import ConfigError, DispatchError, ModelError, PlacementError


def test_a_path_of_this_machine_needs_no_copy(tmp_path, monkeypatch):
    from verl.utils.fs import copy_to_local

    monkeypatch.setenv("HOME", str(tmp_path))
    assert copy_to_local("models/small", use_shm=False) == "models/small"
    assert copy_to_local("~/small") == f"{tmp_path}/small"
    fsspec.filesystem("memory").pipe_file("memory://a/small/config.json", b"{}")
    copy = Path(copy_to_local("memory://a/small"))
    assert (copy / "config.json").read_text() == "{}" and copy.is_relative_to(tmp_path)
    with pytest.raises(ConfigError, match="no file system is known for xs://"):
        copy_to_local("xs://a")
    with pytest.raises(ConfigError, match="cache_dir='~/cache'; remote files are cached in"):
        copy_to_local("memory://a/small", "~/cache")


def test_an_error_is_of_the_class_that_verl_raises_too():
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import (
        Dispatch,
        dummy_direct_rollout_call,
        register,
        register_dispatch_mode,
    )

    from quadriga.single_controller.resource_pool import NodeResources, PoolNeeds, check_feasible

    class Server(Worker):
        @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
        def chat(self): ...

    group, pool = local_group(Server, 2), PoolNeeds("p", (8,), {"GPU": 1})
    for builtin, own, call in (
        (AssertionError, DispatchError, lambda: register_dispatch_mode("ONE_TO_ALL", len, len)),
        (NotImplementedError, DispatchError, lambda: group.chat()),
        (NotImplementedError, DispatchError, lambda: dummy_direct_rollout_call(group)),
        (ValueError, PlacementError, lambda: check_feasible([pool], [NodeResources("n", {})])),
    ):
        with pytest.raises(builtin) as caught:
            call()
        assert isinstance(caught.value, own)


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A tokenizer in a folder with the name of the model whose end token verl corrects."""
    from quadriga.models import train_tokenizer

    folder = tmp_path / "gemma-2-2b-it"
    tokenizer = train_tokenizer(["one two"])
    tokenizer.add_tokens(["<end_of_turn>"])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


def test_the_end_token_of_gemma_2_is_that_of_a_turn(tokenizer_folder):
    from verl.utils import hf_tokenizer

    assert hf_tokenizer(tokenizer_folder).eos_token == "<end_of_turn>"
    unchanged = hf_tokenizer(tokenizer_folder, correct_gemma2=False).eos_token
    assert unchanged != "<end_of_turn>"
    assert hf_tokenizer(tokenizer_folder, eos_token=unchanged).eos_token == unchanged


def test_options_of_tokenizers_have_their_effect_or_are_refused(tokenizer_folder):
    from verl.utils import hf_tokenizer

    plain = hf_tokenizer(tokenizer_folder, True, True, trust_remote_code=False)
    assert plain.padding_side == "left" and plain.pad_token_id is not None
    with pytest.raises(ModelError, match="correct_pad_token=False"):
        hf_tokenizer(tokenizer_folder, correct_pad_token=False)
    given = {"padding_side": "right", "model_max_length": 7, "pad_token": "one"}
    other = hf_tokenizer(tokenizer_folder, **given)
    assert (other.padding_side, other.model_max_length) == ("right", 7)
    assert other.pad_token_id == other.convert_tokens_to_ids("one")
    for name, value in {"revision": "main", "use_fast": False}.items():
        with pytest.raises(ConfigError, match=rf"{name}=.* is no option; .*padding"):
            hf_tokenizer(tokenizer_folder, **{name: value})
    with pytest.raises(ConfigError, match="padding_side='up' is neither left nor right"):
        hf_tokenizer(tokenizer_folder, padding_side="up")
    with pytest.raises(ConfigError, match="pad_token='nothing' is no token"):
        hf_tokenizer(tokenizer_folder, pad_token="nothing")


def test_a_role_is_found_by_the_text_that_verl_gives_it():
    from verl.trainer.ppo.ray_trainer import Role

    spelled = {"ref": Role.RefPolicy, "RM": Role.RewardModel, "critic": Role.Critic}
    assert {text: Role.from_string(text) for text in spelled} == spelled
    assert all(Role.from_string(str(role)) is role for role in Role.all())
    for unknown in ("teacher", 2):
        with pytest.raises(ConfigError, match=r"no role .*; roles: actor, rollout, .*Role\.add"):
            Role.from_string(unknown)


@pytest.fixture
def options_of_group(monkeypatch):
    """A function that makes a group of verl, and returns the options that Quadriga's receives."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    import quadriga.backends.ray
    from quadriga.compat.verl.controller import groups
    from quadriga.single_controller import Worker

    taken = []
    monkeypatch.setattr(groups, "ensure_ray", lambda: None)
    cls = quadriga.backends.ray.RayWorkerGroup
    monkeypatch.setattr(cls, "__init__", lambda self, *args, **kw: taken.append(kw))

    def made(**options):
        pool = RayResourcePool([1], use_gpu=False)
        RayWorkerGroup(pool, RayClassWithInitArgs(Worker), **options)
        return taken.pop()

    return made


def test_options_of_groups_that_quadriga_spells_in_another_way(options_of_group):
    assert options_of_group(master_port="2345") == {"master_port_range": (2345, 2346)}
    assert options_of_group(master_addr="10.0.0.1", device_name="cpu") == {"device_name": "cpu"}
    with pytest.raises(DispatchError, match=r"use_gpu=True, but .* was made with use_gpu=False"):
        options_of_group(use_gpu=True)
