"""The package name verl for Quadriga: its modules are the modules of `quadriga.compat.verl`."""

import sys
from pathlib import Path

# `quadriga.compat.verl` puts its own module here, which the import of this one then returns.
del sys.modules[__name__]

import quadriga.compat.verl  # noqa: E402, F401

# `python -m verl.trainer.main_ppo` runs the file `__main__.py` in the path of this module.
for _name in ("verl.trainer.main_ppo", "verl.trainer.main_ppo_v0"):
    sys.modules[_name].__path__ = [str(Path(__file__).parent / "commands")]
