"""Options of verl's groups, in the form that Quadriga's groups take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quadriga.backends.ray import RayClassWithInitArgs
from quadriga.backends.ray.profiling import Nsight
from quadriga.backends.ray.start import RayColocatedClass, classes_of
from quadriga.single_controller import ClassWithInitArgs

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor


def class_of_ranks(
    names: Sequence[str] | None, actors: Sequence[RankActor] | None, options: dict[str, Any]
) -> ClassWithInitArgs:
    """Return the class, or the roles, of ranks that exist."""
    classes = classes_of(names, actors, options.get("namespace"))
    if len(classes) > 1:
        return RayColocatedClass({role: RayClassWithInitArgs(cls) for role, cls in classes.items()})
    role, cls = next(iter(classes.items()))
    options.setdefault("role", role)
    return RayClassWithInitArgs(cls)


def nsight_of(options: Mapping[str, object], steps: int) -> Nsight:
    """Return verl's `worker_nsight_options` for a run that profiles `steps` steps.

    The capture ends with its sixth range of a step, verl's number of profiled methods, unless
    `capture-range-end` is given.
    """
    flags = {name: str(value) for name, value in options.items() if value is not None}
    if "capture-range" in flags:
        flags.setdefault("capture-range-end", f"repeat-shutdown:{6 * steps}")
    return Nsight(flags)
