"""Optimizers over the parameter shards of a rank, chosen by `optim.name`.

- `sharded`: clipping, skipped steps, the schedule, the state in a checkpoint, and which update rule
  updates which parameter.
- `rules`: the protocol of an update rule; AdamW, AdamW with 8 bits, Muon.

Importing this file imports no torch.
"""

from __future__ import annotations

import importlib.util

from quadriga.config.schema import OptimConfig
from quadriga.errors import ConfigError


def check_optimizer_packages(key: str, optim: OptimConfig) -> None:
    """Check that the package of the optimizer is installed. `key`: the section of the settings.

    Raises:
        ConfigError: it is not; the message has the command that installs it.
    """
    if optim.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{key}.name=adamw_8bit needs the package torchao, which is not installed; run "
            f"pip install 'quadriga[optim8bit]', or set {key}.name=adamw",
            key=f"{key}.name",
        )
