"""The one place that keeps other libraries' chatter out of a run's output.

Errors and warnings of Python itself stay; progress bars, advice and information lines go.
"""

from __future__ import annotations

import logging
import os
import sys

_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "GLOO_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_LOGGERS = {
    "transformers": logging.ERROR,
    "huggingface_hub": logging.ERROR,
    "ray": logging.WARNING,
    "matplotlib": logging.ERROR,
    "torch.distributed": logging.ERROR,
    "absl": logging.ERROR,
    "tensorboard": logging.ERROR,
}


def silence_libraries() -> None:
    """Quieten libraries in this process and the processes it starts; call it before they load.

    What the user set in the environment stays as it is. May be called any number of times.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    loaded = sys.modules.get("transformers.utils.logging")
    if loaded is not None:
        loaded.set_verbosity_error()
        loaded.disable_progress_bar()
