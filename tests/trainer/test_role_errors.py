"""A mistake in a role of a user gives one line that names it, before any worker starts."""

import pytest
from role_cases import write_tally

from quadriga.backends import get_backend
from quadriga.errors import ConfigError, UnknownNameError
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.registry import ResourcePoolManager, Role, load_train_config


@pytest.fixture
def refused(refused, own_roles, tmp_path):
    """refused((old, new), …, "a=b", …) returns the error that `quadriga train` prints."""

    def _refused(*given: str | tuple[str, str]) -> str:
        changes = [one for one in given if isinstance(one, tuple)]
        more = [one for one in given if isinstance(one, str)]
        return refused(write_tally(tmp_path, *changes), *more, runs=[str(tmp_path / "tally.py")])

    return _refused


SETTINGS = {
    "no snapshot": ("trainer.snapshot_freq=1", "role tally: TallyWorker has a save_checkpoint of"),
    "a misspelt key": ("tally.wieght=2", "no setting tally.wieght; did you mean tally.weight?"),
    "an unknown key": ("tally.zzz=2", "no setting tally.zzz; section tally has weight, kind"),
    "a wrong type": ("tally.weight=much", "tally.weight must be a number, got the text 'much'"),
    "a check of its own": ("tally.weight=-1", "tally: weight must be at least 0, got -1.0"),
    "an unknown role": ("placement.taly=[0]", "did you mean placement.tally?"),
    "a rank that does not exist": ("placement.tally=[1]", "placement.tally names rank 1, but"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_wrong_setting_of_a_role_is_named(refused, case) -> None:
    override, words = SETTINGS[case]
    assert words in refused(override)


def test_rows_that_do_not_divide_over_the_ranks_of_a_role_are_named(refused) -> None:
    line = refused("trainer.n_gpus_per_node=4", "placement.actor=[0]", "placement.tally=[1-3]")
    assert "= 16 sequences do not divide over 3 ranks (placement.tally)" in line


READS = 'reads=("response_mask", "token_level_scores")'
AFTER = 'after="score_responses"'
END = "    settings=TallyConfig,\n"
OTHER = 'Role.add("Tally"),\n'

CODE = {
    "no worker class": (("    worker=TallyWorker,\n", ""), "role tally has no worker class; pass"),
    "no such method": (
        ('"add_bonus",', '"add_bonuses",'),
        "role tally: the trainer calls add_bonuses, but TallyWorker has no such registered method",
    ),
    "a method that returns a list": (
        ("dispatch_mode=Dispatch.DP_COMPUTE_PROTO", "dispatch_mode=Dispatch.ONE_TO_ALL"),
        "TallyWorker.add_bonus has dispatch mode ONE_TO_ALL, which splits no batch; use Dispatch",
    ),
    "a constructor with more arguments": (
        ("config: TallyConfig)", "config: TallyConfig, folder: str)"),
        "the constructor of TallyWorker is given runtime and config: missing a required argument",
    ),
    "a state that cannot be loaded": (
        ("def load_checkpoint", "def load_state"),
        "the trainer calls load_checkpoint, but TallyWorker has no such registered method",
    ),
    "a field that no stage writes": (
        (READS, 'reads=("response_mask", "judgement")'),
        "stage tally.add_bonus reads field 'judgement', but with these settings no earlier stage",
    ),
    "no field": ((READS, "reads=()"), "stage tally.add_bonus reads no field; name at least one"),
    "a misspelt place": (
        (AFTER, 'after="score_response"'),
        "stands after 'score_response', which this run does not have; did you mean score_response",
    ),
    "a place that this run does not have": (
        (AFTER, 'before="compute_values"'),
        "stands before 'compute_values', which this run does not have; ",
    ),
    "two places": (
        (AFTER, f'{AFTER}, before="measure_batch"'), "must stand before or after one stage, got",
    ),
    "a start order with a cycle": (
        (END, f"{END}    starts_after=[Role.Actor],\n    starts_before=[Role.Rollout],\n"),
        "the start order of the roles has a cycle: ",
    ),
    "a start order with a role that is not registered": (
        (END, f"{END}    starts_after=[Role.add('Absent')],\n"),
        "role tally is to start before or after role absent, which is not part of the run",
    ),
    "a key that is a section": (
        (OTHER, 'Role.add("Tally", key="data"),\n'),
        "role Tally has key 'data', which is no identifier, or names a section of the settings",
    ),
    "a built-in role": ((OTHER, "Role.Critic,\n"), "role critic is built in; to replace its"),
    "settings that can change": (
        ("@dataclass(frozen=True)", "@dataclass"),
        "settings must be a class with @dataclass(frozen=True), got",
    ),
    "two roles with one key": (
        ("register_role(\n", "register_role(Role.add('Count', key='tally'))\nregister_role(\n"),
        "role tally is registered already as role Count, by ",
    ),
    "a setting without default": (
        ("weight: float = 1.0", "weight: float"), "setting weight of TallyConfig has no default",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CODE)
def test_a_mistake_in_the_file_is_named(refused, case) -> None:
    change, words = CODE[case]
    assert words in refused(change)


def test_a_field_that_is_being_computed_is_named(refused) -> None:
    """The passes run while the responses are scored if no row is left out of them."""
    line = refused(
        (READS, 'reads=("old_log_probs",)'), "actor_rollout_ref.actor.skip_zero_advantages=false"
    )
    assert "stage tally.add_bonus reads field 'old_log_probs' (written by compute_log_prob" in line


def test_two_stages_with_one_method_are_refused(own_roles) -> None:
    stage = RoleStage("score", reads=("uid",), before="shape_scores")
    with pytest.raises(ConfigError, match="role tally has two stages that call score"):
        register_role(Role.add("Tally"), stages=[stage, stage])


def test_a_role_without_a_pool_of_the_program_is_named(
    train_overrides, tmp_path, own_roles
) -> None:
    config = load_train_config([*train_overrides, write_tally(tmp_path)])
    manager = ResourcePoolManager({"a": [1]}, {Role.ActorRollout: "a"}, get_backend("local"))
    with pytest.raises(UnknownNameError, match="needs role tally, which is mapped to no pool"):
        RayPPOTrainer(config, resource_pool_manager=manager)


def test_a_program_may_register_its_role_again(own_roles) -> None:
    register_role(Role.add("Tally"))
    stage = RoleStage("score", reads=("uid",), before="shape_scores")
    assert register_role(Role.add("Tally"), stages=[stage]).stages == (stage,)
    with pytest.raises(ConfigError, match="registered already as role Tally, by the program"):
        register_role(Role.add("Count", key="tally"))
