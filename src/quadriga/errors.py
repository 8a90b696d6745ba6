"""Every error Quadriga raises on purpose.

    QuadrigaError
    ├── InputError              the user's input is wrong; the command line exits with code 2
    │   ├── ConfigError             a setting: unknown, of the wrong type, or in conflict
    │   │   └── UnknownSettingError     no such key; names the nearest one
    │   ├── DataError               a data file or one row of it
    │   ├── ModelError              a folder that is not a model, or one that does not fit
    │   ├── UnknownNameError        a registry has no such entry (estimator, loss, …)
    │   ├── PlacementError          the machines cannot hold what was asked for
    │   └── CheckpointError         a checkpoint that is missing, incomplete or of another run
    ├── ProtocolError           a batch was built or used wrongly
    │   ├── LengthError             fields of one batch differ in length, or a batch does not divide
    │   ├── FieldError              a field that is missing, of the wrong type, or already there
    │   ├── ConflictError           two batches hold different values under one key
    │   └── LostObjectError         bytes that a batch refers to are gone (their owner died)
    ├── DispatchError           a call that cannot be split, sent or joined as its mode says
    │   ├── UnregisteredMethodError the worker has no such registered method
    │   └── MeshError               a mesh that was never registered, or registered twice
    ├── WorkerError             something went wrong inside a worker
    │   ├── WorkerMethodError       the method raised; carries role, rank and the worker's traceback
    │   ├── WorkerInitError         the worker's `__init__` raised
    │   ├── WorkerDiedError         the process is gone
    │   ├── CallTimeoutError        a call passed its deadline; carries the stack of the stuck rank
    │   └── CollectiveError         a collective was asked of ranks that cannot hold one
    └── AlgorithmError          tensors that the maths cannot accept
        ├── ShapeError              shapes that differ where they must agree
        ├── MaskError               a mask that is not 0/1
        ├── NonFiniteError          NaN or infinity; names tensor and row
        └── GroupError              an empty group, or one of the wrong size

Messages say what was expected, what came, where, and what to do. Keyword arguments become
attributes (`error.rank`). Every error survives pickling, attributes included, because errors
cross processes.
"""

from __future__ import annotations

from typing import Any


def _restore(cls: type[QuadrigaError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class QuadrigaError(Exception):
    """Base of the tree. `details` are kept as attributes and survive pickling."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.__dict__.update(details)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


class InputError(QuadrigaError):
    """The user's input is wrong. Raised before any worker starts wherever possible."""


class ConfigError(InputError, ValueError):
    """A setting is of the wrong type, out of range, or in conflict with another."""


class UnknownSettingError(ConfigError):
    """No setting has this name. Attributes: `key`, `nearest` (or None)."""


class DataError(InputError, ValueError):
    """A data file or one of its rows cannot be used. Attributes: `path`, `row` where known."""


class ModelError(InputError, ValueError):
    """A folder is not a model, or the model does not fit its use. Attribute: `path`."""


class UnknownNameError(InputError, KeyError):
    """A registry has no such entry. Attributes: `name`, `known`, `nearest`."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class PlacementError(InputError, RuntimeError):
    """The machines cannot hold what was asked for. Attributes: `pool`, `wanted`, `available`."""


class CheckpointError(InputError, RuntimeError):
    """A checkpoint is missing, incomplete, or belongs to another run. Attribute: `path`."""


class ProtocolError(QuadrigaError, ValueError):
    """A batch was built or used wrongly. Attribute: `field` where one is at fault."""


class LengthError(ProtocolError):
    """Lengths that must agree differ, or a batch does not divide."""


class FieldError(ProtocolError, KeyError):
    """A field is missing, of the wrong type, or already there."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConflictError(ProtocolError):
    """Two batches hold different values under one key."""


class LostObjectError(ProtocolError, RuntimeError):
    """Bytes a batch refers to are gone. Attributes: `role`, `rank`, `method` that made them."""


class DispatchError(QuadrigaError, ValueError):
    """A call cannot be split, sent or joined as its dispatch mode says."""


class UnregisteredMethodError(DispatchError, AttributeError):
    """The worker class has no such registered method. Attributes: `method`, `known`."""


class MeshError(DispatchError):
    """A mesh was never registered, or was registered twice. Attribute: `mesh_name`."""


class WorkerError(QuadrigaError, RuntimeError):
    """Something went wrong in a worker. Attributes: `role`, `rank`, `node`, `method`."""


class WorkerMethodError(WorkerError):
    """A worker's method raised. Attribute `remote_traceback` is the worker's own traceback."""


class WorkerInitError(WorkerError):
    """A worker's `__init__` raised. Attribute `remote_traceback`."""


class WorkerDiedError(WorkerError):
    """A worker process is gone."""


class CallTimeoutError(WorkerError, TimeoutError):
    """A call passed its deadline. Attribute `stacks`: rank → the stack it is stuck in."""


class CollectiveError(WorkerError):
    """A collective was asked of ranks that cannot hold one (local groups of several ranks)."""


class AlgorithmError(QuadrigaError, ValueError):
    """Tensors that the maths cannot accept. Attributes: `tensor`, `row` where known."""


class ShapeError(AlgorithmError):
    """Shapes differ where they must agree."""


class MaskError(AlgorithmError):
    """A mask holds something other than 0 and 1."""


class NonFiniteError(AlgorithmError):
    """A tensor holds NaN or infinity."""


class GroupError(AlgorithmError):
    """A group is empty or of the wrong size."""
