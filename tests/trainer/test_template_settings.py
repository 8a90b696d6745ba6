"""Each command passes `chat_template_kwargs` on to the chat template of its tokenizer."""

import json

import pytest

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config


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
