"""Digests of weights that are sharded, and their comparison with those of a rollout engine.

`rollout.base.tensor_digest` is a sum over elements, so the digests of boxes that together are a
weight add up to the digest of the weight, whichever ranks hold them. The sender's digest is
computed from its own shards and not from what was sent, so a box that was lost, doubled or put into
another place changes the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.parallel.distributed import world_size
from quadriga.parallel.layouts import Box, count, slices, split
from quadriga.weight_sync.planning.plan import NAMED_TENSORS

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements whose digest is computed at once: 8 bytes each for bits and index, on the device."""


def box_digest(values: Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the share of a box in the digest of its weight, modulo 2^64.

    Args:
        values: the elements of the box.
        box: where they are in the weight.
        shape: of the weight.
        dtype: the values are rounded to it first, as the rollout engine holds them.
    """
    # Row 1, columns 1 and 2 of a 2 × 3 weight have the flat indices 4 and 5, so their share is
    # bits[4] · 9 + bits[5] · 11.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    inner = tuple((0, stop - start) for start, stop in box)
    for part in split(inner, _CHUNK) if count(box) else ():
        # `reshape` copies what is not contiguous; one chunk at a time.
        flat = values[slices(part)].detach().to(dtype).reshape(-1)
        bits = flat.view(_BITS[dtype.itemsize]).to(torch.int64)
        total += (bits * (2 * _flat_index(part, box, shape, values.device) + 1)).sum()
    return int(total) % 2**64


def _flat_index(part: Box, box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index in the flat weight of each element of a part of a box, in order."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for (start, stop), (base, _), size in zip(part, box, shape, strict=True):
        own = torch.arange(base + start, base + stop, device=device)
        index = (index[..., None] * size) + own
    return index.reshape(-1)


def whole_digests(
    shares: Mapping[str, int], elements: Mapping[str, int], device: torch.device
) -> dict[str, int]:
    """Return the digest of each weight from the shares of all ranks.

    Waits for: the other ranks, which must have the same names in the same order.

    Args:
        shares: weight → sum of `box_digest` over the boxes of this rank.
        elements: weight → number of its elements.
        device: on which the collective runs.
    """
    totals = torch.tensor([_signed(shares[name]) for name in elements], device=device)
    if world_size() > 1:
        dist.all_reduce(totals)  # sums wrap around, as the digest does
    return {
        name: total + size
        for (name, size), total in zip(elements.items(), totals.tolist(), strict=True)
    }


def _signed(value: int) -> int:
    """Return the 64-bit integer with these bits: from -2^63."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def digest_of_shares(shares: list[int], elements: int) -> int:
    """Return the digest of a weight from the shares of all boxes."""
    return _signed(sum(shares)) + elements


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Check that the rollout engine holds what the training engine has.

    Raises:
        WorkerError: a weight was not sent, is not held, or differs. Names all such weights, at most
            `NAMED_TENSORS` of them. Attributes: `tensor` (the first one), `tensors`, `version`.
    """
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held
    problems = dict(_problems(sent, held))
    if not problems:
        return
    listed = [f"{name!r} {problem}" for name, problem in problems.items()]
    more = len(listed) - NAMED_TENSORS
    text = "; ".join(listed[:NAMED_TENSORS]) + (f"; and {more} more" if more > 0 else "")
    names = tuple(problems)
    raise WorkerError(
        f"weight sync to version {version}: {len(names)} of {len(set(sent) | set(held))} weights "
        f"are wrong: {text}. The run stops, because its samples would come from other weights "
        "than those that are trained",
        tensor=names[0],
        tensors=names,
        version=version,
    )


def _problems(sent: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            yield name, "was never sent, so the rollout still holds an old value"
        elif name not in held:
            yield name, "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            yield name, "differs between trainer and rollout"
