"""Switches of the protocol that hold for a whole process."""

from __future__ import annotations

from quadriga.errors import ProtocolError


class _ConfigMeta(type):
    """Gives the class a checked property, so that `DataProtoConfig.auto_padding = True` works."""

    _auto_padding: bool = False

    @property
    def auto_padding(cls) -> bool:
        return cls._auto_padding

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
    `from_dict(..., auto_padding=True)`. Off until it is set.
    """

    auto_padding_key = "_auto_padding"
