"""Mistakes are told before torch, Ray or transformers are imported; settings can be searched."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quadriga.algorithms import registry
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import DataError
from quadriga.trainer.checks.early import check_early

PROGRAM = """
import sys
from quadriga.cli.main import main
code = main(sys.argv[1:])
heavy = {"torch", "ray", "transformers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""
WITH = "data.train_files=[rows.jsonl]"
MODEL = "model.path=model"
RANKS = ["trainer.n_gpus_per_node=2", "data.train_batch_size=3"]
MISTAKES = {
    "key": (["train", "data.sede=1"], "no setting data.sede; did you mean data.seed?"),
    "type": (["rm", "data.shuffle=3"], "data.shuffle must be true or false"),
    "range": (["sft", "optim.lr=-1"], "optim.lr must be"),
    "estimator": (["train", "algorithm.adv_estimator=grppo"], "'grppo'; did you mean grpo?"),
    "loss": (["train", "actor_rollout_ref.actor.policy_loss.name=gsqo"], "; did you mean gspo?"),
    "no data": (["train"], "data.train_files is empty"),
    "data": (["sft", "data.train_files=[no.jsonl]"], "no such file: no.jsonl"),
    "column": (["train", WITH, "data.prompt_key=text"], "row 0: no 'text'; found keys ['answer"),
    "answers": (["sft", WITH], "row 0: no 'extra_info'; found keys"),
    "pairs": (["rm", WITH], "row 0: no 'chosen'; found keys"),
    "no model": (["train", WITH], "actor_rollout_ref.model.path is empty: give a model folder"),
    "model": (["train", WITH, "actor_rollout_ref.model.path=modle"], "modle does not exist"),
    "config": (["rm", WITH, "data.chosen_key=prompt", "data.rejected_key=answer", MODEL],
               "model/config.json has no model_type"),
    "reward": (["train", WITH, "reward.path=no.py"], "no.py does not exist"),
    "parts": (["eval", "data_files=[rows.jsonl]", "reward.parts={a: {path: no.py}}"],
              "no.py does not exist"),
    "callbacks": (["sft", WITH, "data.messages_key=prompt", "trainer.callbacks=[no.py:Mine]"],
                  "trainer.callbacks: no such file: "),
    "responses": (["eval", "response_files=[rows.jsonl]"], "row 0: no 'responses'; found keys"),
    "generate": (["generate", "data_files=[rows.jsonl]", MODEL], "model/config.json has no model_"),
    "batch": (["train", *RANKS], "data.train_batch_size=3 × rollout.n = 3 × 1 = 3 sequences do"),
    "rows": (["sft", *RANKS], "data.train_batch_size=3 rows do not divide over 2 ranks"),
    "group": (["train", "algorithm.adv_estimator=grpo"], "rollout.n=1 is too few, because"),
    "greedy": (["generate", "n=2", "sampling.temperature=0"], "n=2 greedy responses"),
    "eval": (["eval"], "data_files=[] and response_files=[]: set either"),
    "tracker": (["rm", "trainer.loggers=[wandbb]"], "trainer.loggers 'wandbb'; known: console"),
    "search": (["settings", "lrr"], "no setting has lrr in name or meaning; did you mean lr?"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder


def run(folder, words):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=folder,
                          capture_output=True, text=True, timeout=200)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_heavy_imports(folder, name):
    words, message = MISTAKES[name]
    code, _, told = run(folder, words)
    assert (code, message in told, told.count("\n")) == (2, True, 1), told
    assert sorted(os.listdir(folder)) == ["model", "rows.jsonl"]


def test_the_source_of_a_table_tells_what_the_table_tells_and_files_may_add_names(monkeypatch):
    loaded = registry.table_parameters("advantages", "ADVANTAGES")
    monkeypatch.setattr(registry, "sys", SimpleNamespace(modules={}))
    written = registry.table_parameters("advantages", "ADVANTAGES")
    assert {name: {*found} for name, found in written.items()} == {
        name: {*found} for name, found in loaded.items()
    }
    assert [*registry.table_parameters("policy_losses", "POLICY_LOSSES")] == [*POLICY_LOSSES]
    own = ["algorithm.user_files=[mine.py]", "algorithm.adv_estimator=mine"]
    config = load_config(TrainConfig, [*own, "trainer.loggers=[mine]"])
    check_early(config, complete=False)
    with pytest.raises(DataError, match=r"data\.train_files is empty"):
        check_early(config)


def test_print_config_is_checked_and_a_search_imports_nothing_heavy(folder, capsys):
    for words in (["train", "data.train_batch_size=3", "trainer.n_gpus_per_node=2"],
                  ["sft", "data.train_batch_size=3", "trainer.n_gpus_per_node=2"],
                  ["rm", "data.train_files=[no.jsonl]"], ["generate", "n=2"]):  # fmt: skip
        assert main([*words, "--print-config"]) == 2
        assert capsys.readouterr().out == ""
    for command in ("train", "sft", "rm", "generate", "eval"):  # without files and models
        assert main([command, "--print-config"]) == 0
    code, found, _ = run(folder, ["settings", "lr"])
    assert code == 0
    assert "quadriga train\n  actor_rollout_ref.actor.optim.lr=1e-06  (a number" in found
    assert "quadriga sft\n  optim.lr=1e-05" in found and "already" not in found
    found = run(folder, ["settings", "checkpoint", "seconds"])[1]
    assert "trainer.save_interval_s=1800" in found and "trainer.seed=" not in found


@pytest.mark.parametrize("words", [["train"], ["generate"], ["settings"], []])
def test_help_fits_a_narrow_terminal(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
