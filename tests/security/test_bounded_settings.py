"""Settings that are made to exhaust time or memory end in one line.

Every case has a row in the table of docs/security.md. One that is not refused in time exceeds the
deadline of its test.
"""

import pytest

from quadriga.cli.main import main
from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig

pytestmark = pytest.mark.timeout(60)


def doubling(first, line, count=40):
    """YAML text whose last line stands for 2^count values."""
    return "\n".join([first, *(line.format(this=i, last=i - 1) for i in range(1, count))]) + "\n"


YAML = {
    "aliases that double": doubling("a0: &a0 [x, x]", "a{this}: &a{this} [*a{last}, *a{last}]"),
    "mappings that double": doubling("a0: &a {x: 1}", "a{this}: &a {{p: *a, q: *a}}"),
    "an alias of itself": "algorithm: &a {options: {x: *a}}\n",
    "nested lists": "algorithm: {options: {x: " + "[" * 50_000 + "]" * 50_000 + "}}\n",
    "nested mappings": "algorithm: {options: " + "{x: " * 50_000 + "1" + "}" * 50_000 + "}\n",
    "many values": "algorithm: {options: {x: [" + "1," * 400_000 + "]}}\n",
    "a large file": "# " + "x" * (2 << 20) + "\n",
    "a huge integer": "data: {seed: " + "9" * 100_000 + "}\n",
    "another encoding": "data: {seed: 3}\n".encode("utf-16"),
    "bytes that are no text": b"data: {seed: \xff\xfe\xfa}\n",
    "a null byte": b"data: {seed: \x00}\n",
    "a Python object": "data: {seed: !!python/object/apply:os.system [echo hi]}\n",
    "an unknown tag": "data: {seed: !mine 3}\n",
    "binary data": "data: {seed: !!binary aGVsbG8=}\n",
    "a list as a key": "? [a, b]\n: 1\n",
    "a list as a section": "data: [1, 2]\n",
    "a text as the file": "hello\n",
    "two documents": "data: {seed: 1}\n---\ndata: {seed: 2}\n",
    "a long unknown key": f"data: {{{'x' * 100_000}: 1}}\n",
    "a long text for a number": f"data: {{seed: {'x' * 900_000}}}\n",
    "a key twice": "data: {seed: 1}\ndata: {seed: 2}\n",
    "interpolations that double": "algorithm:\n  options:\n    a0: xxxxxxxxxx\n"
    + "".join(f"    a{i}: ${{.a{i - 1}}}${{.a{i - 1}}}\n" for i in range(1, 40)),
    "sections that double": "algorithm:\n  options:\n    a0: {x: [1, 2], y: text}\n"
    + "".join(
        f"    a{i}: {{x: '${{..a{i - 1}}}', y: '${{..a{i - 1}}}'}}\n"
        for i in range(1, 40)
    ),
    "interpolations in a circle": "data: {seed: '${trainer.seed}'}\n"
    "trainer: {seed: '${data.seed}'}\n",
    "an interpolation inside another": "data: {seed: '${trainer.${data.prompt_key}}'}\n",
    "many interpolations": "algorithm:\n  options:\n"
    + "".join(f"    a{i}: ${{.a{i + 1}}}\n" for i in range(5000)),
    "an unknown resolver": "data: {seed: '${mine:3}'}\n",
    "a missing variable": "data: {seed: '${oc.env:QUADRIGA_NO_SUCH_VARIABLE}'}\n",
}  # fmt: skip


def check_refused(capsys, *words):
    code = main(["train", *words, "--print-config"])
    shown = capsys.readouterr()
    assert (code, shown.out, shown.err.count("\n")) == (2, "", 1), shown.err[:2000]
    assert shown.err.startswith("error: ") and len(shown.err) < 2100


@pytest.mark.parametrize("name", YAML)
def test_a_settings_file_is_refused_in_one_line(name, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    text = YAML[name]
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    check_refused(capsys, "--config", str(file))


def test_ordinary_aliases_and_interpolations_are_accepted(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "actor_rollout_ref:\n  actor: {optim: &o {lr: 2e-5}}\ncritic: {optim: *o}\n"
        "trainer:\n  experiment_name: a\n"
        "  default_local_dir: runs/${.project_name}/${trainer.experiment_name}-${data.seed}\n"
        "data: {seed: 7}\n"
    )
    config = load_config(TrainConfig, file=file)
    assert config.critic.optim.lr == config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert config.trainer.default_local_dir == "runs/quadriga/a-7"


OVERRIDES = {
    "nested lists": "algorithm.options.x=" + "[" * 20_000 + "]" * 20_000,
    "nested mappings": "algorithm.options.x=" + "{a:" * 500 + "1" + "}" * 500,
    "a long value": "data.train_files=[" + "a," * 100_000 + "b]",
    "a long unknown key": "x" * 60_000 + "=1",
    "a deep key of options": "algorithm.options." + "x." * 20_000 + "y=1",
    "bytes that are no text": "trainer.project_name=\udcff",
    "no value": "data.seed",
    "a null byte": "data.seed=\0",
    "a newline": "data.seed=1\n2",
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_is_refused_in_one_line(name, capsys):
    check_refused(capsys, OVERRIDES[name])


def test_a_long_prompt_on_the_command_line_is_accepted():
    prompt = "word " * 10_000 + "end"
    assert load_config(GenerateConfig, [f"prompt={prompt}"]).prompt == prompt
