"""Whether the last token of a response completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from quadriga.config.schema import ModelConfig
from quadriga.models.loading import load_tokenizer

_UNFINISHED = "\ufffd"
"""What a tokenizer writes for the first bytes of a character whose other bytes are missing."""

# Stop string "ab c", whose text comes from the tokens "xa" "b" " c" "d":
#
#   tokens       text before   text now    ends after the text before
#   xa           -             xa          -
#   xa b         xa            xab         -
#   xa b _c      xab           xab c       "ab c" ends at 5 > 3: completed by the third token
#
# The text is that of the last tokens only, as many as the longest stop string can span and a few
# more, so that a long response costs no more for each token than a short one.


class StopStrings:
    """Finds the token that completes one of `strings`.

    The text of a response is the text of its tokens together, special tokens included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._longest = max(len(s) for s in strings)

    def completed_by_last(self, ids: Sequence[int]) -> bool:
        """Return whether a stop string ends within the text that the last of `ids` adds."""
        before, now = self._texts(ids)
        return any(now.find(s, max(0, len(before) - len(s) + 1)) >= 0 for s in self._strings)

    def _texts(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return the end of the text without and with the last token, from the same token on."""
        count = 2 * self._longest + 8
        while True:
            tail = ids[-count:]
            before = self._text(tail[:-1])
            if len(before) >= self._longest + 8 or count >= len(ids):
                return before.rstrip(_UNFINISHED), self._text(tail)
            count *= 2

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


class StopStringsOfModel:
    """Makes `StopStrings` with the tokenizer of a model, which is loaded when it is needed."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def check(self, strings: Sequence[str]) -> StopStrings | None:
        """Return the check of the stop strings, or None if there are none."""
        if not strings:
            return None
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                self._model.tokenizer_path or self._model.path,
                trust_remote_code=self._model.trust_remote_code,
            )
        return StopStrings(self._tokenizer, strings)
