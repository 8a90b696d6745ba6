"""New weights for SGLang in buckets of bounded size, and what it says it holds.

A bucket is one uint8 tensor and a table of the weights in it: what SGLang calls a flattened bucket.
It is pickled here; SGLang unpickles it with a list of allowed types. Nothing is unpickled here.

The bytes of the tensor are in the pickle, or it has a handle of them that torch makes, and the
scheduler of SGLang maps the same memory: CUDA IPC on a GPU, a file in shared memory on a CPU.

Example: a limit of 64 bytes and three float32 weights of 10, 4 and 20 elements. Each weight begins
at a multiple of 16 bytes. The third is larger than the limit and has a bucket of its own.

    bucket 0   a: bytes 0 to 40    b: bytes 48 to 64
    bucket 1   c: bytes 0 to 80

To read weights back, SGLang calls `answer` in its scheduler process as a loader of weights
(`custom_weight_loader`) with a `question`. A weight of a checkpoint is a parameter of SGLang, or a
part of one:

    q_proj  [64, 64]                              the parameter has rows of padding for the
    k_proj  [32, 64]  → qkv_proj [128, 64]        vocabulary: embed_tokens [200, 64] → [256, 64]
    v_proj  [32, 64]    rows 0, 64, 96 on
"""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
import torch.multiprocessing  # lets ForkingPickler make handles of tensors
from torch import Tensor

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.files import atomic_write
from quadriga.models.folder import local_folder, read_header, weight_file_names
from quadriga.models.loading import model_without_weights
from quadriga.models.weights import file_parts
from quadriga.rollout.base import check_weight, tensor_digest

_STRATEGY = cast(Callable[[], str], torch.multiprocessing.get_sharing_strategy)()
READBACK = "quadriga.rollout.sglang.weights.answer"
_ALIGNMENT = 16
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameter of SGLang -> the weights of a checkpoint that are stacked in it along dimension 0."""
_EXPERTS = {
    "gate_proj": ("w13_weight", 0, 2), "up_proj": ("w13_weight", 1, 2), "w1": ("w13_weight", 0, 2),
    "w3": ("w13_weight", 1, 2), "down_proj": ("w2_weight", 0, 1), "w2": ("w2_weight", 0, 1),
}  # fmt: skip
"""Weight of an expert -> the parameter of all experts, [experts, rows, columns], and which of how
many weights it is in the rows of its expert."""
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}

Shapes = Mapping[str, tuple[int, ...]]
"""Checkpoint name of a weight -> its shape."""


@dataclass(frozen=True)
class Bucket:
    """Serialized weights.

    Attributes:
        digests: name → `tensor_digest` of each weight.
        data: the bytes of the weights, which must live until handles of them were used.
        pickles: the table of the weights with the bytes; or with a handle, one for each process
            that maps them, since torch counts who uses a handle.
    """

    digests: dict[str, int]
    data: Tensor
    pickles: list[bytes]


def model_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name in the model's files and the shape of every weight that is sent for it.

    Raises:
        ModelError: the files name or divide a weight differently than `save_pretrained` does, or
            transformers computes it. SGLang ignores weights with other names than in the files.
    """
    folder = local_folder(model.path)
    built = model_without_weights(replace(model, attn_implementation="sdpa"))
    parts = file_parts(built)
    in_files = {name for file in weight_file_names(folder) for name in read_header(folder, file)}
    tied: dict[int, set[str]] = {}
    for name, parameter in built.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), set()).update(part.name for part in parts[name])
    stored = in_files | {name for names in tied.values() if names & in_files for name in names}
    shapes = {part.name: part.shape for own in parts.values() for part in own}
    for name in shapes:
        if name not in stored:
            raise ModelError(
                f"rollout engine 'sglang': the files of {type(built).__name__} have no tensor "
                f"{name!r}, so its updates cannot be sent to SGLang under the names of the files; "
                "write the model with save_pretrained, or use rollout.name=hf",
                path=str(folder),
            )
    return shapes


def checked(
    stream: Iterable[tuple[str, Tensor]],
    shapes: Shapes,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights on a device in the dtype of the engine, contiguous.

    Raises:
        ModelError: the model has no weight of that name and shape.
    """
    for name, weight in stream:
        check_weight(name, weight, shapes)
        yield name, weight.detach().to(device, dtypes.get(name, weight.dtype)).contiguous()


def buckets(stream: Iterable[tuple[str, Tensor]], limit: int, handles: int = 0) -> Iterator[Bucket]:
    """Yield buckets of at most `limit` bytes of weights, or of one weight.

    Args:
        handles: the processes that map a bucket; 0: its bytes are in its pickle.
    """
    bucket: list[tuple[str, Tensor, int]] = []
    size = 0
    for name, weight in stream:
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        if bucket and start + weight.nbytes > limit:
            yield _serialized(bucket, size, handles)
            bucket, start = [], 0
        bucket.append((name, weight, start))
        size = start + weight.nbytes
    if bucket:
        yield _serialized(bucket, size, handles)


def _serialized(bucket: list[tuple[str, Tensor, int]], size: int, handles: int) -> Bucket:
    flat = torch.zeros(size, dtype=torch.uint8, device=bucket[0][1].device)
    table, digests = [], {}
    for name, weight, start in bucket:
        end = start + weight.nbytes
        flat[start:end] = weight.reshape(-1).view(torch.uint8)
        digests[name] = tensor_digest(weight)
        # The types are those that SGLang's list of allowed types has.
        place = {"start_idx": start, "end_idx": end, "numel": weight.nbytes}
        table.append(SimpleNamespace(name=name, shape=weight.shape, dtype=weight.dtype, **place))
    content = {"flattened_tensor": flat, "metadata": table}
    if not handles:
        return Bucket(digests, flat, [pickle.dumps(content)])
    with _shared_by_name():
        pickles = [bytes(ForkingPickler.dumps(content)) for _ in range(handles)]
    return Bucket(digests, flat, pickles)


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share tensors of a CPU by the names of files; a descriptor would need a socket."""
    set_strategy = cast(Callable[[str], None], torch.multiprocessing.set_sharing_strategy)
    set_strategy("file_system")
    try:
        yield
    finally:
        set_strategy(_STRATEGY)


def question(shapes: Shapes, file: Path) -> bytes:
    """Return the serialized question for the weights of these names."""
    text = json.dumps({"file": str(file), "shapes": {n: list(s) for n, s in shapes.items()}})
    return pickle.dumps(
        [("question", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]
    )


def answer(model: torch.nn.Module, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Write dtype and digest of each weight that is asked for to the file of the question.

    With tensor parallelism each scheduler of SGLang is asked, and the answer of the last one is
    read. A divided weight has another shape in each of them, so none reports it.
    """
    question = json.loads(bytes(tensors[0][1].tolist()))
    file = Path(question["file"])
    try:
        shapes = {name: tuple(shape) for name, shape in question["shapes"].items()}
        parameters: dict[str, Tensor] = dict(model.named_buffers())
        parameters.update(model.named_parameters(remove_duplicate=False))
        held = {}
        for name in shapes:
            part = locate(parameters, name, shapes)
            if part is not None:
                held[name] = (str(part.dtype).removeprefix("torch."), str(tensor_digest(part)))
        content: dict[str, object] = {"held": held}
    except Exception as error:  # an exception would end the scheduler; the rank raises it
        content = {"error": f"{type(error).__name__}: {error}"}
    with atomic_write(file) as whole:
        whole.write(json.dumps(content).encode())


def locate(
    parameters: Mapping[str, Tensor], name: str, shapes: Mapping[str, tuple[int, ...]]
) -> Tensor | None:
    """Return the values of the weight `name` of a checkpoint; None if its place is not known."""
    if name in parameters:
        return _rows(parameters[name], 0, shapes[name], exact=True)
    layer, _, expert = name.rpartition(".experts.")
    number, _, kind = expert.removesuffix(".weight").partition(".")
    if layer and kind in _EXPERTS:
        parameter, index, of = _EXPERTS[kind]
        every, size = parameters.get(f"{layer}.experts.{parameter}"), shapes[name][0]
        if every is None or len(every) <= int(number) or every.shape[1] != of * size:
            return None
        return _rows(every[int(number)], index * size, shapes[name], exact=False)
    for fused, parts in _FUSED.items():
        for part in parts:
            if f".{part}." in name:
                whole = parameters.get(name.replace(f".{part}.", f".{fused}."))
                siblings = [name.replace(f".{part}.", f".{other}.") for other in parts]
                if whole is None or not all(sibling in shapes for sibling in siblings):
                    return None
                rows = [shapes[sibling][0] for sibling in siblings]
                if sum(rows) != whole.shape[0]:
                    return None
                start = sum(rows[: parts.index(part)])
                return _rows(whole, start, shapes[name], exact=False)
    tied = _TIED.get(name)
    if tied is None or tied not in parameters:
        return None
    return locate(parameters, tied, {tied: shapes[name]})


def _rows(whole: Tensor, start: int, shape: tuple[int, ...], *, exact: bool) -> Tensor | None:
    """Return `shape[0]` rows from `start` on; None if the parameter has another shape.

    `exact`: the parameter holds this weight alone, perhaps with rows of padding behind it.
    """
    if tuple(whole.shape) == shape:
        return whole
    padded = exact and whole.ndim == 2 and whole.shape[0] > shape[0]
    if whole.ndim != len(shape) or whole.shape[1:] != shape[1:] or (exact and not padded):
        return None
    return whole[start : start + shape[0]]
