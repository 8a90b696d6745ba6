"""A mistake in a role of a user gives one line that names it, before any worker starts."""

from __future__ import annotations

import pytest
from role_cases import TALLY, write_tally

from quadriga.backends import get_backend
from quadriga.cli.main import main
from quadriga.errors import ConfigError, InputError, UnknownNameError
from quadriga.trainer.dataflow import StepPlan, check_dataflow
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.placement import ResourcePoolManager, Role
from quadriga.trainer.roles.registry import load_train_config


@pytest.fixture
def refused(train_overrides, own_roles, tmp_path, capsys, monkeypatch):
    """refused((old, new), …, "a=b", …) returns the line that `quadriga train` prints."""
    import quadriga.single_controller.worker as worker

    def no_worker(*_args, **_kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "__init__", no_worker)

    def _refused(*given: str | tuple[str, str]) -> str:
        changes = [one for one in given if isinstance(one, tuple)]
        more = [one for one in given if isinstance(one, str)]
        code = main(["train", *train_overrides, write_tally(tmp_path, *changes), *more])
        lines = capsys.readouterr().err.strip().splitlines()
        assert code == 2 and len(lines) == 1, lines
        assert not (tmp_path / "run").exists()
        return lines[0]

    return _refused


SETTINGS = {
    "a misspelt key": ("tally.wieght=2", "no setting tally.wieght; did you mean tally.weight?"),
    "an unknown key": ("tally.zzz=2", "no setting tally.zzz; section tally has weight, kind"),
    "a wrong type": ("tally.weight=much", "tally.weight must be a number, got the text 'much'"),
    "a wrong choice": ("tally.kind=lng", "must be one of short, long, got 'lng'; did you mean"),
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
    "no subclass of Worker": (
        ("worker=TallyWorker", "worker=TallyConfig"), "that is a subclass of Worker, got",
    ),
    "no such method": (
        ('"add_bonus",', '"add_bonuses",'),
        "has stages that call add_bonuses, but TallyWorker has no such registered method",
    ),
    "a method that returns a list": (
        ("dispatch_mode=Dispatch.DP_COMPUTE_PROTO", "dispatch_mode=Dispatch.ONE_TO_ALL"),
        "-> 'DataProto' in dispatch mode ONE_TO_ALL; use Dispatch.DP_COMPUTE_PROTO",
    ),
    "a generator": (
        ("        self.seen += len(data)\n", "        yield data\n"), ", a generator; a stage",
    ),
    "a method that the trainer calls itself": (
        ('"add_bonus",', '"save_checkpoint",'), "which the trainer calls itself; a stage needs",
    ),
    "a method with the name of an attribute of groups": (
        ("def save_checkpoint", "def world_size"), "has a registered method world_size, as worker",
    ),
    "a constructor with more arguments": (
        ("config: TallyConfig)", "config: TallyConfig, folder: str)"),
        "the constructor of TallyWorker needs `folder`, but it is given runtime and config",
    ),
    "a state that cannot be loaded": (
        ("def load_checkpoint", "def load_state"),
        "role tally has save_checkpoint but no registered load_checkpoint",
    ),
    "a field that no stage writes": (
        (READS, 'reads=("response_mask", "judgement")'),
        "stage tally.add_bonus reads field 'judgement', but with these settings no earlier stage",
    ),
    "no field": ((READS, "reads=()"), "stage tally.add_bonus reads no field; name at least one"),
    "a misspelt place": (
        (AFTER, 'after="score_response"'),
        "stands after 'score_response', which this run does not have; did you mean score_resp",
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
        "role Tally has key 'data', which names a section of the settings",
    ),
    "a key that is no name": (
        (OTHER, 'Role.add("Tally", key="a-b"),\n'), "key 'a-b', which cannot be the name of a sect",
    ),
    "a built-in role": ((OTHER, "Role.Critic,\n"), "role critic is built in; to replace its"),
    "settings that can change": (
        ("@dataclass(frozen=True)", "@dataclass"),
        "settings must be a class with @dataclass(frozen=True), got",
    ),
    "a role that is registered twice": (
        ("register_role(\n", "register_role(Role.add('Tally'))\nregister_role(\n"),
        "role tally is registered already, by ",
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
    assert "reads old_log_probs, but beside score_responses it runs while this is computed" in line


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


def test_a_file_that_has_changed_has_only_its_new_roles(tmp_path, own_roles) -> None:
    given = write_tally(tmp_path)
    assert load_train_config([given, "tally.weight=2"]).tally.weight == 2.0
    old = load_train_config([given])
    write_tally(tmp_path, (OTHER, 'Role.add("Count"),\n'))
    assert load_train_config([given, "count.weight=2"]).count.weight == 2.0
    with pytest.raises(ConfigError, match="no setting tally"):
        load_train_config([given, "tally.weight=2"])
    with pytest.raises(UnknownNameError, match="role tally, which is not registered"):
        StepPlan.of(old)
    # A failed import leaves no role behind, and the earlier content gives its roles again.
    write_tally(tmp_path, (END, "    settings=Missing,\n"))
    with pytest.raises(InputError, match="Missing"):
        load_train_config([given])
    write_tally(tmp_path, (OTHER, 'Role.add("Count"),\n'))
    assert load_train_config([given, "count.weight=3"]).count.weight == 3.0


def test_a_program_may_register_its_role_again(own_roles) -> None:
    register_role(Role.add("Tally"))
    stage = RoleStage("score", reads=("uid",), before="shape_scores")
    assert register_role(Role.add("Tally"), stages=[stage]).stages == (stage,)
    with pytest.raises(ConfigError, match="registered already as role Tally, by the program"):
        register_role(Role.add("Count", key="tally"))


TWO_STAGES = """    stages=[
        RoleStage("mark", reads=("uid",), writes=("mark",), after="balance_over_ranks"),
        RoleStage("score", reads=("mark",), writes=("token_level_scores",),
                  before="score_responses"),
    ],
)
"""


def test_a_stage_must_have_its_fields_in_the_greedy_branch_too(
    train_overrides, tmp_path, own_roles
) -> None:
    text = TALLY[: TALLY.index("    stages=[")] + TWO_STAGES
    file = tmp_path / "two.py"
    file.write_text(text)
    given = [*train_overrides, f"algorithm.user_files=[{file}]"]
    check_dataflow(StepPlan.of(load_train_config(given)).stages)
    # Rewards of the greedy responses are computed before the ranks are balanced.
    with pytest.raises(ConfigError, match="stage add_baselines reads field 'mark'"):
        RayPPOTrainer(load_train_config([*given, "algorithm.adv_estimator=remax"]))
