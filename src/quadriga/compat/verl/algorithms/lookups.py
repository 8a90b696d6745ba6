"""Errors of registries that are also instances of the class that verl raises."""

from __future__ import annotations

from quadriga.errors import InputError, UnknownNameError


class TakenNameError(InputError, ValueError):
    """A name is registered already. verl raises ValueError. Attribute: `name`."""


class MissingNameError(UnknownNameError, ValueError):
    """A registry has no such name. verl raises ValueError."""
