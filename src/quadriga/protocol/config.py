"""Switches of the protocol that hold for a whole process."""

from __future__ import annotations

import os

from quadriga.errors import ProtocolError

_TRUE = {"1", "true", "yes", "on"}


class _ConfigMeta(type):
    """Gives the class a checked property, so that `DataProtoConfig.auto_padding = True` works."""

    _auto_padding: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        if cls._auto_padding is not None:
            return cls._auto_padding
        return os.environ.get("QUADRIGA_AUTO_PADDING", "").strip().lower() in _TRUE

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ProtocolError(
                f"DataProtoConfig.auto_padding is True or False; got {enabled!r} "
                f"({type(enabled).__name__})"
            )
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_ConfigMeta):
    """Process-wide settings of `DataProto`.

    `auto_padding`: when True, a batch that does not divide by the number of ranks is padded for
    the call and unpadded after it. A single batch asks for the same with
    `from_dict(..., auto_padding=True)`. Until it is set here, the environment variable
    QUADRIGA_AUTO_PADDING decides (off when absent).
    """

    auto_padding_key = "_auto_padding"
