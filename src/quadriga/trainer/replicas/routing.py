"""Prefix affinity: which replica has computed the beginning of a prompt before.

An engine with a prefix cache computes the tokens of a prompt once, and continues from them. The
next turn of a conversation begins with the turn before it, so it is asked of the same replica. The
idea of comparing the matched share with a bound is that of SGLang's cache-aware router.

The router keeps hashes and no tokens. A prefix of k tokens t has the hash

    H(k) = Σ (t[i] + 1) · B^i modulo 2^64,   i = 0 … k − 1

so that the hashes of all prefixes of a prompt are one cumulative sum. Each prompt is noted at
multiples of `BLOCK` tokens and at its end:

    first turn    20 tokens                      noted: H(16) H(20)
    second turn   those 20, then 15 more (35)    found: H(20), a share of 20 / 35 = 0.57
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BLOCK = 16
"""Tokens between two prefixes that are noted of one prompt."""
LIMIT = 1 << 18
"""How many prefixes are kept. Those that were noted first are dropped first."""
_BASE = 6364136223846793005  # odd, so that no power of it is 0 modulo 2^64


class PrefixHashes:
    """The hashes of all prefixes of one prompt."""

    def __init__(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        values = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
        powers = np.full(len(values), _BASE, dtype=np.uint64)
        powers[:1] = 1
        # uint64 arithmetic of arrays wraps around, which is the arithmetic modulo 2^64.
        self._sums = np.cumsum(values * np.cumprod(powers, dtype=np.uint64), dtype=np.uint64)
        self.length = len(values)

    def of(self, length: int) -> tuple[int, int]:
        """Return the key of the prefix of `length` tokens."""
        return length, int(self._sums[length - 1])


class PrefixRouter:
    """Knows which replica was asked last for a prefix.

    Args:
        share: of the tokens of a prompt that a replica must have computed before to be preferred.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last: OrderedDict[tuple[int, int], int] = OrderedDict()

    def preferred(self, prompt: PrefixHashes) -> int | None:
        """Return the number of the replica with the longest prefix of a prompt, if it is long
        enough."""
        # Of a noted prompt all multiples of BLOCK are noted, so the longest one is found by halving
        # the range. Its end is less than a block behind: 20 tokens are noted at 16 and 20.
        low, high = 0, prompt.length // BLOCK
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.of(middle * BLOCK) in self._last:
                low = middle
            else:
                high = middle - 1
        longest = min(prompt.length, low * BLOCK + BLOCK - 1)
        least = max(1, math.ceil(self._share * prompt.length), low * BLOCK)
        for length in range(longest, least - 1, -1):
            replica = self._last.get(prompt.of(length))
            if replica is not None:
                return replica
        return None

    def note(self, prompt: PrefixHashes, replica: int) -> None:
        """Note that a replica computes a prompt."""
        # From the longest on, so that the shortest prefixes are dropped last.
        for length in sorted({*range(BLOCK, prompt.length, BLOCK), prompt.length}, reverse=True):
            key = prompt.of(length)
            self._last[key] = replica
            self._last.move_to_end(key)
        while len(self._last) > LIMIT:
            self._last.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forget what a replica has computed; None: what all have, as after new weights."""
        for key in [k for k, r in self._last.items() if replica is None or r == replica]:
            del self._last[key]
