"""The page of a report in headless Chromium: what it shows, its console, and axe's rules."""

import html
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from report_cases import CONTROL, TURNS, run_folder

from quadriga.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = find_spec("axe_core_python")
OPTIONS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
--disable-background-networking --disable-component-update --disable-dev-shm-usage
--enable-logging=stderr --virtual-time-budget=4000 --dump-dom
"""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")


def opened(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """Return the document when its scripts have run, and the messages of the console."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={profile}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    console = "".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return done.stdout, console


def report_of(tmp_path: Path, **episode: object) -> Path:
    folders = [
        run_folder(tmp_path / f"run{seed}", f"trainer.seed={seed}", **episode) for seed in (1, 2)
    ]
    write_report(folders, page := tmp_path / "page.html")
    return page


@pytest.mark.parametrize(
    "scheme", ["--blink-settings=preferredColorScheme=0", "--window-size=400,800"]
)
def test_the_page_shows_all_parts_and_texts_of_data_do_nothing(tmp_path, scheme):
    dom, console = opened(report_of(tmp_path), tmp_path / "profile", scheme)
    assert console == ""
    assert "<title>run1, run2 – Quadriga report</title>" in dom, "a text of data ran as a script"
    assert "<img" not in dom and "\x1b" not in dom and "\u202e" not in dom
    text = html.unescape(re.sub(r"<[^>]+>", "", dom[dom.index("<main") : dom.index("</main")]))
    assert "red \\x1b[31mtext\\x1b[0m \\x07 \\u202egnp.exe" in text, CONTROL
    assert text.count("advantage") == 2, "the two responses of one prompt"
    for part in (
        "trainer.seed ≠",
        "update_actor",
        "restart 1 of 3 begins",
        "expected4",
        "at step 3",
    ):
        assert part in text, part
    assert dom.count('class="uplot') == 1, "the other curves are in closed parts"


def test_an_episode_is_shown_by_turns(tmp_path):
    folder = run_folder(tmp_path / "run", turns=TURNS)
    write_report([folder], page := tmp_path / "page.html")
    dom, console = opened(page, tmp_path / "profile")
    assert console == "" and "<title>run – Quadriga" in dom
    assert dom.count('class="episode-time"') == 2
    blocks = re.findall(r'<div class="turn (\w+)"><p>(.*?)</p><div>(.*?)</div>', dom)
    assert [
        (kind, *(html.unescape(re.sub("<[^>]+>", "", part)) for part in parts))
        for kind, *parts in blocks[:3]
    ] == [
        ("sampled", "turn 1 calls add, mul 3 tokens · reward -0.1 · 0.25 s", TURNS[0]["sampled"]),
        ("observed", "observed from tool add, tool mul 4 tokens · 1.50 s", TURNS[0]["observed"]),
        ("sampled", "turn 2 5 tokens · reward 1", "#### 7<|end|>"),
    ]
    assert len(blocks) == 6 and "turns 0.25 s" in dom and "environment 1.50 s" in dom


@pytest.mark.skipif(AXE is None, reason="needs the package axe-core-python")
@pytest.mark.parametrize(
    "scheme", ["", "--blink-settings=preferredColorScheme=0", "--window-size=400,800"]
)
def test_axe_finds_nothing_serious(tmp_path, scheme):
    page = report_of(tmp_path, turns=TURNS)
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text())
    assert AXE is not None and AXE.origin is not None
    axe = Path(AXE.origin).with_name("axe.min.js").read_text()
    found = "r.violations.map((v) => [v.impact, v.id, v.nodes[0].html])"
    run = f"axe.run().then((r) => {{ document.title = JSON.stringify({found}); }})"
    script = f"<script>{axe}</script><script>setTimeout(() => {run}, 1000);</script></body>"
    page.write_text(text.replace("</body>", script))
    dom, _ = opened(page, tmp_path / "profile", *filter(None, [scheme]))
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None
    assert json.loads(html.unescape(title[1])) == []
