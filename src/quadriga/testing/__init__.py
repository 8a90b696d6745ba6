"""A conformance kit: check your own modes, meshes, backends and rollout engines against their laws.

    from quadriga.testing import check_mode, check_mesh, check_backend, check_rollout

    check_mode(Dispatch.MY_MODE, world_size=4)              # dispatch, then collect: the input
    check_mesh([0, 0, 1, 1], [True, False, True, False])    # a mesh as your workers register it
    check_backend(get_backend("mine"))                      # starts two ranks and calls them
    check_rollout(build_my_engine)                          # on a small model that it writes

Each function raises `LawBroken`, which names every law that does not hold and the value that was
seen. With pytest, parametrize a test over `MODE_LAWS`, `MESH_LAWS`, `BACKEND_LAWS` or
`ROLLOUT_LAWS` to get one test per law.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "BACKEND_LAWS": "backend_laws",
    "BackendUnderTest": "backend_laws",
    "Law": "laws",
    "LawBroken": "laws",
    "MESH_LAWS": "mesh_laws",
    "MODE_LAWS": "mode_laws",
    "ModeUnderTest": "mode_laws",
    "ROLLOUT_LAWS": "rollout_laws",
    "RolloutUnderTest": "rollout_subject",
    "SimulatedGroup": "simulated",
    "check_backend": "backend_laws",
    "check_mesh": "mesh_laws",
    "check_mode": "mode_laws",
    "check_rollout": "rollout_laws",
    "write_reference_model": "rollout_reference",
}

__all__ = list(_HOME)

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
    from quadriga.testing.rollout_laws import ROLLOUT_LAWS as ROLLOUT_LAWS
    from quadriga.testing.rollout_laws import check_rollout as check_rollout
    from quadriga.testing.rollout_reference import write_reference_model as write_reference_model
    from quadriga.testing.rollout_subject import RolloutUnderTest as RolloutUnderTest
    from quadriga.testing.simulated import SimulatedGroup as SimulatedGroup
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
