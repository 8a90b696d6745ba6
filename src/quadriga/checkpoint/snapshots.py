"""Snapshots between checkpoints: the state of each rank in the memory of another process.

    rank         copy of the state │ bytes ─► keeper, a process of another node
    controller   its own state     │
    step         waits             │ goes on

After a loss, all ranks of new groups load the newest snapshot that is complete for every rank. A
keeper has memory for two snapshots of a rank: while ranks send one, the one before stays.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from quadriga.checkpoint.folders import ControllerState, Resumed, SavedGroups
from quadriga.checkpoint.shards import Block, RankState, block_of, restore_random
from quadriga.observability.jsonl import JsonObject
from quadriga.single_controller.keepers import PART_BYTES, Keeper, keep

_log = logging.getLogger("quadriga")


def send_state(state: RankState, keeper: Keeper, key: str) -> None:
    """Send a copy of the state of a rank to a keeper: the size of a header, the header (JSON), and
    the bytes of its tensors."""
    header = json.dumps({
        "blocks": list(state.blocks),
        "extra": state.extra,
        "random": {name: tensor.tolist() for name, tensor in state.random.items()},
        "origin": asdict(state.origin),
    }).encode()  # fmt: skip
    values = (_bytes_of(block.data) for block in state.blocks.values())
    keep(keeper, key, state.origin.step, (len(header).to_bytes(8), header, *values))


def _bytes_of(data: Tensor) -> memoryview:
    return data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def receive_state(
    tensors: Mapping[str, Tensor] | Mapping[str, Block], keeper: Keeper, key: str, step: int
) -> JsonObject:
    """Fill `tensors` in place with a snapshot of this rank, and restore the random states.

    Returns:
        The scalars of the snapshot.

    Raises:
        LostObjectError: the keeper has ended, or does not have the snapshot.
    """
    start = 8 + int.from_bytes(keeper.read(key, step, 0, 8))
    header = json.loads(keeper.read(key, step, 8, start - 8))
    blocks = {name: block_of(t, header["origin"]["rank"]) for name, t in tensors.items()}
    with torch.no_grad():
        for name in header["blocks"]:
            data = blocks[name].data
            host = torch.empty(data.shape, dtype=data.dtype)
            flat = _bytes_of(host)
            for at in range(0, len(flat), PART_BYTES):
                size = min(PART_BYTES, len(flat) - at)
                flat[at : at + size] = keeper.read(key, step, start + at, size)
            data.copy_(host)
            start += len(flat)
    random = {n: torch.tensor(v, dtype=torch.uint8) for n, v in header["random"].items()}
    restore_random(random, header["extra"]["random"])
    return {**header["extra"]["scalars"]}


Keepers = dict[str, list[Keeper]]
"""Role -> the keeper of each rank."""


class Snapshots:
    """The snapshots of a run, as its controller knows them.

    Args:
        every: steps between snapshots; 0: there are none.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._groups: SavedGroups = {}
        self._keepers: Keepers = {}
        self._taken: dict[int, tuple[ControllerState, Keepers]] = {}

    def take(self, state: ControllerState, groups: SavedGroups) -> None:
        """Have all ranks copy their states and send them beside the next steps.

        Waits for: the snapshot before. If that has failed, a warning says so, and the ranks get
        new keepers.
        """
        same = self._groups == groups
        problems = [p for g in groups.values() for p in g.finish_snapshot() if p] if same else []
        if problems:
            _log.warning("the last snapshot is lost: %s", problems[0])
        if problems or not same:
            self._groups = dict(groups)
            self._keepers = {role: group.keepers() for role, group in groups.items()}
        for role, group in groups.items():
            group.start_snapshot(role, state.step, self._keepers[role])
        before = [step for step in sorted(self._taken) if step < state.step][-1:]
        self._taken = {step: self._taken[step] for step in before}
        self._taken[state.step] = state, self._keepers

    def newest(self, groups: SavedGroups, after: int) -> Resumed | None:
        """Return the newest snapshot that the keepers have of all ranks of these groups, if it is
        of a step after `after`. If there is none, all are forgotten."""
        for step, (state, keepers) in sorted(self._taken.items(), reverse=True):
            if step > after and _has_all(keepers, groups, step):
                return Resumed(None, state, False, partial(_load, keepers, step))
        self._taken = {}
        return None


def _has_all(keepers: Keepers, groups: SavedGroups, step: int) -> bool:
    if {r: len(own) for r, own in keepers.items()} != {r: g.world_size for r, g in groups.items()}:
        return False
    keys = [(k, f"{role}/{rank}") for role, own in keepers.items() for rank, k in enumerate(own)]
    return all(step in keeper.steps(key) for keeper, key in keys)


def _load(keepers: Keepers, step: int, groups: SavedGroups) -> None:
    for role, group in groups.items():
        group.load_snapshot(role, step, keepers[role])
