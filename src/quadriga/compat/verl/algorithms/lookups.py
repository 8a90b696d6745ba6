"""Errors of Quadriga that are also instances of the class that verl raises in the same case."""

from __future__ import annotations

from quadriga.errors import AlgorithmError, InputError, UnknownNameError


class TakenNameError(InputError, ValueError):
    """A name is registered already. verl raises ValueError. Attribute: `name`."""


class MissingNameError(UnknownNameError, ValueError):
    """A registry has no such name. verl raises ValueError."""


class UnsupportedNameError(UnknownNameError, NotImplementedError):
    """No KL estimator or controller has this name. verl raises NotImplementedError."""


class UnsupportedKLError(AlgorithmError, NotImplementedError):
    """A KL estimator needs more than the given tensors. verl raises NotImplementedError."""
