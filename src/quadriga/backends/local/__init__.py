"""Worker groups in the controller's own process: no Ray, and breakpoints work.

    backend.py     LocalBackend and LocalWorkerGroup: ranks, their calls, the store of remote fields
    deadlines.py   deadlines of calls that run in the thread of the caller

May import `single_controller`, `protocol` and `errors`. Names load when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.backends.local.backend import (
        LocalBackend as LocalBackend,
        LocalWorkerGroup as LocalWorkerGroup,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
