"""Check that a folder holds a model, and read its end tokens.

Nothing here loads weights or imports torch, so settings can be checked before a worker starts. The
check of sizes needs the headers of the weight files only, so it costs the same for any model, and
it is made before anything is allocated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from quadriga.config.hub import HUB_PREFIX, hub_reason
from quadriga.config.paths import is_remote, local_path
from quadriga.config.schema import ModelConfig
from quadriga.config.stores import fetched
from quadriga.errors import ModelError, first_line
from quadriga.models.architectures import check_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ModelSource = ModelConfig | str | Path
"""The settings of a model, or the path of its folder."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with one of these files has a tokenizer. Some need others beside it (merges.txt)."""

_CONFIG_FILES = ("*.json", "*.py")


def model_settings(model: ModelSource) -> ModelConfig:
    """Return the settings of a model; those of a path are the defaults."""
    return model if isinstance(model, ModelConfig) else ModelConfig(path=str(model))


def local_folder(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder that `path` names; download `hf://owner/name` from the hub if necessary,
    and a remote folder from its store.

    Args:
        weights: False: download the configs only, of a model of the hub.

    Raises:
        ModelError: the hub has no such model, or it cannot be reached and there is no cached copy.
        StoreError: a remote folder does not exist, cannot be read or is damaged.
    """
    text = local_path(path, hub=True, remote=True)
    if not text.startswith(HUB_PREFIX):
        return fetched(text) if is_remote(text) else Path(text)
    from huggingface_hub import snapshot_download

    try:
        files = None if weights else list(_CONFIG_FILES)
        return Path(snapshot_download(text.removeprefix(HUB_PREFIX), allow_patterns=files))
    except (OSError, ValueError) as error:  # those of huggingface_hub are of these kinds
        name, why = text.removeprefix(HUB_PREFIX), hub_reason(error)
        here = "" if Path(name).exists() else f"; nor is there a folder {name} here"
        raise ModelError(f"{text} cannot be downloaded from the hub: {why}{here}") from error


def check_model_folder(
    path: str | Path,
    *,
    weights: bool = True,
    tokenizer: bool = True,
    trust_remote_code: bool = False,
) -> None:
    """Check that a folder holds a model.

    A model folder holds files and links to files. It has a config.json with a `model_type` (one
    that transformers knows, or the folder's own code if `trust_remote_code` is set), safetensors
    weights with all their shards that fit the sizes in config.json, and tokenizer files.

    Args:
        weights: also require the weights, and an architecture that is not refused
            (`check_architecture`).
        tokenizer: also require the tokenizer.

    Raises:
        ModelError: the folder is not a model folder, or its architecture is refused. Names the
            folder and the missing file.
    """
    folder, config = check_model_files(path, tokenizer=tokenizer)
    model_type = str(config["model_type"])
    if not (trust_remote_code and "auto_map" in config):
        from transformers.models.auto import configuration_auto

        if model_type not in configuration_auto.CONFIG_MAPPING_NAMES:  # type: ignore[attr-defined]
            raise ModelError(
                f"{folder / 'config.json'} has model_type {model_type!r}, which this version of "
                "transformers does not support"
            )
    if weights:
        check_architecture(model_type, str(folder))
        check_weight_files(folder, config)


def check_model_files(
    path: str | Path, *, tokenizer: bool = True
) -> tuple[Path, Mapping[str, JsonValue]]:
    """Check that a folder has a config.json with a type, and tokenizer files unless another folder
    has them. Imports no transformers. Return the folder and its config.

    Raises:
        ModelError: as `check_model_folder`.
    """
    folder = local_folder(path)
    if not str(path):
        raise ModelError("the path of the model folder is empty; set the model's path")
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(
            f"model folder {folder} {what} (for a model on the hub, write {HUB_PREFIX}owner/name)"
        )
    _check_entries(folder)
    config = read_json(folder, "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} has no model_type")
    check_sizes(folder, config)
    if tokenizer and not has_tokenizer(folder):
        raise ModelError(
            f"model folder {folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}"
        )
    return folder, config


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a local folder has the files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def _check_entries(folder: Path) -> None:
    """Raise `ModelError` for an entry that a reader would wait for or read without end.

    Links to files are followed: the cache of the hub holds models as links.
    """
    try:
        for entry in sorted(folder.iterdir()):
            if not entry.is_file() and not entry.is_dir():
                what = "neither a file nor a folder" if entry.exists() else "a link to nothing"
                raise ModelError(
                    f"{entry} is {what}; a model folder holds files and links to files"
                )
    except OSError as error:
        raise ModelError(f"model folder {folder} cannot be read: {error.strerror}") from error


def end_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response, in ascending order.

    They are the tokenizer's end token and those in the folder's generation_config.json. Without
    any there, as in transformers, those in its config.json.
    """
    folder = local_folder(path)
    named = None
    for name in ("generation_config.json", "config.json"):
        if named is None and (folder / name).is_file():
            settings = read_json(folder, name)
            text = settings.get("text_config")  # in the config of a model of text and images
            inner = text.get("eos_token_id") if isinstance(text, dict) else None
            named = settings.get("eos_token_id", inner)
    values = named if isinstance(named, list) else [named]
    ends = {value for value in values if isinstance(value, int)}
    return tuple(sorted({int(tokenizer.eos_token_id), *ends}))


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a safetensors file says about one tensor.

    Attributes:
        file: the name of the file in the folder.
        dtype: as the format names it, for example "BF16".
        shape: its sizes. Elements are in row-major order.
        start: index in the file of its first byte.
        stop: index in the file of the byte after its last one.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
"""A value as `json.loads` returns it."""

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 * 2**20
_RANK_FILE = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

_SLACK = 16
"""How many times the numbers in the weights a product of sizes may be. Layers of a hybrid model
differ, and quantized weights hold several numbers in one."""

_REFUSED_KEYS = {
    "transformers_weights": (
        f"names other weights; only {_WEIGHTS} and the files of {_WEIGHTS_INDEX} are loaded. "
        "Remove the key"
    ),
    "quantization_config": (
        "asks for a library that quantizes weights, which can load kernels of the hub, and "
        "quantized weights cannot be trained. Convert the model to bfloat16: load it with "
        "transformers and dequantize=True, save it, and remove the key"
    ),
    "fusion_config": "replaces parts of transformers in the whole process. Remove the key",
    "distributed_config": (
        "changes how transformers saves the model; Quadriga distributes it by its own settings. "
        "Remove the key"
    ),
}
"""Keys of config.json that let transformers do something else than build the model and load its
weights -> what they do, and what to do about it."""

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST = {**dict.fromkeys(_LAYERS, 10_000), "num_labels": 1_000_000}
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PRODUCTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("vocab_size",), _HIDDEN),
    (("n_positions",), _HIDDEN),
    (_LAYERS, _HIDDEN, ("intermediate_size", "n_inner", "ffn_dim", "d_ff")),
    (_LAYERS, _HIDDEN, _HEADS, ("head_dim",)),
    (_LAYERS, _HIDDEN, ("num_key_value_heads",), ("head_dim",)),
    (_LAYERS, _HIDDEN),
    (_HIDDEN, _EXPERTS, ("moe_intermediate_size",)),
    (_HIDDEN, _EXPERTS),
    (_HIDDEN, _HEADS),
)
"""Products that the number of parameters reaches. Each factor is the first name that config.json
has; a product with an absent factor is left out."""


def read_json(folder: Path, name: str) -> Mapping[str, JsonValue]:
    """Read a JSON object from a file of the folder.

    Raises:
        ModelError: the file is missing or too large, or it holds no JSON object.
    """
    path = folder / name
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size} bytes; at most {_MAX_JSON_BYTES} are read"
            )
        content: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        absent = isinstance(error, FileNotFoundError | IsADirectoryError)
        problem = f"it has no {name}" if absent else f"{name} cannot be read: {error.strerror}"
        raise ModelError(f"{folder} is not a model folder: {problem}") from None
    # ValueError: also wrong encodings, and numbers with too many digits.
    except (RecursionError, ValueError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"{path} is not JSON: {problem}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def check_weight_files(folder: Path, config: Mapping[str, JsonValue]) -> None:
    """Check that the weights are complete safetensors files and fit the sizes in config.json.

    Raises:
        ModelError: a file is missing, is no safetensors file or would be read from another place
            than the folder; or config.json has a key of `_REFUSED_KEYS`, or describes a model that
            is far larger than the weights.
    """
    for source in (config, *_sections(config)):
        for key, why in _REFUSED_KEYS.items():
            if source.get(key) is not None:
                raise ModelError(f"{folder / 'config.json'}: {key!r} {why}")
    for path in sorted(folder.iterdir()):
        if path.name == "adapter_config.json" or _RANK_FILE.fullmatch(path.name):
            raise ModelError(
                f"model folder {folder} has {path.name}, which would be loaded in place of "
                f"{_WEIGHTS}; merge the adapter, or the files of the ranks, into {_WEIGHTS}"
            )
    stored = [t for name in weight_file_names(folder) for t in read_header(folder, name).values()]
    tensors = len(stored)
    numbers = sum(math.prod(tensor.shape) for tensor in stored)
    for section in (config, *_sections(config)):
        _check_products(folder, section, tensors, numbers)


def check_sizes(folder: Path, config: Mapping[str, JsonValue]) -> None:
    """Check that no size in config.json makes its reader build a list without bounds.

    Raises:
        ModelError: a size is not a positive integer, or there are too many layers or labels.
    """
    names = {name for product in _PRODUCTS for factor in product for name in factor}
    for section in (config, *_sections(config)):
        for name in sorted(names & section.keys()):
            value = section[name]
            # A list holds one value for each layer. Some configs say 0, or -1, for "none".
            if value is not None and not isinstance(value, list):
                least = 1 if name in (*_HIDDEN, *_HEADS, "vocab_size") else -1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ModelError(
                        f"{folder / 'config.json'}: {name} must be an integer of at least {least}, "
                        f"got {_short(value)}"
                    )
        for name, most in _MOST.items():
            value = section.get(name)
            if isinstance(value, (int, float)) and value > most:
                raise ModelError(
                    f"{folder / 'config.json'}: {name} is {_short(value)}; at most {most} are "
                    "supported"
                )


def _check_products(
    folder: Path, section: Mapping[str, JsonValue], tensors: int, numbers: int
) -> None:
    """Raise `ModelError` if the weights are far too few for a product of sizes."""
    # vocab_size 10^12 and hidden_size 32 with weights of 50 000 numbers: the embedding alone would
    # have 3.2 · 10^13 numbers, and 16 · 50 000 = 8 · 10^5.
    found = _size(section, _LAYERS)
    if found is not None and found[1] > tensors:
        raise ModelError(
            f"{folder / 'config.json'} describes {found[1]} layers ({found[0]}), but the weights "
            f"hold {tensors} tensors"
        )
    for product in _PRODUCTS:
        factors = [_size(section, names) for names in product]
        known = [factor for factor in factors if factor is not None]
        total = math.prod(value for _, value in known)
        if len(known) == len(product) and total > _SLACK * max(numbers, 1):
            formula = " × ".join(f"{name} {_short(value)}" for name, value in known)
            raise ModelError(
                f"{folder / 'config.json'} describes at least {formula} = {_short(total)} "
                f"parameters, but the weights hold {numbers} numbers"
            )


def _size(section: Mapping[str, JsonValue], names: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first of `names` that the section has as an integer, and its value."""
    for name in names:
        value = section.get(name)
        if isinstance(value, int):
            return name, value
    return None


def _sections(config: Mapping[str, JsonValue]) -> Iterator[Mapping[str, JsonValue]]:
    """Yield the configs inside a config: of the text model, of an image encoder and so on."""
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            yield value
            yield from _sections(value)


def weight_file_names(folder: Path) -> list[str]:
    """Return the names of the weight files, which are files of the folder itself.

    Raises:
        ModelError: a file is missing, or the index names a file that is not in the folder itself.
    """
    if (folder / _WEIGHTS).is_file():
        return [_WEIGHTS]
    if not (folder / _WEIGHTS_INDEX).is_file():
        problem = f"model folder {folder} has no {_WEIGHTS}"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            problem += "; its pickled weights are not loaded, because a pickle can run code: "
            problem += "convert them to safetensors"
        raise ModelError(problem)
    weight_map = read_json(folder, _WEIGHTS_INDEX).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    shards = sorted({str(name) for name in names})
    for name in shards:
        if not re.fullmatch(r"[\w][\w.\-]*\.safetensors", name):
            raise ModelError(
                f"{folder / _WEIGHTS_INDEX} names the weight file {_short(name)}; only safetensors "
                "files in the folder itself are loaded, because a pickle can run code"
            )
    absent = [name for name in shards if not (folder / name).is_file()]
    if absent or not shards:
        raise ModelError(
            f"{len(absent)} of {len(shards)} weight files are missing from model folder {folder}"
            + (f"; the first is {absent[0]}" if absent else "")
        )
    return shards


def read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by their names. Reads no tensor.

    The file starts with the length of the header (8 bytes, little-endian), then the header: a JSON
    object of tensor name -> {"dtype", "shape", "data_offsets"}. The offsets count from the end of
    the header.

    Raises:
        ModelError: the file cannot be read, or it is no safetensors file: also if it is not as long
            as its header says, or if tensors overlap.
    """
    path = folder / name
    try:
        # The library compares the header with the length of the file.
        with safe_open(path, "np"), path.open("rb") as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(begin - 8))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded: {name} is not a safetensors file: "
            f"{first_line(error)}"
        ) from None
    header.pop("__metadata__", None)
    return {
        tensor: StoredTensor(
            name, entry["dtype"], tuple(entry["shape"]),
            *(begin + offset for offset in entry["data_offsets"]),
        )
        for tensor, entry in header.items()
    }  # fmt: skip


def _short(value: JsonValue) -> str:
    """Return the value as text of at most 40 characters."""
    if isinstance(value, int) and abs(value) >= 10**15:
        return f"about 10^{int(math.log10(abs(value)))}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
