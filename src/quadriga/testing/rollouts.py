"""Laws of rollout engines, against a model that transformers alone computes.

Nothing of the reference is shared with a rollout engine. The model computes one sequence at a time,
without a cache and without padding.

Shapes: B rows, P prompt columns, R response columns, n tokens, V vocabulary entries.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quadriga.errors import (
    ModelError,
    RolloutAbilityError,
    RolloutError,
    RolloutInputError,
    ShapeError,
)
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.observability.quiet import quiet_libraries
from quadriga.rollout.abilities import ALL_SETTINGS
from quadriga.rollout.base import (
    Continued,
    LogProbKind,
    RolloutEngine,
    RolloutOutput,
    SamplingParams,
)
from quadriga.testing import LawBroken, check_all, expect, expect_raises

BuildRollout = Callable[[str], RolloutEngine]
"""Builds an engine in float32 on the model of a folder."""
Prompts = Sequence[tuple[int, ...]]

# Different lengths; rows 0, 2 and 5 have the same prompt. Some neighbours would be one token if
# their text were tokenized again, so an engine that does so is found.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (84, 83, 74), (200,), (84, 83, 74), (70, 71, 72, 73, 210, 150, 33), (90, 91, 92), (84, 83, 74),
)  # fmt: skip
SAMPLING = SamplingParams(max_new_tokens=12, eos_token_ids=tuple(range(20, 60)), pad_token_id=0)
GREEDY = replace(SAMPLING, temperature=0.0)
SQUARE_WEIGHT = "model.layers.1.self_attn.q_proj.weight"
"""A weight of the reference model with as many rows as columns: one can transpose it."""


def write_reference_model(folder: str | Path) -> None:
    """Write the model of the rollout laws: a Llama with a window of 128 tokens.

    Its distributions are neither flat nor certain, so that each filter excludes something and equal
    best tokens do not occur. Every engine has kernels for its sizes.
    """
    shape = TinyModel(
        hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=96,
        max_position_embeddings=128,
    )  # fmt: skip
    write_tiny_model(folder, ["one two three four five six seven eight nine ten"], shape)
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 6.0
    save_file(weights, file, metadata={"format": "pt"})


class RolloutUnderTest(ExitStack):
    """An engine on the model of a folder, and the reference for that model.

    Args:
        build: builds the engine.
        folder: a model of `write_reference_model`.
        tolerance: the largest difference of a log-probability, nats.
    """

    def __init__(self, build: BuildRollout, folder: str, *, tolerance: float = 1e-4) -> None:
        super().__init__()
        with quiet_libraries():
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            )
            self._model.train(False)
        self.original = {name: t.clone() for name, t in self._model.state_dict().items()}
        self.vocabulary: int = self._model.config.get_text_config().vocab_size
        self.tolerance = tolerance
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self.engine = build(folder)
        self.callback(self.engine.close)

    variants = (SAMPLING, GREEDY, replace(SAMPLING, temperature=0.6))
    """Requests whose log-probabilities are compared."""

    # The reference

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some of the weights into the reference."""
        self._model.load_state_dict(dict(weights), strict=False)
        self._logits.clear()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [n, V] behind each of the n tokens, float64."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.no_grad():
                out = self._model(input_ids=torch.tensor([key]), use_cache=False)
            self._logits[key] = out.logits[0].double()
        return self._logits[key]

    def scores(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token at temperature 1; 0 for the first."""
        log_p = self.logits(tokens).log_softmax(-1)
        return [0.0, *(float(log_p[i, token]) for i, token in enumerate(tokens[1:]))]

    def probs(
        self, sampling: SamplingParams, prompt: Sequence[int], response: Sequence[int]
    ) -> list[float]:
        """Return the probabilities [V] from which the token behind `response` is drawn."""
        logits = self.logits((*prompt, *response))[-1]
        never = [*sampling.excluded_token_ids]
        if len(response) < sampling.min_new_tokens:
            never += [token for token in sampling.end_token_ids if token < len(logits)]
        logits = logits.index_fill(0, torch.tensor(never, dtype=torch.int64), -math.inf)
        if sampling.greedy:
            best = int(logits.argmax())
            return [float(token == best) for token in range(len(logits))]
        return cast(list[float], (logits / sampling.temperature).softmax(0).tolist())

    def end_of(self, sampling: SamplingParams, response: Sequence[int]) -> int | None:
        """Return after how many tokens a response ends with a stop; None if it does not."""
        ends = (n for n, token in enumerate(response, 1) if token in sampling.end_token_ids)
        return next(ends, None)

    # The engine

    def generate(
        self, sampling: SamplingParams, prompts: Prompts = PROMPTS, seeds: Sequence[int] = ()
    ) -> RolloutOutput:
        """Generate a response for each prompt. Without `seeds`: 100, 101 and so on."""
        seeds = seeds or range(100, 100 + len(prompts))
        ids, mask = left_padded(prompts)
        return self.engine.generate(ids, mask, sampling, torch.tensor(list(seeds)).long())

    def in_slices(
        self,
        sampling: SamplingParams,
        at_most: int,
        prompts: Prompts = PROMPTS,
        between: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Generate in calls of `at_most` new tokens, and check each one.

        The first two rows begin in the first call, the next two in the second one, and so on.

        Args:
            between: is called after each call.
        """
        found = [list[int]() for _ in prompts]
        going, call = list(range(len(prompts))), 0
        while going:
            now = [row for row in going if row // 2 <= call]
            given, begun = [prompts[row] for row in now], [found[row] for row in now]
            ids, mask = left_padded([(*p, *b) for p, b in zip(given, begun, strict=True)])
            continued = Continued(torch.tensor([len(b) for b in begun]).long(), at_most)
            numbers = torch.tensor([100 + row for row in now]).long()
            out = self.engine.generate(ids, mask, sampling, numbers, continued=continued)
            responses = self.check(sampling, out, given, begun, at_most)
            for row, response, reason in zip(now, responses, out.finish_reason, strict=True):
                found[row] = response
                if reason != "paused":
                    going.remove(row)
            call += 1
            between()
        return found

    def refuses(self, sampling: SamplingParams) -> bool:
        """Return whether the engine declares that it cannot do this; if so, check its error."""
        abilities = self.engine.abilities
        changed = {n for n in ALL_SETTINGS if getattr(sampling, n) != getattr(SAMPLING, n)}
        if changed <= abilities.settings and sampling.log_probs in abilities.log_probs:
            return False
        what = f"undeclared: {sampling}"
        error = expect_raises(lambda: self.generate(sampling), RolloutAbilityError, what)
        expect(vars(error).get("engine"), self.engine.name, "attribute engine")
        return True

    def applied(self, sampling: SamplingParams, prompts: Prompts = PROMPTS) -> list[list[int]]:
        """Check the responses, or that the engine refuses what it does not declare."""
        if self.refuses(sampling):
            return []
        return self.check(sampling, self.generate(sampling, prompts), prompts)

    def check(
        self,
        sampling: SamplingParams,
        out: RolloutOutput,
        prompts: Prompts = PROMPTS,
        begun: Sequence[list[int]] | None = None,
        at_most: int | None = None,
    ) -> list[list[int]]:
        """Compare every row with the reference and return the responses without padding.

        Args:
            begun: the tokens of earlier calls, with which the responses that are returned begin.
            at_most: new tokens of the call.
        """
        count, width = len(prompts), at_most or sampling.max_new_tokens
        shapes = {tuple(t.shape) for t in (out.response_ids, out.response_mask)}
        expect(shapes | {tuple(out.rollout_log_probs.shape)}, {(count, width)}, "shapes")
        expect(out.weight_versions.tolist(), [self.engine.version] * count, "weight versions")
        found = []
        for row, prompt in enumerate(prompts):
            where = f"row {row} with {sampling}"
            length, ids = int(out.response_mask[row].sum()), out.response_ids[row].tolist()
            before = begun[row] if begun else []
            response: list[int] = [*before, *ids[:length]]
            most = min(len(before) + width, sampling.max_new_tokens)
            padding = width - length
            mask = [1] * length + [0] * padding
            expect(out.response_mask[row].tolist(), mask, f"{where}: response mask")
            expect(ids[length:], [sampling.pad_token_id] * padding, f"{where}: padding")
            end = self.end_of(sampling, response)
            expect(len(response), end or most, f"{where}: tokens up to the end of {response}")
            cut = "length" if most == sampling.max_new_tokens else "paused"
            reason = cut if end is None else "stop"
            expect(out.finish_reason[row], reason, f"{where}: finish reason of {response}")
            log_probs = out.rollout_log_probs[row].tolist()
            unscaled = sampling.greedy or sampling.log_probs == "temperature_1"
            expected = []
            for t, token in list(enumerate(response))[len(before) :]:
                probs = self.probs(sampling, prompt, response[:t])
                if not probs[token]:
                    raise LawBroken(f"{where}: token {t} of {response} is excluded")
                scaled = self.logits((*prompt, *response))[len(prompt) + t - 1]
                scaled = scaled / (1.0 if unscaled else sampling.temperature)
                kept = math.log(probs[token])
                own = float(scaled.log_softmax(0)[token])
                expected.append(kept if sampling.log_probs == "sampled" else own)
            self.close_to(log_probs, [*expected, *[0.0] * padding], f"{where}: log-probs")
            found.append(response)
        return found

    def close_to(self, found: Sequence[float], expected: Sequence[float], what: str) -> None:
        """Raise `LawBroken` unless log-probabilities agree within the tolerance."""
        worst = max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
        if not worst <= self.tolerance:
            raise LawBroken(f"{what} differ by {worst:.3g} nats: {expected} expected, got {found}")

    def score_change(self) -> float:
        """Return the largest difference of a score of the engine from the reference, in nats."""
        ids, mask = left_padded(PROMPTS)
        found = self.engine.score(ids, mask)
        expected = torch.zeros_like(found)
        for row, prompt in enumerate(PROMPTS):
            expected[row, mask[row].bool()] = torch.tensor(self.scores(prompt))
        return float((found - expected).abs().max())

    def check_weights(self) -> None:
        """Compare sampled responses and scores with the reference."""
        self.applied(replace(SAMPLING, max_new_tokens=5))
        expect(self.score_change() <= self.tolerance, True, "scores are those of the reference")

    def noise(self, seed: int) -> dict[str, Tensor]:
        """Return all weights with noise."""
        random = torch.Generator().manual_seed(seed)
        return {
            name: t + 0.3 * (t.std() or 0.3) * torch.randn(t.shape, generator=random)
            for name, t in self.original.items()
        }

    def restore(self) -> None:
        """Give the original weights to the reference and to the engine."""
        self.load(self.original)
        self.engine.update_weights(self.original.items(), self.engine.version + 1)


def left_padded(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, P] int64, with two columns of padding in every row."""
    width = 2 + max((len(prompt) for prompt in prompts), default=0)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


# The laws


def protocol(subject: RolloutUnderTest) -> None:
    """The object is a `RolloutEngine` and declares what it can do."""
    engine = subject.engine
    expect(isinstance(engine, RolloutEngine), True, "isinstance(engine, RolloutEngine)")
    expect(engine.abilities.vocabulary, subject.vocabulary, "abilities.vocabulary")
    expect(engine.version, -1, "version of the folder's weights")


def prompts(subject: RolloutUnderTest) -> None:
    """Prompt ids are used as they are, in the order of the rows; padding changes nothing."""
    responses = subject.applied(GREEDY)
    order = [3, 0, 4, 1]
    other = subject.applied(GREEDY, [PROMPTS[i] for i in order])
    expect(other, [responses[i] for i in order] if responses else [], "rows in another order")
    none = torch.zeros(0, 4, dtype=torch.int64)
    out = subject.engine.generate(none, none, SAMPLING, torch.zeros(0, dtype=torch.int64))
    subject.check(SAMPLING, out, ())
    expect(tuple(subject.engine.score(none, none).shape), (0, 4), "shape of no scores")


def log_probabilities(subject: RolloutUnderTest) -> None:
    """Each kind is of its own distribution, or is refused."""
    for kind in get_args(LogProbKind):
        for variant in subject.variants:
            sampling = replace(variant, log_probs=kind)
            if not subject.refuses(sampling):
                subject.check(sampling, subject.generate(sampling))


def ends(subject: RolloutUnderTest) -> None:
    """A response includes what ends it and nothing behind it, or is max_new_tokens long."""
    stops = tuple(range(100, 140))
    for count in (1, 5, 30):
        subject.applied(replace(SAMPLING, max_new_tokens=count, eos_token_ids=()))
    found = subject.applied(SAMPLING, PROMPTS * 4)
    expect(len({len(response) == 12 for response in found}), 2, "both reasons in 24 rows")
    subject.applied(replace(SAMPLING, eos_token_ids=tuple(range(subject.vocabulary))))
    subject.applied(replace(SAMPLING, stop_token_ids=stops))
    subject.applied(replace(SAMPLING, stop_token_ids=stops, ignore_eos=True))
    if "stop_token_ids" in subject.engine.abilities.settings:
        outside = replace(SAMPLING, stop_token_ids=(subject.vocabulary,))
        expect_raises(lambda: subject.generate(outside), RolloutInputError, "a stop id outside")
    for count in (1, 3, SAMPLING.max_new_tokens):
        subject.applied(replace(SAMPLING, min_new_tokens=count))
        subject.applied(replace(GREEDY, min_new_tokens=count))


def seeds(subject: RolloutUnderTest) -> None:
    """Seeds reproduce responses, and rows do not depend on each other, if this is declared."""
    abilities = subject.engine.abilities
    rows = PROMPTS[:1] * 8
    numbers = [0, 1, 2, -1, 2**62, -(2**63), 2**63 - 1, 2**32]
    endless = replace(SAMPLING, eos_token_ids=(), max_new_tokens=6)
    first = subject.check(endless, subject.generate(endless, rows, numbers), rows)
    expect(len({tuple(response) for response in first}) > 5, True, "8 seeds give over 5 responses")
    other = subject.check(endless, subject.generate(endless, rows, range(50, 58)), rows)
    expect(other != first, True, "other seeds give other responses")
    if not abilities.seeded:
        return
    again = subject.check(endless, subject.generate(endless, rows, numbers), rows)
    expect(again, first, "the same seeds again")
    whole = subject.check(SAMPLING, subject.generate(SAMPLING, PROMPTS * 3), PROMPTS * 3)
    for order in ([5, 0, 16, 3], [9]) if abilities.batch_invariant else ():
        part, numbers = [(PROMPTS * 3)[i] for i in order], [100 + i for i in order]
        found = subject.check(SAMPLING, subject.generate(SAMPLING, part, numbers), part)
        expect(found, [whole[i] for i in order], f"rows {order} by themselves")


def bad_input(subject: RolloutUnderTest) -> None:
    """A prompt that cannot be used is refused by a typed error, and nothing is broken."""
    window = subject.engine.abilities.window
    wrong: list[tuple[int, ...]] = [(), (70, subject.vocabulary), (-1, 70)]
    if window is not None:
        wrong += [(70,) * (window + 1), (70,) * (window - SAMPLING.max_new_tokens + 1)]
    for prompt in wrong:
        run = partial(subject.generate, SAMPLING, [(70,), prompt])
        error = expect_raises(run, RolloutInputError, f"a prompt of {len(prompt)} tokens")
        expect(vars(error).get("row"), 1, "attribute row")
    ids, mask = left_padded(PROMPTS[:2])
    numbers, generate = torch.tensor([1, 2]), subject.engine.generate
    for what, given, kind in (
        ("a mask of another shape", (ids, mask[:, 1:], SAMPLING, numbers), ShapeError),
        ("too few seeds", (ids, mask, SAMPLING, numbers[:1]), ShapeError),
        ("one dimension", (ids[0], mask[0], SAMPLING, numbers), ShapeError),
        ("padding on the right", (ids.flip(1), mask.flip(1), SAMPLING, numbers), RolloutInputError),
    ):
        expect_raises(partial(generate, *given), kind, what)
    outside = torch.tensor([[70, subject.vocabulary]])
    score = partial(subject.engine.score, outside, torch.ones_like(outside))
    expect_raises(score, RolloutInputError, "score of an id outside the vocabulary")
    subject.check_weights()


def update(subject: RolloutUnderTest) -> None:
    """After an update of all or some weights, responses and scores are of the new weights."""
    engine = subject.engine
    subject.check_weights()  # fills the prefix cache, if there is one
    new = subject.noise(5)
    entries = list(new.items())
    try:
        for version, part in enumerate((entries, [(SQUARE_WEIGHT, new[SQUARE_WEIGHT] * 2)])):
            subject.load(dict(part))
            for half in (part[:9], part[9:]):  # one version in two parts, as buckets arrive
                engine.update_weights(iter(half), 5 + version)
            expect(engine.version, 5 + version, "version")
            subject.check_weights()
    finally:
        subject.restore()
    before, up = engine.version, "model.layers.0.mlp.up_proj.weight"
    for name, tensor in (
        ("model.no_such.weight", torch.zeros(3)),
        ("model.norm.weight", torch.zeros(3)),
        (up, subject.original[up].t()),
        (SQUARE_WEIGHT, subject.original[SQUARE_WEIGHT][:32]),
    ):
        wrong = partial(engine.update_weights, [(name, tensor)], before + 1)
        error = expect_raises(wrong, ModelError, f"a wrong {name}")
        expect(name in str(error), True, "the message names the weight")
        expect(engine.version, before, f"version after a wrong {name}")
    subject.check_weights()


def continuation(subject: RolloutUnderTest) -> None:
    """Slices of a response, also by weights of several versions, are right; if this is declared."""
    engine, late = subject.engine, replace(SAMPLING, min_new_tokens=5)
    if not engine.abilities.continues:
        return
    can = "min_new_tokens" in engine.abilities.settings
    for sampling in (SAMPLING, GREEDY, *((late, replace(late, temperature=0.0)) if can else ())):
        whole = subject.applied(sampling)
        for at_most in (1, 3, SAMPLING.max_new_tokens):
            found = subject.in_slices(sampling, at_most)
            if sampling.greedy:
                expect(found, whole, f"greedy responses in slices of {at_most}")
            elif engine.abilities.seeded:
                again = subject.in_slices(sampling, at_most)
                expect(again, found, f"the same slices of {at_most} again")
    seeds = iter(range(20, 60))

    def update() -> None:
        new = subject.noise(next(seeds))
        subject.load(new)
        engine.update_weights(new.items(), engine.version + 1)

    endless = replace(SAMPLING, eos_token_ids=())
    try:
        found = subject.in_slices(endless, 2, between=update)
    finally:
        subject.restore()
    expect(found != subject.applied(endless), True, "an update changes the later tokens")
    ids, mask = left_padded(PROMPTS[:2])
    numbers = torch.arange(2)
    for what, sampled, at_most, kind in (
        ("too few numbers", [0], 2, ShapeError),
        ("a response at its limit", [0, 12], 2, RolloutInputError),
        ("no new token", [0, 0], 0, RolloutInputError),
        ("more new tokens than the limit", [0, 0], 13, RolloutInputError),
    ):
        wrong = Continued(torch.tensor(sampled), at_most)
        run = partial(engine.generate, ids, mask, SAMPLING, numbers, continued=wrong)
        expect_raises(run, kind, what)


def release(subject: RolloutUnderTest) -> None:
    """A released engine refuses to generate; `resume` gives the same engine back."""
    engine, (ids, mask) = subject.engine, left_padded(PROMPTS)
    before = engine.version
    engine.release()
    expect_raises(lambda: subject.generate(SAMPLING), RolloutError, "generate while released")
    expect_raises(lambda: engine.score(ids, mask), RolloutError, "score while released")
    for _ in range(2):  # a second one does nothing
        engine.resume()
        subject.check_weights()
    expect(engine.version, before, "version after resume")
    engine.release()
    try:
        subject.load(subject.noise(4))
        engine.update_weights(subject.noise(4).items(), 11)
        engine.resume()
        expect(engine.version, 11, "version of an update while released")
        subject.check_weights()
    finally:
        subject.restore()


def close(subject: RolloutUnderTest) -> None:
    """`close` may be called twice, and then every use is refused."""
    engine, (ids, mask) = subject.engine, left_padded(PROMPTS)
    engine.close()
    engine.close()
    uses: tuple[Callable[[], object], ...] = (
        lambda: subject.generate(SAMPLING),
        lambda: engine.score(ids, mask),
        lambda: engine.update_weights(subject.original.items(), 12),
        engine.weights_digest,
        engine.release,
        engine.resume,
    )
    for number, use in enumerate(uses):
        expect_raises(use, RolloutError, f"use {number} after close")


ROLLOUT_LAWS: tuple[Callable[[RolloutUnderTest], None], ...] = (
    protocol, prompts, log_probabilities, ends, seeds, bad_input, update, continuation, release,
    close,
)  # fmt: skip
"""All laws. The last one closes the engine."""


def check_rollout(build: BuildRollout, *, tolerance: float = 1e-4) -> None:
    """Build an engine on a small model and check every law.

    Args:
        build: receives a model folder and returns the engine, in float32.
        tolerance: the largest difference of a log-probability, nats.

    Raises:
        LawBroken: one does not hold.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "model")
        write_reference_model(folder)
        with RolloutUnderTest(build, folder, tolerance=tolerance) as subject:
            check_all(ROLLOUT_LAWS, subject, f"The rollout engine {subject.engine.name!r}")
