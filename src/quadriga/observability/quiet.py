"""Set the log levels of other libraries, so that the output of a run is its own.

Progress bars, advice and information lines are turned off. Errors stay, and so do the warnings of
Python itself.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quadriga.config.secrets import mask_logs

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
_AT_IMPORT = dict.fromkeys(("torchao", "torch.utils._pytree"), logging.ERROR)
_LOGGERS = {
    "transformers": logging.ERROR,
    "huggingface_hub": logging.ERROR,
    "ray": logging.WARNING,
    "matplotlib": logging.ERROR,
    "mlflow": logging.WARNING,
    "torch.distributed": logging.ERROR,
    **_AT_IMPORT,
    "absl": logging.ERROR,
    "tensorboard": logging.ERROR,
}


def silence_imports() -> None:
    """Silence what transformers imports: torchao tells which of its kernels it cannot load."""
    for name, level in _AT_IMPORT.items():
        logging.getLogger(name).setLevel(level)


def silence_libraries() -> None:
    """Lower the log level of libraries in this process and in the processes that it starts.

    Secrets in the log records of this process are masked from then on.

    Call it before the libraries are imported. Environment variables that the user has set are not
    changed. Further calls have no effect.
    """
    mask_logs()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in _LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    # transformers reads its environment variables when it is imported, so a copy that is already
    # imported has to be told directly.
    loaded = sys.modules.get("transformers.utils.logging")
    if loaded is not None:
        loaded.set_verbosity_error()
        loaded.disable_progress_bar()


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block, transformers shows no progress bars and logs errors only.

    The previous settings are restored at the end. Model loaders use this, so that they are quiet in
    a process that never called `silence_libraries`.
    """
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    progress_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if progress_bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above
