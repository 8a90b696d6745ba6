"""Export a trained model as a Hugging Face folder."""

import copy
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from quadriga.checkpoint.folders import replace_folder, restore_folder
from quadriga.config.paths import local_path
from quadriga.data.conversations import turn_end_ids
from quadriga.errors import ModelError
from quadriga.files import flush, remove, writing
from quadriga.models.folder import TOKENIZER_FILES, has_tokenizer
from quadriga.models.loading import model_errors
from quadriga.observability.quiet import quiet_libraries


def export_hf(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    config: PreTrainedConfig,
    *,
    generation: GenerationConfig | None = None,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    write: bool = True,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Write config, weights (safetensors) and tokenizer to `folder`.

    Every rank must call it, because iterating over `weights` is a collective operation: sharded
    parameters are gathered one after the other. Only the rank with `write` keeps and writes them.
    An existing folder is replaced after the new one is complete. If the process is killed while it
    is replaced, `<folder>.replaced` holds the old one, and the next export renames it back first.

    Args:
        weights: (name, full tensor) pairs, possibly on an accelerator.
        generation: settings of generation. The token with which the chat template ends a turn is
            added to its end tokens, since a trained response ends with it.
        tokenizer_path: the folder of the tokenizer; None: none is exported.
        extra: writes further files into the folder that it receives.

    Raises:
        ModelError: `tokenizer_path` has no tokenizer, or it cannot be loaded. What was at `folder`
            is still there.
        InputError: the folder cannot be written. The incomplete new one is removed.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in weights:
        if write:
            # A copy, because tied weights are the same tensor under two names, and the parameters
            # of a model on the CPU are yielded themselves.
            kept[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if not write:
        return
    folder = Path(local_path(folder))
    # A name of its own: a rank of a lost node may still write into the folder of an earlier export.
    partial = folder.with_name(folder.name + ".partial") / secrets.token_hex(4)
    with writing(folder), ExitStack() as undo:
        restore_folder(folder)
        with suppress(OSError):
            remove(partial.parent)
        undo.callback(_remove_own, partial)
        partial.mkdir(parents=True)
        save_torch_state_dict(kept, partial, metadata={"format": "pt"})
        config.save_pretrained(partial)
        if tokenizer_path is not None:
            tokenizer = _load_tokenizer(Path(tokenizer_path), trust_remote_code=trust_remote_code)
            # Every tokenizer writes the files that it is loaded from: a GPT-2 with vocab.json and
            # merges.txt writes tokenizer.json and tokenizer_config.json.
            tokenizer.save_pretrained(partial)
            generation = _with_ends(generation, turn_end_ids(tokenizer))
        if generation is not None:
            generation.save_pretrained(partial)
        if extra is not None:
            extra(partial)
        # safetensors writes files that only their owner can read; those of Python have the umask.
        mode = (partial / "config.json").stat().st_mode
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            flush(path)
        flush(partial)
        replace_folder(partial, folder)


def _remove_own(partial: Path) -> None:
    """Remove the folder of an export, and the one around it if no other export writes there."""
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        partial.parent.rmdir()


def _load_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if not has_tokenizer(folder):
        raise ModelError(
            f"the model cannot be exported: {folder} has no tokenizer, expected one of "
            f"{', '.join(TOKENIZER_FILES)}; put the tokenizer back and export again",
            path=str(folder),
        )
    with quiet_libraries(), model_errors(folder, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    return tokenizer


def _with_ends(
    generation: GenerationConfig | None, ends: tuple[int, ...]
) -> GenerationConfig | None:
    """Return the settings with further end tokens; without any, they are those they are given."""
    if generation is None:
        return None
    named = generation.eos_token_id
    known = named if isinstance(named, list) else [] if named is None else [named]
    added = [end for end in ends if end not in known]
    if not added:
        return generation
    found = copy.deepcopy(generation)
    found.eos_token_id = [*known, *added]
    return found
