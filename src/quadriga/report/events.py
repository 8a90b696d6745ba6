"""`events.jsonl`: the starts of a run, with their environment, and its warnings."""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quadriga.config.secrets import shown
from quadriga.errors import InputError
from quadriga.observability.jsonl import JsonlFile

PARTS = {
    "torch": "training and rollout",
    "ray": "trainer.backend=ray",
    "transformers": "models and tokenizers",
    "tensordict": "batches",
    "pyarrow": "parquet files",
    "tensorboard": "trainer.loggers: tensorboard",
    "wandb": "trainer.loggers: wandb (extra: wandb)",
    "mlflow": "trainer.loggers: mlflow (extra: mlflow)",
    "trackio": "trainer.loggers: trackio (extra: trackio)",
    "swanlab": "trainer.loggers: swanlab (extra: swanlab)",
    "matplotlib": "the learning curve",
    "peft": "LoRA (extra: lora)",
    "math_verify": "rewards for mathematics (extra: math)",
    "vllm": "rollout.name=vllm (make engines ENGINES=vllm)",
    "sglang": "rollout.name=sglang (make engines ENGINES=sglang)",
}
"""Packages that a run may use, and what for."""


def version_of(name: str) -> str | None:
    """Return the installed version of a package, "unknown" without metadata, or None."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def environment() -> dict[str, str]:
    """Return what a run depends on beside its settings: of the process of the controller."""
    import psutil
    import torch

    from quadriga import __version__
    from quadriga.parallel.control_groups import available_cpus, available_memory

    free, memory = available_memory() / 2**30, psutil.virtual_memory().total / 2**30
    found = {
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(sys.argv),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPUs": f"{available_cpus()} of {os.cpu_count()}",
        "memory": f"{free:.1f} of {memory:.1f} GiB free",
        "accelerators": str(torch.cuda.device_count()),
        "Python": platform.python_version(),
        "quadriga": __version__,
    }
    versions = {name: version_of(name) for name in PARTS}
    return found | {name: version for name, version in versions.items() if version is not None}


class EventLog(logging.Handler):
    """Writes the environment of a start of the run, and from then on the warnings of this process.

    Args:
        elapsed: returns the seconds of the run so far.

    Raises `InputError` if the file cannot be written when the run starts. A warning that cannot be
    written is on the terminal alone.
    """

    def __init__(self, path: Path, elapsed: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._file, self._elapsed = JsonlFile(path), elapsed
        try:
            self._file.write({"at": elapsed(), "environment": environment()})
        except BaseException:
            self._file.close()
            raise
        logging.getLogger("quadriga").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning. Where the program has set up no logging, print it, too, as Python does
        without any handler."""
        handlers = (*logging.getLogger("quadriga").handlers, *logging.root.handlers)
        if logging.lastResort and all(isinstance(handler, EventLog) for handler in handlers):
            logging.lastResort.handle(record)
        with suppress(InputError):
            self._file.write({"at": self._elapsed(), "warning": shown(record.getMessage())})

    def close(self) -> None:
        """Write no more warnings. A second call does nothing."""
        logging.getLogger("quadriga").removeHandler(self)
        self._file.close()
        super().close()
