"""A conformance kit: run the laws of dispatch modes, meshes and backends on your own.

    from quadriga.testing import check_mode, check_mesh, check_backend

    check_mode(Dispatch.MY_MODE, world_size=4)              # split then join gives the input back
    check_mesh([0, 0, 1, 1], [True, False, True, False])    # a mesh as your workers register it
    check_backend(get_backend("mine"))                      # starts two ranks and calls them

Each raises `LawBroken` naming every law that does not hold, and what was seen instead. Under
pytest, parametrise over `MODE_LAWS`, `MESH_LAWS` or `BACKEND_LAWS` to see them one by one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.testing.backend_laws import BACKEND_LAWS as BACKEND_LAWS
    from quadriga.testing.backend_laws import BackendUnderTest as BackendUnderTest
    from quadriga.testing.backend_laws import check_backend as check_backend
    from quadriga.testing.laws import Law as Law
    from quadriga.testing.laws import LawBroken as LawBroken
    from quadriga.testing.mesh_laws import MESH_LAWS as MESH_LAWS
    from quadriga.testing.mesh_laws import check_mesh as check_mesh
    from quadriga.testing.mode_laws import MODE_LAWS as MODE_LAWS
    from quadriga.testing.mode_laws import ModeUnderTest as ModeUnderTest
    from quadriga.testing.mode_laws import check_mode as check_mode
    from quadriga.testing.simulated import SimulatedGroup as SimulatedGroup

_HOME = {
    "BACKEND_LAWS": "backend_laws",
    "BackendUnderTest": "backend_laws",
    "Law": "laws",
    "LawBroken": "laws",
    "MESH_LAWS": "mesh_laws",
    "MODE_LAWS": "mode_laws",
    "ModeUnderTest": "mode_laws",
    "SimulatedGroup": "simulated",
    "check_backend": "backend_laws",
    "check_mesh": "mesh_laws",
    "check_mode": "mode_laws",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
