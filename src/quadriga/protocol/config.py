"""Settings of `DataProto` for a process."""

from __future__ import annotations

from quadriga.errors import ProtocolError


class _CheckedSettings(type):
    """Makes `DataProtoConfig.auto_padding = True` a checked assignment."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name == "auto_padding" and not isinstance(value, bool):
            raise ProtocolError(
                f"DataProtoConfig.auto_padding: expected True or False, got {value!r} "
                f"({type(value).__name__})"
            )
        super().__setattr__(name, value)


class DataProtoConfig(metaclass=_CheckedSettings):
    """Settings of `DataProto` for this process.

    `auto_padding`: if True, a batch that does not divide by the number of ranks is padded for the
    call, and the result is unpadded. `from_dict(..., auto_padding=True)` sets the same for a single
    batch. Default: False.
    """

    auto_padding: bool = False
    auto_padding_key = "_auto_padding"
    auto_padding_keys = (auto_padding_key, "_verl_auto_padding")
    """The keys of `meta_info` that allow padding. Programs written for verl set the second one."""
