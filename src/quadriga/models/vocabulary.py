"""Whether the token ids of a tokenizer, and those in settings, have a row in the embedding of the
model.

Reads config.json only, so the check runs before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError, ModelError
from quadriga.models.folder import check_model_folder, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_vocabulary(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    largest_id: int,
    trust_remote_code: bool = False,
) -> None:
    """Check that every token id that can occur in a sequence has a row in the embedding.

    Without this check, such an id is an index error in a worker, or reads the memory of another
    tensor on an accelerator.

    Args:
        largest_id: the largest token id in the data.

    Raises:
        ModelError: names the token, its id and the rows of the embedding.
    """
    folder = local_folder(path)
    rows = _rows(folder, trust_remote_code=trust_remote_code)
    largest = max(largest_id, *_ids_that_occur(tokenizer))
    if largest >= rows:
        raise ModelError(
            f"token {tokenizer.convert_ids_to_tokens(largest)!r} of the tokenizer has the id "
            f"{largest}, but the embedding of the model in {folder} has {rows} rows for the ids 0 "
            f"to {rows - 1} (vocab_size in its config.json); use the tokenizer of the model, or "
            f"save the model after resize_token_embeddings({largest + 1})",
            path=str(folder),
        )


def check_stop_tokens(
    key: str, stop_token_ids: Sequence[int], path: str | Path, *, trust_remote_code: bool = False
) -> None:
    """Check that a model can sample the tokens that end a response.

    Args:
        key: the setting that names the tokens.
        path: the folder of the model.

    Raises:
        ConfigError: a token is outside the vocabulary, or stands for images, which are never
            sampled.
        ModelError: the folder is not a model folder.
    """
    if not stop_token_ids:
        return
    from quadriga.models.images import image_tokens

    folder = local_folder(path)
    rows = _rows(folder, trust_remote_code=trust_remote_code)
    images = image_tokens(folder, trust_remote_code=trust_remote_code)
    never = () if images is None else images.never_sampled
    for why, wrong in (
        (
            f"outside the vocabulary of the model in {folder}, {rows} tokens with the ids 0 to "
            f"{rows - 1}",
            [token for token in stop_token_ids if token >= rows],
        ),
        (
            f"for images in the model in {folder}, and a response never contains one",
            [token for token in stop_token_ids if token in never],
        ),
    ):
        if wrong:
            raise ConfigError(
                f"{key} names {wrong}, which {'are' if len(wrong) > 1 else 'is'} {why}, so no "
                "response could end there; remove them, or set the ids of the model's tokenizer",
                key=key,
            )


def _rows(folder: Path, *, trust_remote_code: bool) -> int:
    """Return the rows of the embedding of a model.

    Raises:
        ModelError: the folder is not a model folder.
    """
    from quadriga.models.loading import read_config

    check_model_folder(folder, weights=False, tokenizer=False, trust_remote_code=trust_remote_code)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    rows: int = config.get_text_config().vocab_size
    return rows


def _ids_that_occur(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield the ids of all tokens that text or the tokenizer itself can bring into a sequence.

    Some models list special tokens beyond their embedding that are never used, for example for
    images in a model of text. Such a token counts only if it has one of the roles below, or if the
    data contains it.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    yield from (i for i in tokenizer.get_vocab().values() if i not in special)
    roles = (
        tokenizer.pad_token_id, tokenizer.eos_token_id,
        tokenizer.bos_token_id, tokenizer.unk_token_id,
    )  # fmt: skip
    yield from (role for role in roles if isinstance(role, int))
