"""Roles that users add to a training run: `register_role` in a file of `algorithm.user_files`.

    registry.py      `register_role`, `RoleStage`: what a role is, and what it reads and writes
    settings.py      `load_train_config`: settings with the sections of added roles
    places.py        the place of a role's stages among the stages of a step
    checks.py        checks of worker classes before any process starts
    start_order.py   the order in which the roles of a run load their models
    stage_runner.py  runs the stages of a step, and those of added roles beside them
    results.py       checks of what the methods of these stages return

This package may import `trainer.placement`, `trainer.stages`, and every package below `trainer`.
"""

from __future__ import annotations

from quadriga.trainer.roles.registry import AddedRole, RoleStage, register_role

__all__ = ["AddedRole", "RoleStage", "register_role"]
