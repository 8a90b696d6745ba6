"""What the report of runs holds, without a browser."""

import base64
import hashlib
import logging
import re
from contextlib import closing
from importlib.resources import files

import pytest
from report_cases import CONTROL, EVIL, data_of, run_folder, write_jsonl

from quadriga.cli.main import main
from quadriga.errors import DataError
from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.run_folder import RunFolder
from quadriga.report import collect, write_report
from quadriga.report.events import EventLog


def report_of(*folders, page):
    write_report(folders, page)
    return data_of(page)


def test_the_command_writes_what_a_run_has_recorded_beside_it(tmp_path, capsys):
    folder = run_folder(tmp_path / "first", "trainer.seed=7", "algorithm.adv_estimator=grpo")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html: open it in a browser\n"
    (run,) = data_of(folder / "report.html")["runs"]
    assert (run["name"], run["kind"], run["steps"]) == ("first", "train", [1, 2, 3])
    assert run["metrics"]["reward/mean"] == [0.5, 0.5, 0.5]
    assert run["settings"]["trainer.seed"] == "7" and len(run["changed"]) == 2
    # The phases of a step follow each other and end with it: step 1 ends after 2 s.
    step = [span for span in run["spans"] if span[3] <= 2.0]
    assert sorted(step, key=lambda span: span[2]) == [
        ["rollout", "rollout", 1.05, 1.55], ["actor", "evaluate", 1.55, 1.8],
        ["actor", "update_actor", 1.8, 2.0],
    ]  # fmt: skip
    assert [s["components"]["answer"] for s in run["samples"][:2]] == [0.0, 1.0]
    assert run["environments"][0]["torch"] == "2.13"
    assert run["warnings"] == [[1.5, f"restart 1 of 3 begins: {EVIL}"]] and not run["problems"]


@pytest.mark.parametrize("phase", ["update_critic", "values"])
def test_a_run_that_updates_a_critic_shows_it_whatever_its_estimator(tmp_path, phase):
    folder = run_folder(tmp_path / "run", "algorithm.adv_estimator=grpo")
    rows = [{**row, f"time/{phase}": 0.1} for row in read_jsonl(folder / "metrics.jsonl")]
    write_jsonl(folder / "metrics.jsonl", rows)
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    evaluating = {role for role, name, *_ in run["spans"] if name == "evaluate"}
    assert evaluating == ({"actor", "critic"} if phase == "update_critic" else {"actor"})


def test_rows_with_other_values_than_a_run_writes_are_shown(tmp_path):
    folder = run_folder(tmp_path / "run")
    odd = '{"step": null, "reward": NaN}\n{"step": "2"}\n{"step": [1]}\n{"step": 3}\n'
    (folder / "samples.jsonl").write_text(odd)
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    assert [(s["step"], s.get("reward")) for s in run["samples"]] == [
        (0, "NaN"), (0, None), (0, None), (3, None),
    ]  # fmt: skip


def test_texts_of_data_are_no_markup_and_no_other_script_may_run(tmp_path):
    folder = run_folder(tmp_path / "{{script}}<b>")
    data = report_of(folder, page=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert data["runs"][0]["samples"][0]["prompt"] == f"user: {EVIL} {CONTROL}"
    assert EVIL not in text and "\x1b" not in text and "<b>" not in text
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[-1].encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    assert len(scripts) == 1 and policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; ")
    assert policy[1].endswith(f"; script-src 'sha256-{digest}'")
    assert not re.search(r"(src|href)=\"?(https?:)?//", text)


def test_runs_are_compared_under_the_names_that_tell_them_apart(tmp_path, monkeypatch, capsys):
    folders = [
        run_folder(tmp_path / name / "run", f"trainer.seed={i}") for i, name in enumerate("ab")
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, folders)]) == 0
    runs = data_of(tmp_path / "report.html")["runs"]
    assert [run["name"] for run in runs] == ["a/run", "b/run"]
    assert [run["settings"]["trainer.seed"] for run in runs] == ["0", "1"]
    assert main(["report", str(folders[0]), str(folders[0])]) == 2
    assert "is given twice; give each run once" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    good = run_folder(tmp_path / "good")
    for bad in (tmp_path / "nowhere", tmp_path):
        assert main(["report", str(good), str(bad), "--output", str(tmp_path / "x.html")]) == 2
        line = capsys.readouterr().err
        assert (
            line.startswith(f"error: {bad} holds no run: expected a folder")
            and line.count("\n") == 1
        )
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "samples.jsonl", "events.jsonl"])
@pytest.mark.parametrize("damage", [None, b'{"step": 1}\n{"step"\xff: oops\n', b"[1]\n"])
def test_a_missing_or_damaged_file_costs_its_own_part(tmp_path, name, damage):
    folder = run_folder(tmp_path / "run")
    (folder / name).unlink()
    if damage is not None:
        (folder / name).write_bytes(damage)
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    assert any(name in problem for problem in run["problems"])
    assert bool(run["settings"]) == (name != "config.yaml")
    assert (len(run["steps"]) == 3) == (name != "metrics.jsonl")
    assert (len(run["samples"]) == 12) == (name != "samples.jsonl")
    assert (len(run["warnings"]) == 1) == (name != "events.jsonl")


def test_values_of_another_type_are_left_out(tmp_path):
    folder = run_folder(tmp_path / "run")
    rows = [{"step": 1, "a": "NaN", "b": 2, "time/rollout": "x"}, {"step": "two", "b": None}]
    write_jsonl(folder / "metrics.jsonl", rows)
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": "two", "reward": NaN}\n')
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    assert run["samples"][-1]["reward"] == "NaN"
    assert run["metrics"] == {"b": [2, None]} and run["steps"] == [1, None]
    assert [p for p in run["problems"] if p.startswith("the timeline cannot be read: ")]


def test_a_long_run_makes_a_small_page(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run", steps=1000)
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    assert len(run["steps"]) == 1000 and len(run["spans"]) == 4000
    assert (tmp_path / "page.html").stat().st_size < 4_000_000
    monkeypatch.setattr(collect, "MAX_ROWS", 400)
    monkeypatch.setattr(collect, "MAX_SPANS", 500)
    monkeypatch.setattr(collect, "SAMPLE_BYTES", 20_000)
    (run,) = report_of(folder, page=tmp_path / "page.html")["runs"]
    shown = sorted({s["step"] for s in run["samples"]})
    assert run["steps"] == list(range(1, 1001, 3)) and len(run["spans"]) == 500
    assert shown[0] == 1 and shown[-1] == 1000 and 5 < len(shown) < 40
    assert run["steps_of_samples"] == 1000


def test_a_page_that_cannot_be_written_names_the_file(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    assert main(["report", str(folder), "--output", "/dev/full/x.html"]) == 2
    assert "/dev/full/x.html" in capsys.readouterr().err
    with pytest.raises(DataError, match="holds no run"):
        write_report([tmp_path], tmp_path / "page.html")


def test_the_package_has_the_page_and_the_licence_of_its_library():
    page = files("quadriga.report") / "page"
    assert "Copyright" in (page / "uPlot.LICENSE").read_text()
    assert "v1.6.32" in (page / "uPlot.iife.min.js").read_text()[:80]


def test_events_are_kept_by_a_run_that_begins_again_and_a_removed_file_is_written_anew(tmp_path):
    folder = RunFolder(run_folder(tmp_path / "run"))
    log = EventLog(folder.events, lambda: 2.0)
    with closing(log):
        folder.forget_after(None)  # a restart without a checkpoint
        assert not folder.metrics.exists()
        logging.getLogger("quadriga").warning("first")
        folder.events.unlink()
        logging.getLogger("quadriga").warning("second")
    logging.getLogger("quadriga").warning("after the end")
    events = list(read_jsonl(folder.events))
    warnings = [row["warning"] for row in events if "warning" in row]
    assert events[0]["environment"]["torch"] == "2.13"
    removed = f"{folder.events} was removed or replaced by another process"
    assert warnings[1:] == ["first", removed, "second"]


@pytest.mark.parametrize("own", [True, False])
def test_a_warning_of_a_run_is_printed_beside_it_once(tmp_path, capsys, monkeypatch, own):
    """Python prints warnings only where no handler takes them."""
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()] if own else [])
    with closing(EventLog(tmp_path / "events.jsonl", lambda: 2.0)):
        logging.getLogger("quadriga").warning("replica %d has joined", 1)
        logging.getLogger("quadriga").info("no warning")
    assert capsys.readouterr().err == ("" if own else "replica 1 has joined\n")
    rows = [*read_jsonl(tmp_path / "events.jsonl")]
    assert [row.get("warning") for row in rows] == [None, "replica 1 has joined"]
