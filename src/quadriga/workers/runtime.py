"""What every rank needs to know besides its role's own settings, and how a rank gets ready."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankRuntime:
    """Run-wide facts a rank needs. Made once on the controller, the same for every role."""

    device: str = "auto"  # auto | cpu | cuda | npu
    threads: int | None = None  # CPU threads a rank; None: leave as the process has it
    seed: int = 0
    total_steps: int | None = None  # optimizer steps of the run, for schedules
    max_response_length: int = 512
    user_files: tuple[str, ...] = ()  # files that add estimators, losses, dispatch modes


def prepare_rank(runtime: RankRuntime) -> str:
    """Threads, seeds, process group, user's files. Returns the device's name ("cpu", "cuda" …).

    Consumes: the rank's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    Waits for: every other rank of the group, to form the process group.
    """
    import torch

    from quadriga.algorithms.user_files import load_user_file
    from quadriga.observability.quiet import silence_libraries
    from quadriga.parallel.device import get_device_name, set_threads
    from quadriga.parallel.distributed import init_distributed

    silence_libraries()
    if runtime.threads is not None:
        set_threads(runtime.threads)
    torch.manual_seed(runtime.seed)
    device = get_device_name() if runtime.device == "auto" else runtime.device
    init_distributed(device)
    for path in runtime.user_files:
        load_user_file(path)
    return device
