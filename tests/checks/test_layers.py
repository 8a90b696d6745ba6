"""Imports point down the floors of docs/architecture.md, and some libraries have one home."""

from __future__ import annotations

import re

import pytest
from source_tree import ROOT, SourceFile, imports_of, module_name, package_files

FLOORS = (
    ("errors",),
    ("config",),
    ("protocol", "algorithms", "observability"),
    ("single_controller", "parallel"),
    ("backends", "models", "data", "rewards"),
    ("checkpoint",),
    ("engines", "rollout"),
    ("weight_sync",),
    ("workers",),
    ("trainer",),
    ("compat", "cli", "testing"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

HOMES = {
    "ray": (r"quadriga\.backends\.ray(\..*)?",),
    "vllm": (r"quadriga\.rollout\.vllm",),
    "sglang": (r"quadriga\.rollout\.sglang",),
    "megatron": (r"quadriga\.engines\.megatron.*",),
    "hydra": (r"quadriga\.(config|cli)(\..*)?",),
    "omegaconf": (r"quadriga\.(config|cli)(\..*)?",),
}


def room_of(module: str) -> str | None:
    """`quadriga.config.plan` → `config`; None for what is no room of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "quadriga" else None


def floor_faults(file: SourceFile) -> list[str]:
    """Imports from the same floor's neighbours or from above."""
    own = room_of(module_name(file))
    if own is None or own.startswith("_"):  # quadriga/__init__.py gathers names from every floor
        return []
    faults = []
    for line, imported in imports_of(file):
        other = room_of(imported)
        if other is None or other == own or other.startswith("__"):
            continue
        if other not in FLOOR_OF or own not in FLOOR_OF:
            faults.append(f"{file.name}:{line} imports {imported}: no floor for {own} or {other}")
        elif FLOOR_OF[other] >= FLOOR_OF[own]:
            faults.append(f"{file.name}:{line} {own} imports {imported}, which is not below it")
    return faults


def home_faults(file: SourceFile) -> list[str]:
    """Imports of a library outside its home."""
    module = module_name(file)
    return [
        f"{file.name}:{line} imports {imported}; its home is {' or '.join(HOMES[library])}"
        for line, imported in imports_of(file)
        if (library := imported.split(".")[0]) in HOMES
        and not any(re.fullmatch(home, module) for home in HOMES[library])
    ]


def test_imports_point_down():
    assert [fault for file in package_files() for fault in floor_faults(file)] == []


def test_libraries_stay_in_their_homes():
    assert [fault for file in package_files() for fault in home_faults(file)] == []


def test_every_room_has_a_floor():
    rooms = {room_of(module_name(f)) for f in package_files()} - {None}
    assert rooms - set(FLOOR_OF) == set()


def test_floors_are_those_of_the_architecture_page():
    text = (ROOT / "docs/architecture.md").read_text()
    block = text.split("enforces it):")[1].split("Ray is imported")[0]
    written = [tuple(line.split()) for line in block.splitlines() if line.strip()]
    assert written == list(FLOORS)


PLANTED = [
    ("src/quadriga/config/x.py", "from quadriga.trainer.main import run_training"),
    ("src/quadriga/config/x.py", "def f():\n    from quadriga.workers import runtime\n"),
    ("src/quadriga/config/x.py", "if TYPE_CHECKING:\n    import quadriga.cli.main\n"),
    ("src/quadriga/protocol/x.py", "from quadriga.algorithms import gae"),
    ("src/quadriga/protocol/x.py", "from quadriga import observability"),
    ("src/quadriga/config/x.py", "from ..trainer import main"),
    ("src/quadriga/config/x.py", "import_module('quadriga.trainer.main')"),
    ("src/quadriga/config/x.py", "from quadriga.utils import anything"),
]


@pytest.mark.parametrize(("name", "text"), PLANTED)
def test_a_planted_violation_is_seen(name, text):
    assert len(floor_faults(SourceFile(name, text))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/quadriga/trainer/x.py", "import ray"),
        ("src/quadriga/trainer/x.py", "def f():\n    import ray.util\n"),
        ("src/quadriga/rollout/hf.py", "from vllm import LLM"),
        ("src/quadriga/trainer/x.py", "from omegaconf import OmegaConf"),
        ("src/quadriga/backends/local/x.py", "importlib.import_module('ray')"),
    ],
)
def test_a_planted_stray_library_is_seen(name, text):
    assert len(home_faults(SourceFile(name, text))) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/quadriga/backends/ray/x.py", "import ray\nfrom quadriga.errors import InputError"),
        (
            "src/quadriga/backends/ray/x.py",
            "from . import y\nimport quadriga.backends.ray.z",
        ),
        ("src/quadriga/config/loading.py", "import hydra\nfrom omegaconf import OmegaConf"),
        ("src/quadriga/rollout/vllm.py", "import vllm"),
    ],
)
def test_what_is_allowed_passes(name, text):
    file = SourceFile(name, text)
    assert floor_faults(file) + home_faults(file) == []
