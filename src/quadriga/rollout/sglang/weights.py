"""New weights for SGLang in buckets of bounded size, and what it says it holds.

A bucket is one uint8 tensor and a table of the weights in it: what SGLang calls a flattened bucket.
It is pickled here; SGLang unpickles it with a list of allowed types. Nothing is unpickled here.

Example: a limit of 64 bytes and three float32 weights of 10, 4 and 20 elements. Each weight begins
at a multiple of 16 bytes. The third is larger than the limit and has a bucket of its own.

    bucket 0   a: bytes 0 to 40    b: bytes 48 to 64
    bucket 1   c: bytes 0 to 80
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError, RolloutOutputError
from quadriga.models.folder import local_folder, read_header, read_json, weight_file_names
from quadriga.models.loading import model_without_weights
from quadriga.rollout.base import check_weight, tensor_digest
from quadriga.rollout.sglang.transports import NAME, failed

_ALIGNMENT = 16

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint name of a weight -> its shape."""


@dataclass(frozen=True)
class Bucket:
    """Serialized weights, and name → `tensor_digest` of each of them."""

    digests: Mapping[str, int]
    payload: bytes


@dataclass(frozen=True)
class HeldWeight:
    """A weight in SGLang: its dtype and the `tensor_digest` of its values."""

    dtype: torch.dtype
    digest: int


def model_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every weight that a training engine sends for this model.

    Raises:
        ModelError: transformers names or stores the weights differently than the files do. SGLang
            knows the names of the files only, and ignores weights with other names.
    """
    folder = local_folder(model.path)
    built = model_without_weights(
        model.path,
        value_head=False,
        dtype="float32",
        trust_remote_code=model.trust_remote_code,
    )
    shapes = {name: tuple(weight.shape) for name, weight in built.state_dict().items()}
    in_files = {name for file in weight_file_names(folder) for name in read_header(folder, file)}
    tied: dict[int, set[str]] = {}
    for name, parameter in built.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).add(name)
    stored = in_files | {name for names in tied.values() if names & in_files for name in names}
    for name in shapes:
        if name not in stored:
            raise ModelError(
                f"rollout engine {NAME!r}: transformers computes or renames the weight {name!r} of "
                f"{type(built).__name__}, so its updates cannot be sent to SGLang under the names "
                "of the files; use rollout.name=hf",
                path=str(folder),
            )
    return shapes


def model_end_tokens(model: ModelConfig) -> tuple[int, ...]:
    """Return the end tokens that config.json and generation_config.json of the model name."""
    folder = local_folder(model.path)
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            ends = read_json(folder, name).get("eos_token_id")
            ids = ends if isinstance(ends, list) else [ends]
            found += [token for token in ids if isinstance(token, int)]
    return tuple(dict.fromkeys(found))


def checked(
    stream: Iterable[tuple[str, Tensor]], shapes: Shapes, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights on the CPU in the dtype of the engine, contiguous.

    Raises:
        ModelError: the model has no weight of that name and shape, or one comes twice.
    """
    seen: set[str] = set()
    for name, weight in stream:
        check_weight(name, weight, shapes)
        if name in seen:
            raise ModelError(f"received weight {name!r} twice in one update")
        seen.add(name)
        yield name, weight.detach().to("cpu", dtypes.get(name, weight.dtype)).contiguous()


def buckets(stream: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Yield buckets of at most `limit` bytes of weights, or of one weight."""
    bucket: list[tuple[str, Tensor, int]] = []
    size = 0
    for name, weight in stream:
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        if bucket and start + weight.nbytes > limit:
            yield _serialized(bucket, size)
            bucket, start = [], 0
        bucket.append((name, weight, start))
        size = start + weight.nbytes
    if bucket:
        yield _serialized(bucket, size)


def _serialized(bucket: list[tuple[str, Tensor, int]], size: int) -> Bucket:
    flat = torch.zeros(size, dtype=torch.uint8)
    table, digests = [], {}
    for name, weight, start in bucket:
        end = start + weight.nbytes
        flat[start:end] = weight.reshape(-1).view(torch.uint8)
        digests[name] = tensor_digest(weight)
        # The types are those that SGLang's list of allowed types has.
        place = {"start_idx": start, "end_idx": end, "numel": weight.nbytes}
        table.append(SimpleNamespace(name=name, shape=weight.shape, dtype=weight.dtype, **place))
    return Bucket(digests, pickle.dumps({"flattened_tensor": flat, "metadata": table}))


# Reading back. `scheduler.py` runs in the scheduler of a host that was started here. It is called
# as a loader of weights, gets one tensor with a question, and writes the answer to a file.


def question(shapes: Shapes, file: Path) -> bytes:
    """Return the serialized question for the weights of these names."""
    text = json.dumps({"file": str(file), "shapes": {n: list(s) for n, s in shapes.items()}})
    return pickle.dumps(
        [("question", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
    )


def read_answer(file: Path) -> dict[str, HeldWeight]:
    """Return the weights that SGLang holds; names that it could not locate are missing.

    Raises:
        RolloutOutputError: reading back failed in SGLang.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    except FileNotFoundError:
        content = {"error": f"there is no answer in {file}; look at the log of SGLang"}
    if "error" in content:
        problem = f"its weights could not be read back: {content['error']}"
        raise failed(RolloutOutputError, problem, fault="weights", row=None)
    return {
        name: HeldWeight(getattr(torch, dtype), int(digest))
        for name, (dtype, digest) in content["held"].items()
    }
