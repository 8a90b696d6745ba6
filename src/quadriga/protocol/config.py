"""Settings of `DataProto` for a process."""

from __future__ import annotations

from quadriga.errors import ProtocolError


class _ConfigMeta(type):
    """Makes `DataProtoConfig.auto_padding = True` a checked assignment."""

    _auto_padding: bool = False

    @property
    def auto_padding(cls) -> bool:
        return cls._auto_padding

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ProtocolError(
                f"DataProtoConfig.auto_padding: expected True or False, got {enabled!r} "
                f"({type(enabled).__name__})"
            )
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_ConfigMeta):
    """Settings of `DataProto` for this process.

    `auto_padding`: if True, a batch that does not divide by the number of ranks is padded for the
    call, and the result is unpadded. `from_dict(..., auto_padding=True)` sets the same for a single
    batch. Default: False.
    """

    auto_padding_key = "_auto_padding"
    auto_padding_keys = (auto_padding_key, "_verl_auto_padding")
    """The keys of `meta_info` that allow padding. Programs written for verl set the second one."""
