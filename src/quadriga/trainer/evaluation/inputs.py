"""What responses depend on: settings, the model's files and the data. A file of responses names
them, so that only the same command continues it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import yaml

from quadriga.checkpoint.files import digest_file, digest_json
from quadriga.config.commands import GenerateConfig, GenerationConfig
from quadriga.config.loading import to_yaml
from quadriga.models.folder import local_folder
from quadriga.trainer.checkpoints import (
    changed_words,
    contents_digest,
    images_digest,
    setting_leaves,
)

Inputs = dict[str, object]
"""Settings by dotted key, and the contents of files as digests."""

_WITHOUT_EFFECT = (
    "trainer.", "cache_dir", "overwrite", "output", "data_files", "rollout.micro_batch_size",
    "rollout.replicas.", "model.path", "model.tokenizer_path", "model.use_shm",
)  # fmt: skip
"""Settings, or beginnings of their keys, that change no response."""
_OF_SCORES = ("reward.", "pass_at", "correct_at", "resamples", "confidence", "response_")
_LISTED = 8  # changes that a message names
_WHOLE = 1 << 30  # bytes of weights up to which all of them are digested
_SAMPLES, _SAMPLE = 64, 64 << 10  # parts of a larger weight file that are digested, and their bytes


def inputs_of(config: GenerationConfig) -> Inputs:
    """Return what the responses of a command depend on.

    The number of ranks, their backend, replicas and the size of micro-batches are left out. In
    float32 a response of hf and vllm does not depend on them. One of sglang can
    (`Rollout.not_reproduced`), and a file that is continued with other ranks then holds responses
    of both.
    """
    settings = dict(setting_leaves(yaml.safe_load(to_yaml(config)), ""))
    left_out = (*_WITHOUT_EFFECT, *_OF_SCORES)
    kept = {key: value for key, value in settings.items() if not key.startswith(left_out)}
    tokenizer = config.model.tokenizer_path
    own = config.images if isinstance(config, GenerateConfig) else []
    return {
        **kept,
        "content of data_files": contents_digest(config.data_files),
        "content of the images of data_files": images_digest(
            config.model, config.data_files, config.image_key
        ),
        **({"content of images": contents_digest(own)} if own else {}),
        "content of model.path": model_digest(config.model.path),
        **(
            {}
            if tokenizer is None
            else {"content of model.tokenizer_path": model_digest(tokenizer)}
        ),
    }


def changes(saved: Mapping[str, object], own: Mapping[str, object]) -> str:
    """Return what differs between two results of `inputs_of`, "n: 2 → 4; seed: 0 → 1", or ""."""
    keys = [*own, *(key for key in saved if key not in own)]
    found = [
        changed_words(key, saved.get(key), own.get(key))
        for key in keys
        if saved.get(key) != own.get(key)
    ]
    more = [f"and {len(found) - _LISTED} others"] if len(found) > _LISTED else []
    return "; ".join([*found[:_LISTED], *more])


def model_digest(path: str) -> str:
    """Return a digest of all files of a model folder; its name and the times of files do not count.

    A file of a model of more than 1 GiB is digested by its size and 64 parts of 64 KiB, evenly
    spaced. Training changes nearly every weight, so such a change is found.
    """
    folder = local_folder(path)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    whole = sum(file.stat().st_size for file in files) <= _WHOLE
    contents = {
        file.name: digest_file(file) if whole else _sampled(file)
        for file in files
        if file.suffix not in (".md", ".lock")
    }
    return digest_json(contents)


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    if size <= _SAMPLES * _SAMPLE:
        return digest_file(file)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for number in range(_SAMPLES):
            content.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE))
    return digest.hexdigest()
