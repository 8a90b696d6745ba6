"""Interpolations whose default is an interpolation, as in the settings files that verl ships."""

import pytest

from quadriga.compat.verl_settings import TRAIN, read_verl
from quadriga.config.loading import MAX_NESTED, check_interpolations, load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError


def nested(depth, innermost="7"):
    """`${oc.select:none.k1,${oc.select:none.k0,7}}` for a depth of 2."""
    text = innermost
    for level in range(depth):
        text = f"${{oc.select:none.k{level},{text}}}"
    return text


def test_a_default_may_be_an_interpolation(tmp_path):
    file = tmp_path / "ppo_trainer.yaml"
    text = "${oc.select:profile.seed,${oc.select:global_profile.seed,7}}"
    file.write_text(f"data: {{seed: '{text}'}}\n")
    assert read_verl(TrainConfig, TRAIN, file).config.data.seed == 7
    for override in ("+global_profile.seed=5", "+profile.seed=5"):
        assert read_verl(TrainConfig, TRAIN, file, [override]).config.data.seed == 5
    assert load_config(TrainConfig, file=file).data.seed == 7


def test_the_depth_of_defaults_is_limited():
    check_interpolations({"a": nested(MAX_NESTED + 1)})
    for depth in (MAX_NESTED + 2, 10_000):
        with pytest.raises(ConfigError, match=r"a: an interpolation .* inside another one"):
            check_interpolations({"a": nested(depth)})


@pytest.mark.parametrize(
    "text",
    ["${a.${b}}", "${oc.select:${b},3}", "${oc.select:a,x${b}}", "${oc.select:a,${b}", "${${a}}"],
)
def test_no_interpolation_is_part_of_a_name(text):
    with pytest.raises(ConfigError, match=r"k: an interpolation that is not closed, or inside"):
        check_interpolations({"k": text, "a": "1", "b": "2"})


@pytest.mark.timeout(60)  # texts that double 40 times
def test_defaults_that_double_are_refused_before_they_are_resolved():
    values = {"a0": "x" * 10}
    values |= {
        f"a{i}": f"${{oc.select:none,${{a{i - 1}}}}}${{oc.select:none, ${{a{i - 1}}}}}"
        for i in range(1, 40)
    }
    with pytest.raises(ConfigError, match="stand for more than"):
        check_interpolations(values)
