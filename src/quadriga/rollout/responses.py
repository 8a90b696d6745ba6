"""Responses of rows of different length as one `RolloutOutput`, and what completes a stop string.

For engines that take and return lists of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quadriga.config.schema import ModelConfig
from quadriga.models.loading import tokenizer_of
from quadriga.models.routes import UNKNOWN
from quadriga.rollout.base import Continued, FinishReason, RolloutOutput, SamplingParams


@dataclass(frozen=True)
class Response:
    """One response: its tokens, their log-probabilities in nats, and why it ended.

    Attributes:
        routes: [tokens of prompt and response − 1 or more, layers, K], the experts of each token;
            None: they are not recorded.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason
    routes: Tensor | None = None


def padded_output(
    responses: Sequence[Response],
    sampling: SamplingParams,
    version: int,
    begun: Continued,
    prompt_mask: Tensor,
) -> RolloutOutput:
    """Return the responses, padded to the most new tokens, as sampled by weights of one version.

    The log-probabilities are those of the responses, but 0 for "sampled" ones of greedy responses:
    the most likely token is drawn with probability 1.

    Args:
        prompt_mask: [B, P], where the prompts have a token.
    """
    count, width = len(responses), begun.at_most
    ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(count, width, dtype=torch.int64)
    log_probs = torch.zeros(count, width)
    certain = sampling.greedy and sampling.log_probs == "sampled"
    for row, response in enumerate(responses):
        length = len(response.tokens)
        ids[row, :length] = torch.tensor(response.tokens, dtype=torch.int64)
        mask[row, :length] = 1
        if not certain:
            log_probs[row, :length] = torch.tensor(response.log_probs)
    reasons = with_pauses([each.reason for each in responses], mask, sampling, begun)
    versions = torch.full((count,), version, dtype=torch.int64)
    known = torch.cat([prompt_mask.cpu(), mask], 1)
    routed = _placed([each.routes for each in responses], known)
    return RolloutOutput(ids, mask, log_probs, reasons, versions, routed)


def _placed(routes: Sequence[Tensor | None], known: Tensor) -> Tensor | None:
    """Return the experts of the tokens at their columns of `known` [B, P + R], but for the last
    token of each row, which was not computed."""
    placed: Tensor | None = None
    for row, found in enumerate(routes):
        if found is not None:
            if placed is None:
                placed = found.new_full((*known.shape, *found.shape[1:]), UNKNOWN)
            columns = known[row].nonzero()[:-1, 0]
            placed[row, columns] = found[: len(columns)]
    return placed


def with_pauses(
    reasons: Sequence[FinishReason], mask: Tensor, sampling: SamplingParams, begun: Continued
) -> tuple[FinishReason, ...]:
    """Return "paused" in place of "length" for each response that may still get tokens."""
    more = begun.sampled + mask.sum(1) < sampling.max_new_tokens
    each = zip(reasons, more.tolist(), strict=True)
    return tuple("paused" if cut and reason == "length" else reason for reason, cut in each)


def token_rows(ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the token ids of each row without padding."""
    return [row[valid].tolist() for row, valid in zip(ids, attention_mask.bool(), strict=True)]


def begun_responses(prompt_ids: Tensor, sampled: Tensor) -> list[list[int]]:
    """Return the last tokens of each prompt that were sampled before, `sampled` [B] of them.

    The prompts are padded on the left.
    """
    width = prompt_ids.shape[1]
    rows = zip(prompt_ids.tolist(), sampled.tolist(), strict=True)
    return [ids[width - count :] for ids, count in rows]


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

    def completed_at(self, ids: Sequence[int], first: int) -> int | None:
        """Return after how many of `ids`, at least `first`, a stop string is complete."""
        counts = range(max(first, 1), len(ids) + 1)
        return next((count for count in counts if self.completed_by_last(ids[:count])), None)

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


def stop_strings_of(model: ModelConfig, strings: Sequence[str]) -> StopStrings | None:
    """Return the check of stop strings by the tokenizer of a model; None if there are none."""
    if not strings:
        return None
    return StopStrings(_tokenizer(model), strings)


_tokenizer = lru_cache(maxsize=2)(tokenizer_of)
