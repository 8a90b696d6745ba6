"""Whether a rollout engine holds what the training engine has: digests, and for some scores.

`rollout.base.tensor_digest` is a sum over elements, so the digests of boxes that together are a
weight add up to the digest of the weight, whichever ranks hold them. The sender's digest is
computed from its own shards and not from what was sent, so a box that was lost, doubled or put into
another place changes the result.

An engine whose weights cannot be read back (`abilities.exposes_weights` is False) has the digests
of what its processes were sent. Two comparisons show what these do not:

    effects    in the first sync each weight is sent twice, changed and then right, and both must
               change the engine's log-probabilities: a weight that the engine does not take over.
               A tied name, which an engine may ignore, is sent once
    scores     after each sync, trainer and engine compute the log-probabilities of the same random
               tokens: a weight in a wrong place or with wrong values

Engines with the same weights agree up to rounding. In float32 no score may differ by more than
`EXACT_BOUND`. With fewer bits the bound of the mean is `NOISE_FACTOR` times the mean before the
first sync, when both usually hold the weights of the model folder, and later that of the first
sync; it is at most `ROUNDED_BOUND`. A change of a weight that is smaller than the rounding of the
engine's scores is not found by its scores alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from quadriga.engines.base import LOG_PROBS, TrainEngine
from quadriga.errors import WorkerError
from quadriga.models.adapters import is_stored_part
from quadriga.parallel.layouts import Box, count, slices, split
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.plan import NAMED_TENSORS

PROBE_ROWS, PROBE_TOKENS = 8, 32
EXACT_BOUND = 1e-3
"""Nats that no log-probability may differ by if the rollout engine computes in float32."""
ROUNDED_BOUND = 0.1
"""Nats that log-probabilities may differ by on average if it computes with fewer bits."""
NOISE_FACTOR = 2.0
"""How much more log-probabilities may differ on average than after the first sync."""
LEAST_NOISE = 1e-3
"""Nats: a mean difference in the first sync below this one counts as this one."""
_JITTER_FACTOR = 4.0
_LEAST_CHANGE = 2.0**-4
"""Of the largest number of a weight: what a change is at least, above the rounding of 8 bits."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements whose digest is computed at once: 8 bytes each for bits and index, on the device."""
_STOPS = "The run stops, because its samples would come from other weights than the trained ones"

# Digests


def box_digest(values: Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the share of a box in the digest of its weight, modulo 2^64.

    Args:
        values: the elements of the box.
        box: where they are in the weight.
        shape: of the weight.
        dtype: the values are rounded to it first, as the rollout engine holds them.
    """
    # Row 1, columns 1 and 2 of a 2 × 3 weight have the flat indices 4 and 5, so their share is
    # bits[4] · 9 + bits[5] · 11.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    inner = tuple((0, stop - start) for start, stop in box)
    for part in split(inner, _CHUNK) if count(box) else ():
        # `reshape` copies what is not contiguous; one chunk at a time.
        flat = values[slices(part)].detach().to(dtype).reshape(-1)
        bits = flat.view(_BITS[dtype.itemsize]).to(torch.int64)
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), (base, _), size in zip(part, box, shape, strict=True):
            own = torch.arange(base + start, base + stop, device=values.device)
            index = (index[..., None] * size) + own
        total += (bits * (2 * index.reshape(-1) + 1)).sum()
    return int(total) % 2**64


def signed(value: int) -> int:
    """Return the 64-bit integer with these bits: from -2^63. Sums of them wrap around."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Check that the rollout engine holds what the training engine has.

    Raises:
        WorkerError: a weight was not sent, is not held, or differs. Names all such weights, at most
            `NAMED_TENSORS` of them. Attributes: `tensor` (the first one), `tensors`, `version`.
    """
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held
    problems = dict(_problems(sent, held))
    if not problems:
        return
    listed = [f"{name!r} {problem}" for name, problem in problems.items()]
    more = len(listed) - NAMED_TENSORS
    text = "; ".join(listed[:NAMED_TENSORS]) + (f"; and {more} more" if more > 0 else "")
    names = tuple(problems)
    raise WorkerError(
        f"weight sync to version {version}: {len(names)} of {len(set(sent) | set(held))} weights "
        f"are wrong: {text}. {_STOPS}",
        tensor=names[0],
        tensors=names,
        version=version,
    )


def _problems(sent: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            yield name, "was never sent, so the rollout still holds an old value"
        elif name not in held:
            yield name, "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            yield name, "differs between trainer and rollout"


def _held_of_part(sent: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """Return the digests of a rollout engine that a sync must compare with those it has sent.

    An engine holds zeros for layers without an adapter, which are not sent. Of a sync of adapters
    alone the base model is not compared, because nothing has been written to it.
    """
    adapters_only = all(map(is_stored_part, sent))
    return {
        name: digest
        for name, digest in held.items()
        if name in sent or not (adapters_only or is_stored_part(name))
    }


class VerifiedTarget:
    """Updates a rollout engine, and compares it with the training engine after each sync.

    From `begin` to the end of `compare` the engine generates nothing, so one with the weights of a
    sync that broke off, or that was refused, is not used.
    """

    def __init__(self, engine: RolloutEngine | GuardedRollout) -> None:
        self.engine = engine if isinstance(engine, GuardedRollout) else GuardedRollout(engine)
        self._probe = None if engine.abilities.exposes_weights else ScoreProbe(self.engine)

    def begin(self, version: int) -> None:
        """Start a sync."""
        self.engine.begin_sync(version)

    def update(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights. See `ScoreProbe.update_weights` for what it raises."""
        (self._probe or self.engine).update_weights(stream, version)

    def compare(self, sent: Mapping[str, int], scores: Tensor | None, version: int) -> None:
        """Compare what the engine holds with what the training engine has, and end the sync.

        Args:
            sent: the digest of each weight of the training engine.
            scores: of the training engine for the probe tokens; None if the rollout engine exposes
                its weights.

        Raises:
            WorkerError: weights differ. Attributes: `tensor` and `tensors` where they are known,
                `version`.
        """
        if self._probe is None:
            held = _held_of_part(sent, self.engine.weights_digest())
            compare_digests(sent, held, version)
        else:
            compare_digests(sent, self.engine.received_digests(), version)
            assert scores is not None, "the needs of the engine ask for scores"
            self._probe.compare(scores, version)
        self.engine.end_sync()


# Scores


def probe_ids(abilities: RolloutAbilities, version: int) -> Tensor:
    """Return [`PROBE_ROWS`, T] int64: random tokens, others for each version, T ≤ the window."""
    columns = min(PROBE_TOKENS, abilities.window or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(version)
    shape = (PROBE_ROWS, max(columns, 2))
    return torch.randint(abilities.vocabulary, shape, generator=generator)


def trained_scores(
    engine: TrainEngine, probe: RolloutAbilities | None, version: int
) -> Tensor | None:
    """Return the training engine's log-probability of each probe token but the first, [B, T - 1].

    None if the rollout engine needs no probe. Waits for: the other ranks of the engine.
    """
    if probe is None:
        return None
    ids = probe_ids(probe, version)
    ones = torch.ones_like(ids)
    batch = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: ones,
        fields.RESPONSE_MASK: ones[:, 1:],
    }
    return engine.forward(batch, temperature=1.0)[LOG_PROBS]


class ScoreProbe:
    """The comparisons by log-probabilities of one rollout engine over all syncs of a run."""

    def __init__(self, engine: GuardedRollout) -> None:
        self._engine = engine
        self._proven = False  # a sync has proven effects, and has ended with equal scores
        self._version: int | None = None  # of the sync that proves effects
        self._noise: float | None = None
        # Of the ids of the first sync: with the weights before it, and with those sent so far.
        self._before: Tensor | None = None
        self._scores: Tensor | None = None

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Update the engine. In the first sync, prove that each weight has an effect.

        A name that is tied to the one before it, with the same tensor, is not proven again.

        Raises:
            WorkerError: an update of a weight changes no score. Attributes: `tensor`, `version`.
        """
        if self._proven:
            self._engine.update_weights(stream, version)
            return
        if version != self._version:  # the first sync, or the one before has failed
            self._version = version
            self._before = self._scores = self._noise = None
        previous: Tensor | None = None
        try:
            for name, tensor in stream:
                if tensor is previous or not tensor.numel():
                    self._engine.update_weights([(name, tensor)], version)
                    self._scores = self._score(version)
                else:
                    self._prove(name, tensor, version)
                previous = tensor
        except BaseException:
            self._version = None
            raise

    def _prove(self, name: str, tensor: Tensor, version: int) -> None:
        if self._before is None or self._scores is None:
            self._before = self._scores = self._score(version)
        before = self._scores
        jitter = float((self._score(version) - before).abs().max())
        # Not a multiple of the weight: a norm behind it would hide the factor.
        values = tensor.float()
        spread = values.std(correction=0).clamp(min=0.1)
        spread = torch.maximum(spread, values.abs().max() * _LEAST_CHANGE)
        changed = (values + spread * _pattern(values)).to(tensor.dtype)
        self._engine.update_weights([(name, changed)], version)
        between = self._score(version)
        self._engine.update_weights([(name, tensor)], version)
        self._scores = self._score(version)
        least = min(
            float((between - before).abs().max()), float((self._scores - between).abs().max())
        )
        if not least > _JITTER_FACTOR * jitter:
            raise WorkerError(
                f"weight sync to version {version}: an update of weight {name!r} changes no "
                f"log-probability of {between.numel()} probe tokens, so the rollout engine does "
                f"not take it over, or computes without it. {_STOPS}; use another engine "
                "(rollout.name)",
                tensor=name,
                tensors=(name,),
                version=version,
            )

    def _score(self, version: int) -> Tensor:
        ids = probe_ids(self._engine.abilities, version)
        return self._engine.score(ids, torch.ones_like(ids))[:, 1:]

    def compare(self, trained: Tensor, version: int) -> None:
        """Compare the scores of the rollout engine with `trained_scores` of the version.

        Raises:
            WorkerError: they differ by more than rounding. Attributes: `version`, `difference`.
        """
        difference = (self._score(version) - trained).abs()
        exact = all(dtype.itemsize >= 4 for dtype in self._engine.weight_dtypes().values())
        found = float(difference.max() if exact else difference.mean())
        if self._noise is None and self._before is not None:
            self._noise = max(float((self._before - trained).abs().mean()), LEAST_NOISE)
        bound = EXACT_BOUND
        if not exact:
            noise = ROUNDED_BOUND if self._noise is None else NOISE_FACTOR * self._noise
            bound = min(ROUNDED_BOUND, noise)
        if not found <= bound:  # NaN is no agreement
            kind = "at most" if exact else "on average"
            raise WorkerError(
                f"weight sync to version {version}: the log-probabilities of "
                f"{difference.numel()} probe tokens differ by {found:.3g} nats between trainer and "
                f"rollout, expected {kind} {bound:.3g}. {_STOPS}",
                version=version,
                difference=found,
            )
        if not self._proven:
            self._noise = max(found, LEAST_NOISE)
            self._proven = True


def _pattern(tensor: Tensor) -> Tensor:
    """Return ones and minus ones in the shape of a tensor, in an order that repeats nowhere."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
    return signs.to(tensor.device, tensor.dtype)
