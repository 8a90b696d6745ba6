"""Laws of how tokens are drawn and of texts that end a response, beside those of the kit."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quadriga.errors import RolloutAbilityError
from quadriga.models.loading import load_tokenizer
from quadriga.rollout.base import SamplingParams, tensor_digest
from quadriga.testing import LawBroken, expect, expect_raises, rollouts
from quadriga.testing.rollouts import GREEDY, PROMPTS, SAMPLING, SQUARE_WEIGHT
from rollout_slices import in_slices

DRAWS, LEAST_P_VALUE = 1500, 1e-5
"""Tokens of a chi-square test. A correct engine without seeds fails one in so many tests."""


# In an order, each filter renormalises what the filters before it kept: with the probabilities
# .4 .3 .2 .1, top_k 2 keeps .57 .43, of which top_p 0.5 keeps the first. With "joint", each filter
# reads the probabilities before all filters: top_p 0.5 keeps .4 .3, and top_k 2 keeps the same two.
FILTER_ORDERS = {"vllm": "min_p, top_k, top_p", "sglang": "joint"}

LEAST_CHANGE = 0.01
"""Nats by which a wrong weight must change a score, so that a comparison of scores finds it."""


class RolloutUnderTest(rollouts.RolloutUnderTest):
    """The reference also filters tokens and knows stop strings: loops over Python numbers."""

    variants = (
        *rollouts.RolloutUnderTest.variants,
        replace(SAMPLING, top_k=7),
        replace(SAMPLING, temperature=1.7, top_p=0.8),
    )

    def __init__(self, build, folder: str, *, tolerance: float = 1e-4) -> None:
        super().__init__(build, folder, tolerance=tolerance)
        self.tokenizer = load_tokenizer(folder)

    def probs(
        self, sampling: SamplingParams, prompt: Sequence[int], response: Sequence[int]
    ) -> list[float]:
        probs = super().probs(sampling, prompt, response)
        if sampling.greedy:
            return probs
        order = FILTER_ORDERS.get(self.engine.name, "top_k, top_p, min_p")
        if order == "joint":
            kept = [_kept(name, probs, sampling) for name in ("top_k", "top_p", "min_p")]
            return _renormalised(probs, set.intersection(*kept))
        for name in order.split(", "):
            probs = _renormalised(probs, _kept(name, probs, sampling))
        return probs

    def end_of(self, sampling: SamplingParams, response: Sequence[int]) -> int | None:
        for count in range(1, len(response) + 1):
            now, known = self.text(response[:count]), self.text(response[: count - 1])
            ends = [
                at + len(string)
                for string in sampling.stop_strings
                for at in range(len(now))
                if now.startswith(string, at)
            ]
            # A character of which only some bytes were there (U+FFFD) counts as more.
            completed = any(end > len(known.rstrip("\ufffd")) for end in ends)
            if response[count - 1] in sampling.end_token_ids:
                return count
            if completed and count >= sampling.min_new_tokens:
                return count
        return None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def drawn(self, sampling: SamplingParams) -> None:
        """Compare the first tokens of many rows with the distribution, or expect a refusal."""
        if not self.applied(sampling):
            return
        sampling, prompt = replace(sampling, max_new_tokens=1), PROMPTS[0]
        out = self.generate(sampling, [prompt] * DRAWS, range(DRAWS))
        counts = torch.bincount(out.response_ids[:, 0], minlength=self.vocabulary)
        p_value = chi_square_p_value(counts.tolist(), self.probs(sampling, prompt, ()))
        if p_value < LEAST_P_VALUE:
            raise LawBroken(f"{sampling}: the chi-square test of {DRAWS} draws gives {p_value:.2g}")


def _kept(name: str, probs: Sequence[float], sampling: SamplingParams) -> set[int]:
    """Return the tokens that one filter keeps."""
    ordered = sorted(range(len(probs)), key=lambda token: -probs[token])
    if name == "top_k":
        return set(ordered if sampling.top_k == -1 else ordered[: sampling.top_k])
    if name == "min_p":
        return {token for token in ordered if probs[token] >= sampling.min_p * probs[ordered[0]]}
    kept, before = set(), 0.0
    for token in ordered:
        if sampling.top_p < 1.0 and before >= sampling.top_p:
            break
        kept.add(token)
        before += probs[token]
    return kept


def _renormalised(probs: Sequence[float], kept: set[int]) -> list[float]:
    total = sum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


def chi_square_p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return how likely counts at least this far from `probs` are (Pearson's chi-square test).

    Tokens with fewer than five expected draws are one category. A token that was drawn although it
    has probability 0 gives 0.
    """
    total = sum(counts)
    if any(count and not p for count, p in zip(counts, probs, strict=True)):
        return 0.0
    rare = [i for i, p in enumerate(probs) if p * total < 5]
    cells = [(counts[i], p * total) for i, p in enumerate(probs) if p * total >= 5]
    rest = sum(probs[i] for i in rare) * total
    if rest >= 5:
        cells.append((sum(counts[i] for i in rare), rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    if len(cells) < 2:
        return 1.0
    # The survival function of chi-square with k degrees of freedom is Q(k/2, x/2).
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def temperature(subject: RolloutUnderTest) -> None:
    """Tokens are drawn from the distribution at the temperature, or it is refused."""
    for value in (0.5, 1.0, 1.6):
        subject.drawn(replace(SAMPLING, temperature=value))


def filters(subject: RolloutUnderTest) -> None:
    """Top-k, top-p and min-p exclude tokens, together in the declared order, or are refused."""
    for top_k, top_p, min_p in (
        (1, 1.0, 0.0),
        (4, 1.0, 0.0),
        (subject.vocabulary + 1, 1.0, 0.0),
        (-1, 1e-6, 0.0),
        (-1, 0.35, 0.0),
        (-1, 1.0, 0.03),
        (-1, 1.0, 0.4),
        (5, 0.6, 0.0),
        (-1, 0.8, 0.3),
        (20, 0.7, 0.1),
    ):
        subject.drawn(replace(SAMPLING, top_k=top_k, top_p=top_p, min_p=min_p))


def end_of_the_model(subject: RolloutUnderTest) -> None:
    """An end token of the model's files ends a response only if it is given."""
    end = int(subject.tokenizer.eos_token_id)
    head = subject.original["lm_head.weight"].clone()
    # The end token gets the row of the token that is most likely behind the first prompt.
    head[end] = 1.5 * head[int(subject.logits(PROMPTS[0])[-1].argmax())]
    try:
        subject.load({"lm_head.weight": head})
        subject.engine.update_weights([("lm_head.weight", head)], 1)
        endless = replace(SAMPLING, eos_token_ids=(), max_new_tokens=8)
        found = subject.applied(endless, PROMPTS[:1] * 20)
        expect(any(end in response[:-1] for response in found), True, "the token was drawn")
    finally:
        subject.restore()


def stop_strings(subject: RolloutUnderTest) -> None:
    """The token that completes a stop string ends the response, or it is refused."""
    endless = replace(GREEDY, eos_token_ids=(), max_new_tokens=24)
    subject.applied(replace(SAMPLING, stop_strings=("a", "e", " ", "t")), PROMPTS * 2)
    for first in range(70, 290):  # find a response with a string that two tokens make up
        (response,) = subject.applied(endless, [(first, 83)]) or [[]]
        for count in range(3, len(response)):
            string = subject.text(response[count - 2 : count])
            stops = replace(endless, stop_strings=("\ue000 never", string))
            readable = string.isascii() and string.isprintable()
            if readable and subject.end_of(stops, response) == count:
                for least in (0, count, count + 1):
                    wanted, prompts = replace(stops, min_new_tokens=least), [(first, 83), (200,)]
                    whole = subject.applied(wanted, prompts)
                    # Borders of slices: within the string, at its end, and behind it.
                    for at_most in (count - 1, count, count + 1):
                        if whole and subject.engine.abilities.continues:
                            found = subject.in_slices(wanted, at_most, prompts)
                            expect(found, whole, f"{wanted} in slices of {at_most}")
                return


def verification(subject: RolloutUnderTest) -> None:
    """Digests and scores show a weight that is transposed or was left out."""
    engine, right = subject.engine, subject.noise(3)
    dtypes, exposes = engine.weight_dtypes(), engine.abilities.exposes_weights
    expect(set(dtypes) - set(right), set(), "names of dtypes that the model does not have")
    expected = {n: tensor_digest(t.to(dtypes.get(n, t.dtype))) for n, t in right.items()}
    if not exposes:
        error = expect_raises(engine.weights_digest, RolloutAbilityError, "weights_digest")
        expect(vars(error).get("engine"), engine.name, "attribute engine")
    square = right[SQUARE_WEIGHT]
    try:
        subject.load(right)
        for weight in (square.t().contiguous(), subject.original[SQUARE_WEIGHT], square):
            engine.update_weights({**right, SQUARE_WEIGHT: weight}.items(), 9)
            same = weight is square
            if exposes:
                expect(engine.weights_digest() == expected, same, "equal digests")
            expect(subject.score_change() < LEAST_CHANGE, same, "equal scores")
    finally:
        subject.restore()


def slices(subject: RolloutUnderTest) -> None:
    """Each token of a response in slices is of the weights of its call, also with updates between;
    without these, where numbers belong to positions, the tokens are those of the uncut response."""
    engine, abilities = subject.engine, subject.engine.abilities
    least = int("min_new_tokens" in abilities.settings) * 7
    for sampling in (SAMPLING, replace(SAMPLING, temperature=1.6, top_p=0.7, min_new_tokens=least)):
        whole = subject.applied(sampling)
        for at_most in (1, 3, 5) if whole and abilities.continues else ():
            if abilities.seeded and engine.name in ("hf", "sglang"):
                expect(subject.in_slices(sampling, at_most), whole, f"slices of {at_most}")
            for updates in (0, 2):
                with_updates(subject, sampling, at_most, updates)


def with_updates(
    subject: RolloutUnderTest, sampling: SamplingParams, at_most: int, updates: int
) -> None:
    """Generate in slices, update the weights after each of the first calls, and compare each
    log-probability with the weights that its token had."""
    engine, weights = subject.engine, [subject.original]

    def update(call: int) -> None:
        if call < updates:
            weights.append(subject.noise(call))
            engine.update_weights(weights[-1].items(), engine.version + 1)

    try:
        found = in_slices(engine, PROMPTS, sampling, at_most, len(PROMPTS), update)
        for number, own in enumerate(weights):
            subject.load(own)
            for row, (tokens, log_probs) in enumerate(found):
                first = int(row >= len(PROMPTS) / 2)  # the call in which the row begins
                at = [t for t in range(len(tokens)) if min(first + t // at_most, updates) == number]
                scaled = subject.logits((*PROMPTS[row], *tokens)) / sampling.temperature
                log_p = scaled[len(PROMPTS[row]) - 1 :].log_softmax(-1)
                expected = [float(log_p[t, tokens[t]]) for t in at]
                what = f"row {row} in slices of {at_most}, weights {number}"
                subject.close_to([log_probs[t] for t in at], expected, what)
    finally:
        subject.restore()


ROLLOUT_LAWS = (
    *rollouts.ROLLOUT_LAWS[:-1],
    *(temperature, filters, end_of_the_model, stop_strings, slices, verification),
    rollouts.ROLLOUT_LAWS[-1],
)
"""All laws. The last one closes the engine."""
