"""Links, pipes and devices in place of files, and models of absurd sizes: one line, exit code 2.

Links to other files are followed: the cache of the hub holds models as links.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from quadriga.cli.main import main
from quadriga.models import check_model_folder, load_tokenizer

pytestmark = pytest.mark.timeout(25)
ROW = {"prompt": "one two", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "3"}}


@pytest.fixture(scope="module")
def original(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    shutil.copytree(model_folder, path / "model")
    (path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (path / "settings.yaml").write_text("trainer: {seed: 1}\n")
    (path / "rules.py").write_text("def compute_score(**_):\n    return 1.0\n")
    return path


@pytest.fixture
def inputs(original, tmp_path):
    """A folder with everything that a run reads. A test replaces one file of it."""
    return shutil.copytree(original, tmp_path / "inputs")


@pytest.fixture
def refused(inputs, tmp_path, capsys, monkeypatch):
    """refused("a=b", …) returns the line that `quadriga train` prints; no worker is built."""
    import quadriga.single_controller.worker as worker

    def no_worker(*_args, **_kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker.Worker, "__init__", no_worker)

    def _refused(*more):
        settings = [
            f"actor_rollout_ref.model.path={inputs / 'model'}",
            f"data.train_files=[{inputs / 'rows.jsonl'}]",
            "data.train_batch_size=1",
            "data.max_response_length=8",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "trainer.backend=local",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
        code = main(["train", *settings, *more])
        lines = capsys.readouterr().err.strip().splitlines()
        if lines[0].startswith("train runs the code of "):
            del lines[0]
        assert (code, len(lines)) == (2, 1), lines[-1]
        assert lines[0].startswith("error: ") and len(lines[0]) < 2100
        return lines[0]

    return _refused


def test_unchanged_inputs_are_not_refused(inputs, refused):
    with pytest.raises(AssertionError, match="a worker was started"):
        refused(f"reward.path={inputs / 'rules.py'}")


def loop(path):
    path.symlink_to(path.name)


def dangling(path):
    path.symlink_to(path.with_name("nothing"))


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


KINDS = pytest.mark.parametrize("kind", [loop, dangling, pipe, endless, folder])


def replace(path, kind):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind(path)


MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
               "generation_config.json", "chat_template.jinja")  # fmt: skip


@KINDS
@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_file_of_a_model_folder_that_is_no_file_is_refused(inputs, refused, name, kind):
    replace(inputs / "model" / name, kind)
    if kind is folder and name in ("generation_config.json", "chat_template.jinja"):
        load_tokenizer(inputs / "model")  # a folder with this name is not read
    else:
        assert str(inputs / "model") in refused()


@KINDS
@pytest.mark.parametrize("name", ["rows.jsonl", "rules.py", "model"])
def test_an_input_that_is_no_file_is_refused(inputs, refused, name, kind):
    replace(inputs / name, kind)
    assert str(inputs / name) in refused(f"reward.path={inputs / 'rules.py'}")


@KINDS
def test_a_settings_file_that_is_no_file_is_refused(inputs, refused, kind):
    replace(inputs / "settings.yaml", kind)
    told = refused("--config", str(inputs / "settings.yaml"))
    assert str(inputs / "settings.yaml") in told
    assert kind in (loop, dangling) or "it is not a regular file" in told


@KINDS
@pytest.mark.parametrize("place", ["run", "checkpoints", "resumed"])
def test_a_run_folder_that_is_no_folder_is_refused(tmp_path, refused, kind, place):
    path = {"run": tmp_path / "run", "checkpoints": tmp_path / "run" / "checkpoints",
            "resumed": tmp_path / "global_step_2"}[place]  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    kind(path)
    mode = path if place == "resumed" else "auto"
    if kind is folder and place != "resumed":
        with pytest.raises(AssertionError, match="a worker was started"):  # in the empty folder
            refused(f"trainer.resume_mode={mode}")
        return
    assert str(path) in refused(f"trainer.resume_mode={mode}")


def test_links_to_files_are_followed(inputs, tmp_path):
    """As in the cache of the hub: a folder of links to files with digests as names."""
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in (inputs / "model").iterdir():
        (links / file.name).symlink_to(file)
    check_model_folder(links)
    (tmp_path / "link").symlink_to(links)
    check_model_folder(Path(tmp_path / "link"))


@pytest.mark.parametrize(
    "setting",
    ["hidden_size=1000000000", "num_layers=1000000", "num_heads=1000000000",
     "intermediate_size=1000000000000", "train_size=1000000000000", "max_number=1e30"],
)  # fmt: skip
def test_a_tiny_model_of_absurd_sizes_is_not_built(setting, tmp_path, capsys):
    code = main(["data", "make", f"output={tmp_path / 'd'}", f"model_output={tmp_path / 'm'}",
                 setting])  # fmt: skip
    lines = capsys.readouterr().err.strip().splitlines()
    assert (code, len(lines)) == (2, 1), lines
