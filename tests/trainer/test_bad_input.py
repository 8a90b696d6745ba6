"""A mistake of the user gives one line that names it and exit code 2, before a worker starts."""

import json
import sys

import pytest


def test_a_row_without_a_prompt_is_named(refused, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"prompt": "1+1?", "data_source": "x", "reward_model": {"ground_truth": "2"}}
    file.write_text(json.dumps(good) + "\n" + json.dumps({"question": "?"}) + "\n")
    line = refused(f"data.train_files=[{file}]", "data.train_batch_size=1",
                   "actor_rollout_ref.actor.ppo_mini_batch_size=1")  # fmt: skip
    assert f"{file}, row 1" in line and "'prompt'" in line


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"data_source": "openai/gsm8"}, ["openai/gsm8k"]),
        (
            {"data_source": None},
            ["there is no rule function for data_source None", "the column data_source is missing"],
        ),
        ({"reward_model": {}}, ["reward_model must be a dict with 'ground_truth', got {}"]),
    ],
)
def test_one_row_that_cannot_be_scored_is_named(refused, tmp_path, bad, said) -> None:
    good = {"prompt": "1+1?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*[good] * 9, good | bad]))
    for key in ("data.train_files", "data.val_files"):
        line = refused(f"{key}=[{file}]")
        assert all(text in line for text in (f"{file}: row 9 cannot be scored", *said))


def test_a_device_that_this_process_cannot_see_is_named(refused, monkeypatch) -> None:
    monkeypatch.setattr("quadriga.parallel.device.get_device_name", lambda: "cpu")
    line = refused("trainer.device=cuda")
    assert "trainer.device=cuda needs such a device" in line
    assert "set trainer.device=cpu or auto" in line


def test_a_folder_without_a_model_is_named(refused, tmp_path) -> None:
    line = refused(f"actor_rollout_ref.model.path={tmp_path}")
    assert str(tmp_path) in line and "config.json" in line


def test_an_empty_path_names_its_setting(refused) -> None:
    assert "actor_rollout_ref.model.path is empty" in refused("actor_rollout_ref.model.path=")
    assert "data.train_files is empty" in refused("data.train_files=")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["actor_rollout_ref.rollout.name=vllm"], "set actor_rollout_ref.rollout.name=hf"),
        (["actor_rollout_ref.rollout.options.swap_space=4"],
         "rollout engine 'hf' has no options ['swap_space']"),
        (["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.model.lora.rank=4",
         f"actor_rollout_ref.rollout.options.python={sys.executable}",
         "actor_rollout_ref.rollout.load_adapters=true"],
         "load_adapters=true needs rollout.name=vllm"),
    ],
)  # fmt: skip
def test_an_engine_or_option_that_is_not_there_is_named(refused, settings, said) -> None:
    assert said in refused(*settings)


def test_a_missing_reward_file_is_named(refused, tmp_path) -> None:
    assert "gone.py" in refused(f"reward.path={tmp_path}/gone.py")


@pytest.mark.nightly
def test_more_ranks_than_the_node_can_hold_are_reported(refused) -> None:
    line = refused("trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=4")
    assert "4" in line and "CPU" in line
