"""The roles of a training run: those of the trainer, and those that users add with `register_role`
in a file of `algorithm.user_files`.

    registry.py    `Role`, `ResourcePoolManager`: which role runs on which pool;
                   `register_role`, `RoleStage`: what an added role is, what it reads and writes;
                   `load_train_config`: settings with the sections of added roles
    needs.py       which roles a run needs
    workers.py     their pools, worker classes and start order

This package may import every package below `trainer`.
"""

from quadriga.trainer.roles.registry import AddedRole, RoleStage, register_role

__all__ = ["AddedRole", "RoleStage", "register_role"]
