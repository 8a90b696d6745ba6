"""Seeds on a CPU, in the processes of SGLang.

SGLang gives each sample a seed only in its deterministic inference, which also replaces kernels of
the GPU and refuses to start on a CPU. Here the seeds are kept, and the kernels stay as they are, so
the response of a row can still depend on the other rows by rounding.
"""

from __future__ import annotations

from typing import Any


def allow() -> None:
    """Let deterministic inference start with the attention of torch."""
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """Run SGLang's scheduler without kernels of the GPU."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.managers.scheduler import run_scheduler_process

    allow()
    batch_invariant_ops.enable_batch_invariant_mode = _nothing
    run_scheduler_process(*arguments, **named)


def _nothing() -> None:
    """Stand in for the replacement of kernels."""
