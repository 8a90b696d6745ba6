"""Imports point down the layers of docs/architecture.md; some libraries are used in one package."""

from __future__ import annotations

import re

import pytest
from source_tree import ROOT, SourceFile, imports_of, module_name, package_files

# From bottom to top. A package imports from the layers below its own only.
LAYERS = (
    ("errors", "lazy"),
    ("containment", "files"),
    ("config",),
    ("protocol", "algorithms", "observability"),
    ("single_controller", "parallel"),
    ("backends", "models", "data", "rewards"),
    ("checkpoint",),
    ("engines", "rollout"),
    ("weight_sync",),
    ("workers", "agents"),
    ("streams",),
    ("report",),
    ("trainer",),
    ("compat",),
    ("cli", "testing"),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}

# Library → the modules that may import it.
ALLOWED_IN = {
    "ray": (r"quadriga\.backends\.ray(\..*)?", r"quadriga\.compat\.verl\.controller\.references"),
    "vllm": (r"quadriga\.rollout\.vllm(\..*)?",),
    "sglang": (r"quadriga\.rollout\.sglang(\..*)?",),
    "megatron": (r"quadriga\.engines\.megatron.*",),
    "hydra": (r"quadriga\.(config|cli)(\..*)?", r"quadriga\.compat\.verl_settings"),
    "omegaconf": (r"quadriga\.(config|cli)(\..*)?", r"quadriga\.compat\.verl_settings"),
}


def package_of(module: str) -> str | None:
    """`quadriga.config.plan` → `config`; None for a module outside quadriga."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "quadriga" else None


def layer_faults(file: SourceFile) -> list[str]:
    """Imports from the same layer or from a layer above."""
    own = package_of(module_name(file))
    if own is None or own.startswith("_"):  # quadriga/__init__.py re-exports names of every layer
        return []
    faults = []
    for line, imported in imports_of(file):
        other = package_of(imported)
        if other is None or other == own or other.startswith("__"):
            continue
        if other not in LAYER_OF or own not in LAYER_OF:
            faults.append(f"{file.name}:{line} imports {imported}: no layer for {own} or {other}")
        elif LAYER_OF[other] >= LAYER_OF[own]:
            faults.append(f"{file.name}:{line} {own} imports {imported}, which is not below it")
    return faults


def library_faults(file: SourceFile) -> list[str]:
    """Imports of a library in a module that may not import it."""
    module = module_name(file)
    return [
        f"{file.name}:{line} imports {imported}; allowed in {' or '.join(ALLOWED_IN[library])}"
        for line, imported in imports_of(file)
        if (library := imported.split(".")[0]) in ALLOWED_IN
        and not any(re.fullmatch(allowed, module) for allowed in ALLOWED_IN[library])
    ]


def test_imports_point_down():
    faults = [fault for file in package_files() for fault in layer_faults(file)]
    assert not faults, "\n".join(faults)


def test_libraries_are_imported_where_they_are_allowed():
    faults = [fault for file in package_files() for fault in library_faults(file)]
    assert not faults, "\n".join(faults)


def test_every_package_has_a_layer():
    packages = {package_of(module_name(f)) for f in package_files()} - {None}
    assert packages - set(LAYER_OF) == set()


def layers_on_page(text: str) -> list[tuple[str, ...]]:
    """The block of the page that begins with the lowest layer, one layer per line."""
    lines = [tuple(line.split()) for line in text.splitlines()]
    start = lines.index(LAYERS[0])
    end = next(i for i in range(start, len(lines)) if not lines[i] or lines[i][0] == "```")
    return lines[start:end]


def test_the_architecture_page_lists_the_same_layers():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert layers_on_page(text) == list(LAYERS)


PLANTED = [
    ("src/quadriga/config/x.py", "def f():\n    from quadriga.workers import runtime\n"),
    ("src/quadriga/config/x.py", "if TYPE_CHECKING:\n    import quadriga.cli.main\n"),
    ("src/quadriga/protocol/x.py", "from quadriga import observability"),
    ("src/quadriga/config/x.py", "from ..trainer import main"),
    ("src/quadriga/config/x.py", "import_module('quadriga.trainer.main')"),
    ("src/quadriga/config/x.py", "from quadriga.utils import anything"),
]


LIBRARIES = [
    ("src/quadriga/trainer/x.py", "def f():\n    import ray.util\n"),
    ("src/quadriga/rollout/hf.py", "from vllm import LLM"),
    ("src/quadriga/backends/local/x.py", "importlib.import_module('ray')"),
]
ALLOWED = [
    ("src/quadriga/backends/ray/x.py", "import ray\nfrom quadriga.errors import InputError"),
    ("src/quadriga/backends/ray/x.py", "from . import y\nimport quadriga.backends.ray.z"),
    ("src/quadriga/config/loading.py", "import hydra\nfrom omegaconf import OmegaConf"),
    ("src/quadriga/rollout/vllm/engine.py", "import vllm"),
]


@pytest.mark.parametrize(("name", "text"), [*PLANTED, *LIBRARIES, *ALLOWED])
def test_planted_imports_are_reported_and_allowed_ones_are_not(name, text):
    file = SourceFile(name, text)
    assert len(layer_faults(file)) == ((name, text) in PLANTED)
    assert len(library_faults(file)) == ((name, text) in LIBRARIES)
