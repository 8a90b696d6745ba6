"""Each command passes `chat_template_kwargs` on to the chat template of its tokenizer."""

import json

import pytest

from quadriga.config.commands import EvalConfig, GenerateConfig, RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.evaluation.evaluate import run_evaluation
from quadriga.trainer.evaluation.generate import run_generation
from quadriga.trainer.fine_tuning.rm import run_rm
from quadriga.trainer.fine_tuning.sft import run_sft
from quadriga.trainer.main import run_training

COMMANDS = {
    "train": (run_training, TrainConfig),
    "sft": (run_sft, SFTConfig),
    "rm": (run_rm, RMConfig),
    "generate": (run_generation, GenerateConfig),
    "eval": (run_evaluation, EvalConfig),
}


@pytest.fixture
def settings(train_overrides, tiny_task, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "3+4", "chosen": "7", "rejected": "8"}) + "\n")
    common = [f"model.path={tiny_task.model}", "trainer.backend=local"]
    folder = f"trainer.default_local_dir={tmp_path / 'run'}"
    return {
        "train": train_overrides,
        "sft": [*common, folder, f"data.train_files={tiny_task.data('sft')}"],
        "rm": [*common, folder, f"data.train_files=[{pairs}]", "data.train_batch_size=1"],
        "generate": [*common, "prompt=3+4"],
        "eval": [*common, f"data_files={tiny_task.data('test')}", f"output={tmp_path / 'e'}"],
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_name_that_the_template_does_not_read_is_refused(settings, name) -> None:
    run, kind = COMMANDS[name]
    key = "chat_template_kwargs" if name in ("generate", "eval") else "data.chat_template_kwargs"
    with pytest.raises(ConfigError, match="reads no enable_thinking; correct its name"):
        run(load_config(kind, [*settings[name], f"+{key}.enable_thinking=false"]))


@pytest.mark.parametrize("value", ["true", "false"])
def test_the_argument_changes_the_prompt_of_generation(tiny_task, tmp_path, value) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_task.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = "{% for m in messages %}{{ m.content }}{% if twice %}{{ m.content }}{% endif %}"
    (folder / "chat_template.jinja").write_text(template + "{% endfor %}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    from quadriga.trainer.evaluation.generate import load_prompts

    given = [
        "max_response_length=9",
        f"model.path={folder}",
        f"+chat_template_kwargs.twice={value}",
    ]
    made = load_prompts(load_config(GenerateConfig, given), "3+4")
    expected = {"true": "3+43+4", "false": "3+4"}[value]
    assert made.tokenizer.decode(made.dataset[0]["input_ids"]) == expected
