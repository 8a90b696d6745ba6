"""The prompt groups on their way in a folder of a checkpoint, with their responses so far.

    prompts.batch        the rows of all groups       ended.batch    responses that have ended
    images.safetensors   the images of each group     begun.batch    responses that are paused
                                                      acting.batch   responses that wait for
                                                                     their environments
                                                      ready.batch    groups that have their scores

`meta_info` of a file has what the caller says of the run; "rows": the number of a group, the steps
that had ended at its start, the numbers of its rows, and the number of their replica; and "chats"
and "max_tokens" of groups.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from quadriga.checkpoint.files import SavedFile, digest_file, write_tensors
from quadriga.protocol import DataProto, fields
from quadriga.protocol.values import object_array
from quadriga.streams.episodes import Paused, with_routes
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue

_NAMES = _PROMPTS, _READY, _ENDED, _BEGUN, _ACTING = (
    "prompts.batch", "ready.batch", "ended.batch", "begun.batch", "acting.batch",
)  # fmt: skip
_IMAGES, _PIXELS = "images.safetensors", fields.MULTI_MODAL_INPUTS


def without_images(rows: DataProto) -> DataProto:
    """Return the fields of rows that are in a batch file."""
    arrays = [key for key in rows.non_tensor_batch if key != _PIXELS]
    return rows.select(non_tensor_batch_keys=arrays, meta_info_keys=[])


def save_groups(
    folder: Path, queue: PromptQueue, generation: SlicedGeneration, about: dict[str, Any]
) -> list[SavedFile]:
    """Write the groups of a queue whose generation is paused. `about`: the counts of the run, among
    them "drawn", the batches of prompts that it has drawn."""
    groups, ready, episodes = list(queue.groups.values()), queue.complete, generation.episodes
    if episodes is not None:
        generation.paused += episodes.settle()
    begun = with_routes([part.tokens for part in generation.paused])
    parts: dict[str, Sequence[tuple[PromptGroup, Iterable[int], DataProto]]] = {
        _PROMPTS: [(g, range(len(g.prompts)), without_images(g.prompts)) for g in groups],
        _READY: [
            (g, range(len(b)), without_images(b)) for g in ready if (b := g.batch) is not None
        ],
        _ENDED: [(g, *answer) for g in groups if g not in ready for answer in g.answers],
        _BEGUN: [(p.group, p.rows, own) for p, own in zip(generation.paused, begun, strict=True)],
        _ACTING: [] if episodes is None else episodes.waiting(),
    }
    files = []
    for name, own in parts.items():
        if own or (name == _PROMPTS and about["drawn"] > queue.taken):
            batch = DataProto.concat([of_group for *_, of_group in own]) if own else DataProto()
            rows = [
                [g.number, g.started, [int(row) for row in some], g.home and g.home.number]
                for g, some, _ in own
            ]
            chats = {str(g.number): [*map(list, g.chats.items())] for g in groups if g.chats}
            most = {str(g.number): [*map(list, g.max_tokens.items())] for g in groups}
            batch.meta_info = {"rows": rows, "chats": chats, "max_tokens": most, **about}
            batch.save_to_disk(path := folder / name)
            files.append(SavedFile(name, path.stat().st_size, digest_file(path)))
    if groups and _PIXELS in groups[0].prompts.non_tensor_batch:
        images = [(g.number, g.prompts.non_tensor_batch[_PIXELS][0]) for g in groups]
        named = {f"{i} {key}": tensor for i, own in images for key, tensor in own.items()}
        files.append(write_tensors(folder / _IMAGES, named))
    return files


def load_groups(folder: Path, queue: PromptQueue, generation: SlicedGeneration) -> dict[str, Any]:
    """Continue with the groups of a folder. Return the counts of the run; {}: no group was on its
    way, and each step had drawn one batch."""
    about: dict[str, Any] = {}
    paused = list[Paused]()
    path = folder / _IMAGES
    images = load_file(path) if path.exists() else None
    for name in _NAMES:
        if not (folder / name).exists():
            continue
        batch, first = DataProto.load_from_disk(folder / name), 0
        meta, batch.meta_info = batch.meta_info, {}
        about = meta
        for number, started, rows, home in meta["rows"]:
            own = batch.select_idxs(np.arange(len(rows)) + first)
            first += len(rows)
            if images is not None and name in (_PROMPTS, _READY):
                head = f"{number} "
                found = {k.removeprefix(head): t for k, t in images.items() if k.startswith(head)}
                own.non_tensor_batch[_PIXELS] = object_array([found] * len(own))
            if name == _PROMPTS:
                chats, most = (
                    dict(meta[key].get(str(number), [])) for key in ("chats", "max_tokens")
                )
                queue.add([PromptGroup(number, own, started, chats=chats, max_tokens=most)])
                continue
            group = queue.groups[number]
            if name == _READY:
                group.batch = own
                queue.ready(group)
            elif name == _ENDED:
                group.end(np.array(rows), own)
            else:  # the same replica goes on with them, if there is one of this number
                working = generation.replicas.working
                group.home = next((one for one in working if one.number == home), None)
                if name == _ACTING and generation.episodes is not None:
                    generation.episodes.act([(group, row) for row in rows], own)
                    continue
                paused.append(Paused(group, np.array(rows), own, np.arange(len(own))))
    generation.go_on(paused)
    return about
