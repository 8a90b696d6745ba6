"""A model of the hub is trained and exported by its name, here from a cache without a network."""

from __future__ import annotations

import os
import shutil

import pytest

from processes import quadriga

pytestmark = pytest.mark.nightly

NAME, COMMIT = "hf://owner/tiny", "0" * 40


@pytest.fixture
def hub(tiny_task, tmp_path) -> dict[str, str]:
    """The environment of a process whose cache of the hub holds the tiny model as `owner/tiny`."""
    home = tmp_path / "home"
    entry = home / "hub" / "models--owner--tiny"
    shutil.copytree(tiny_task.model, entry / "snapshots" / COMMIT)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(COMMIT)
    return {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def test_a_name_of_the_hub_trains_exports_and_generates(hub, train_overrides, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = [
        *train_overrides,
        f"actor_rollout_ref.model.path={NAME}",
        "algorithm.adv_estimator=gae",
        f"critic.model.path={NAME}",
    ]
    quadriga("train", *named, "trainer.total_training_steps=1", env=hub)
    exported = tmp_path / "run" / "model"
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(exported).chat_template
    asked = f"model.path={NAME}", "prompt='1 and 2?'", "max_response_length=4"
    quadriga("generate", *asked, env=hub)
