"""Every error that Quadriga raises on purpose.

    QuadrigaError
    ├── InputError              the user's input is wrong; the command line exits with code 2
    │   ├── ConfigError             a setting is of the wrong type, out of range or in conflict
    │   │   └── UnknownSettingError     no setting has this name; the message names the nearest one
    │   ├── DataError               a data file or one of its rows cannot be used
    │   ├── ModelError              a folder is not a model, or the model does not fit its use
    │   ├── UnknownNameError        a registry has no such entry (estimator, loss, …)
    │   ├── PlacementError          the cluster does not have the resources that were requested
    │   ├── CheckpointError         a checkpoint is missing, incomplete or of another run
    │   └── StoreError              a remote file cannot be read or written, or is damaged
    ├── ProtocolError           a batch was built or used incorrectly
    │   ├── LengthError             fields of one batch differ in length, or a batch does not divide
    │   ├── FieldError              a field is missing, of the wrong type or already present
    │   ├── ConflictError           two batches hold different values under one key
    │   └── LostObjectError         a remote field is lost: its owner or its node has ended
    ├── DispatchError           the dispatch mode cannot split, send or collect a call
    │   ├── UnregisteredMethodError the worker has no registered method of this name
    │   ├── TakenModeError          a mode of this name is registered already
    │   ├── DirectCallError         the method is called on a worker, not through its group
    │   └── MeshError               a mesh is not registered, or is registered twice
    ├── WorkerError             a call failed in a worker
    │   ├── WorkerMethodError       the method raised; carries role, rank and the worker's traceback
    │   ├── WorkerInitError         the worker's `__init__` raised
    │   ├── WorkerDiedError         the process of a worker has ended
    │   ├── ClusterLostError        Ray cannot be used any more: its control store has ended
    │   ├── CallTimeoutError        deadline exceeded; carries the stack of each rank that is late
    │   └── CollectiveError         a collective needs ranks that this backend does not connect
    ├── RolloutError            a rollout engine failed, or is released or closed
    │   ├── RolloutInputError       a prompt is empty, too long or has an id outside the vocabulary
    │   ├── RolloutAbilityError     the engine cannot do what the settings ask
    │   ├── RolloutOutputError      the engine returned responses that break its protocol
    │   ├── RolloutDiedError        the engine's process has ended
    │   └── RolloutTimeoutError     the engine did not answer before its deadline
    ├── MismatchError           rollout and training differ by more than the settings allow
    ├── RewardError             a reward function failed, and reward.on_failure=fail
    ├── CallbackError           a callback raised; the run ends, and its last step is saved
    └── AlgorithmError          tensors that an algorithm cannot use
        ├── ShapeError              shapes differ where they must agree
        ├── MaskError               a mask holds values other than 0 and 1
        ├── NonFiniteError          NaN or infinity; names the tensor and the row
        └── GroupError              a prompt group is empty or of the wrong size

`LengthError`, `FieldError`, `ConflictError`, `MeshError` and `TakenModeError` are AssertionErrors
too: verl checks the same by `assert`, and programs written for it catch that class.

A message says what was expected, what was received, where, and what to do. Keyword arguments become
attributes (`error.rank`). Errors are sent between processes, so every error can be pickled, and its
attributes are pickled with it. Messages quote text of files and settings, which may come from
anyone, so characters that control a terminal or cannot be encoded are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_COLORS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Control sequences such as colors, which Ray's messages contain."""
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` without color sequences, and with other control characters escaped.

    Lines and tabs stay. Lone surrogates, which no encoding can write, are escaped too.
    """
    return _UNPRINTABLE.sub(lambda m: m[0].encode("unicode_escape").decode(), _COLORS.sub("", text))


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error."""
    return (str(error).strip() or "no message").splitlines()[0]


def nearest_name(name: str, known: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the known name that is most similar to a misspelt one; None if none is similar.

    `least`: the smallest similarity, from 0 to 1.
    """
    import difflib  # only when a name is wrong

    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=least)), None)


def _restore(
    cls: type[QuadrigaError], args: tuple[object, ...], state: dict[str, object]
) -> Exception:
    # Not `cls(*args)`: a subclass may take more than a message, and its `__init__` has run once.
    # Python allows only the `__new__` of the base that determines the layout: a CallTimeoutError is
    # an OSError too.
    new = OSError.__new__ if issubclass(cls, OSError) else Exception.__new__
    error = new(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class QuadrigaError(Exception):
    """Base class of every error here. `details` become attributes and are pickled with it."""

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(printable(str(message)))
        self.__dict__.update(details)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


class InputError(QuadrigaError):
    """The user's input is wrong. It is raised before any worker starts wherever possible."""


class ConfigError(InputError, ValueError):
    """A setting is of the wrong type, out of range or in conflict. Attribute where known: `key`."""


class UnknownSettingError(ConfigError):
    """No setting has this name. Attributes: `key`, `nearest` (or None)."""


class DataError(InputError, ValueError):
    """A data file or one of its rows cannot be used. Attributes where known: `path`, `row`."""


class ModelError(InputError, ValueError):
    """A folder is not a model, or the model does not fit its use."""


class UnknownNameError(InputError, KeyError):
    """A registry has no such entry. Attributes: `name`, `known`, `nearest`."""

    def __str__(self) -> str:  # KeyError.__str__ returns the repr of the message
        return str(self.args[0])


def unknown_name(
    kind: str, name: object, known: Iterable[str], remedy: str = ""
) -> UnknownNameError:
    """Return the error for a name that a table lacks. `kind`: what the table holds."""
    known = list(known)
    nearest = nearest_name(str(name), known)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    text = f"there is no {kind} {name!r}; known: {', '.join(known) or 'none'}{hint}{remedy}"
    return UnknownNameError(text, name=name, known=known, nearest=nearest)


class PlacementError(InputError, RuntimeError, ValueError):
    """The cluster lacks resources. Attributes: `pool`, `wanted`, `available`."""


class CheckpointError(InputError, RuntimeError):
    """A checkpoint is missing, incomplete or of another run. Attribute: `path`."""


class StoreError(InputError, RuntimeError):
    """A remote file cannot be read or written. Attributes: `path`, and `damaged`, whether the file
    is missing or has another content than was written."""

    damaged: bool


class ProtocolError(QuadrigaError, ValueError):
    """A batch was built or used incorrectly. Attribute where one field is at fault: `field`."""


class LengthError(ProtocolError, AssertionError):
    """Lengths that must agree differ, or a batch does not divide evenly."""


class FieldError(ProtocolError, KeyError, AssertionError):
    """A field is missing, of the wrong type or already present."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConflictError(ProtocolError, AssertionError):
    """Two batches hold different values under one key."""


class LostObjectError(ProtocolError, RuntimeError):
    """A remote field is lost. Attributes: `role`, `rank` and `method` that produced it, and `late`,
    the keys of stored values that did not arrive in time, if that is the reason."""


class DispatchError(QuadrigaError, ValueError):
    """The dispatch mode of a method cannot split, send or collect a call."""


class UnregisteredMethodError(DispatchError, AttributeError):
    """The worker class has no registered method of this name. Attributes: `method`, `known`."""


class TakenModeError(DispatchError, AssertionError):
    """A dispatch or execute mode of this name is registered already. Attribute: `name`."""


class DirectCallError(DispatchError, NotImplementedError):
    """A method that is called on a worker was called through its group. Attribute: `method`."""


class MeshError(DispatchError, AssertionError):
    """A mesh is not registered, or is registered twice. Attribute: `mesh_name`."""


class WorkerError(QuadrigaError, RuntimeError):
    """A call failed in a worker. Attributes: `role`, `rank`, `node`, `method`."""


class WorkerMethodError(WorkerError):
    """A method of a worker raised. Attribute: `remote_traceback`, the traceback in the worker."""


class WorkerInitError(WorkerError):
    """The `__init__` of a worker raised. Attribute: `remote_traceback`."""


class WorkerDiedError(WorkerError):
    """The process of a worker has ended."""


class ClusterLostError(WorkerError):
    """The cluster cannot be used any more: its control store, or the daemon of the controller's own
    node, has ended. Attribute `own`: this process has started the cluster, and can start another.
    """

    own = False


class CallTimeoutError(WorkerError, TimeoutError):
    """A call exceeded its deadline. Attribute `stacks`: rank → stack trace of that rank."""


class CollectiveError(WorkerError):
    """Ranks that no process group connects were asked for a collective (local backend)."""


class RolloutError(QuadrigaError, RuntimeError):
    """A rollout engine failed. Attributes where known: `engine`, `rank`, `method`, `version`."""


class RolloutInputError(RolloutError, InputError, ValueError):
    """A prompt cannot be generated from. Attributes: `engine`, `row`."""


class RolloutAbilityError(RolloutError, InputError, ValueError):
    """The engine cannot do what the settings ask. Attributes: `engine`, `setting`."""


class RolloutOutputError(RolloutError):
    """An engine's output breaks its protocol. Attributes: `engine`, `fault`, `row` (or None)."""


class RolloutDiedError(RolloutError):
    """The process of an engine has ended."""


class RolloutTimeoutError(RolloutError, TimeoutError):
    """An engine did not answer before its deadline. Attributes: `engine`, `method`, `deadline`."""


class MismatchError(QuadrigaError, RuntimeError):
    """Rollout and training log-probabilities differ by too much. Attributes: `step`, `share`."""


class RewardError(QuadrigaError, RuntimeError):
    """A reward function failed. Attributes: `row`, `data_source`, `status`."""


class CallbackError(QuadrigaError, RuntimeError):
    """A callback raised. Attributes: `callback`, `event`, `step`, and `remote_traceback`, the
    traceback of its code."""


class AlgorithmError(QuadrigaError, ValueError):
    """An algorithm cannot use a tensor. Attributes where known: `tensor`, `row`."""


class ShapeError(AlgorithmError):
    """Shapes differ where they must agree."""


class MaskError(AlgorithmError):
    """A mask holds values other than 0 and 1."""


class NonFiniteError(AlgorithmError):
    """A tensor holds NaN or infinity."""


class GroupError(AlgorithmError):
    """A prompt group is empty or of the wrong size."""
