"""mypy accepts right calls of worker groups, and reports wrong calls and changed signatures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
WORKERS = ROOT / "src" / "quadriga" / "workers"

# Errors in the package itself are found when the package is checked. The libraries are left out,
# which makes the check four times as fast: no call below depends on their types.
SETTINGS = f"""
[mypy]
strict = true
mypy_path = {ROOT / "src"}
[mypy-quadriga.*]
follow_imports = silent
[mypy-torch.*,tensordict.*,transformers.*,numpy.*,ray.*,rich.*,omegaconf.*,hydra.*,pyarrow.*]
follow_imports = skip
"""
REPORT = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", re.MULTILINE)
EXPECTED = re.compile(r"# error: (?P<code>[\w-]+)$")


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory):
    """check(*arguments of mypy) -> {(file name, line, code)} of all reported errors."""
    folder = tmp_path_factory.mktemp("mypy")
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings),
               "--cache-dir", str(folder / "cache"), "--show-error-codes"]  # fmt: skip

    def _check(*arguments: str) -> set[tuple[str, int, str]]:
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return {
            (Path(found["file"]).name, int(found["line"]), found["code"])
            for found in REPORT.finditer(done.stdout)
        }

    return _check


def test_right_calls_are_accepted_and_wrong_calls_are_reported(check) -> None:
    """And the protocols hold for the workers."""
    lines = (FOLDER / "wrong_calls.py").read_text().splitlines()
    expected = {
        ("wrong_calls.py", number, found["code"])
        for number, line in enumerate(lines, start=1)
        if (found := EXPECTED.search(line))
    }
    assert len(expected) > 20
    calls = [str(FOLDER / name) for name in ("right_calls.py", "wrong_calls.py")]
    assert check(*calls, str(WORKERS / "roles.py")) == expected


# Changes of a worker's signature → the member that no longer fits its protocol. A change must alter
# the size of the file: mypy's cache takes a file of the same date and size for unchanged.
CRITIC, ACTOR = "runtime.py", "actor_rollout_ref.py"
CHANGES = {
    "an argument, a result, one more argument": [
        (CRITIC, "update_critic(self, data: DataProto)", "update_critic(self, data: str)"),
        (ACTOR, "rollout_mode(self) -> dict[str, float]", "rollout_mode(self) -> list[None]"),
        (ACTOR, "compute_ref_log_prob(self, data: DataProto)",
         "compute_ref_log_prob(self, data: DataProto, scale: float)"),
    ],
    "one argument less": [
        (ACTOR, "compute_log_prob(self, data: DataProto)", "compute_log_prob(self)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_worker_with_another_signature_is_reported(check, tmp_path, change: str) -> None:
    texts = {file: (WORKERS / file).read_text() for file in (CRITIC, ACTOR)}
    roles = (WORKERS / "roles.py").read_text().splitlines()
    expected = set()
    for file, before, after in CHANGES[change]:
        assert before in texts[file]
        texts[file] = texts[file].replace(before, after)
        member = f"        {before.partition('(')[0]} = "
        number = next(i for i, line in enumerate(roles, 1) if line.startswith(member))
        expected.add(("roles.py", number, "arg-type"))
    shadows = []
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
        shadows += ["--shadow-file", str(WORKERS / file), str(tmp_path / file)]
    assert expected <= check(*shadows, str(WORKERS / "roles.py"))
