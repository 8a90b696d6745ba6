"""The tables of verl's names.

modules       all modules; which names each has, and where Quadriga defines them
trainers      the part for trainers, workers and their helpers
imported      names that a module of verl imports from another one
not_offered   what to use for other names and modules
"""

from __future__ import annotations

from quadriga.compat.verl.names.modules import MODULES
from quadriga.compat.verl.names.not_offered import advice

__all__ = ["MODULES", "advice"]
