"""The place of each added stage among the stages of a step, as the loop runs them.

Most stages run one after the other, and an added stage runs directly before or after the one that
it names. The passes (`PASSES`) run side by side, and while they run the controller scores and masks
the responses (`WHILE_PASSES`). With stages a, b, c, d of added roles:

    added stage                        runs
    a   before="compute_values"        before the first pass is submitted
    b   before="score_responses"       while the passes compute; it cannot read what they write
    c   after="score_responses"        the same
    d   after="compute_log_prob"       when all passes have ended

    declared   compute_log_prob compute_values score_responses measure_batch shape_scores
    result     a compute_log_prob compute_values b score_responses c measure_batch d shape_scores
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quadriga.errors import ConfigError, nearest_name
from quadriga.protocol import fields
from quadriga.protocol.fields import StageFields
from quadriga.trainer.roles.registry import PlacedStage
from quadriga.workers.method_fields import (
    COMPUTE_LOG_PROB,
    COMPUTE_REF_LOG_PROB,
    COMPUTE_VALUES,
    GENERATE_SEQUENCES,
)

PASSES = (COMPUTE_LOG_PROB.name, COMPUTE_REF_LOG_PROB.name, COMPUTE_VALUES.name)
"""Calls that are submitted together, in this order."""
AFTER_PASSES = "shape_scores"
"""The first stage for which the results of the passes are in the batch."""
SCORE = "score_responses"
NOT_PLACES = ("PromptLoader", "add_baselines", "refill", "log_update", "log_samples")
"""Stages that are parts of others: no added stage can stand beside them."""


def with_added(
    flow: Sequence[StageFields], added: Sequence[PlacedStage]
) -> tuple[StageFields, ...]:
    """Return the stages of a step with those of added roles at the places where they run.

    Raises:
        ConfigError: a stage stands beside one that the run does not have, or reads while the passes
            compute what they write.
    """
    inserted = _Inserted(added)
    result = list(inserted.around_all(flow))
    for placed in added:
        if placed.name not in inserted.names:
            raise ConfigError(_no_place(placed, result))
    return tuple(result)


def with_added_parts(
    parts: Sequence[StageFields], added: Sequence[PlacedStage]
) -> tuple[StageFields, ...]:
    """Return stages that a step repeats on other rows, with the added stages beside them.

    Updates are left out: they learn from the rows of the batch.
    """
    inserted = _Inserted([placed for placed in added if placed.stage.writes])
    return tuple(one for part in parts for one in inserted.around(part))


def check_writes(flow: Sequence[StageFields], added: Sequence[PlacedStage]) -> None:
    """Check that what added stages write is used.

    Raises:
        ConfigError: a later stage writes the field again before any stage reads it.
    """
    names = {placed.name for placed in added}
    for number, stage in enumerate(flow):
        for field in stage.writes if stage.name in names else ():
            users = (s for s in flow[number + 1 :] if field in (*s.inputs, *s.writes, *s.drops))
            user = next(users, None)
            if user is not None and field not in user.inputs:
                raise ConfigError(
                    f"stage {stage.name} writes {field}, but stage {user.name} then writes it "
                    f"again; place {stage.name} after it, or let it write another field",
                    field=field,
                )


def scores_come_from_roles(flow: Sequence[StageFields]) -> bool:
    """Return whether an added stage writes the scores, so that `score_responses` computes none."""
    earlier: list[StageFields] = []
    for stage in flow:
        if stage.name == SCORE:
            break
        earlier.append(stage)
    return any(fields.TOKEN_LEVEL_SCORES in stage.writes for stage in earlier)


def added_until_scores(added: Sequence[PlacedStage]) -> bool:
    """Return whether all added stages stand where responses are generated or scored, so that they
    neither read what the passes write nor change it."""
    before = {"expand_prompts", GENERATE_SEQUENCES.name, SCORE}
    names = {placed.name for placed in added}
    # The place of a stage beside another added stage is the place of that one.
    return all(placed.stage.neighbour in before | names for placed in added)


class _Inserted:
    """Yields stages with the added ones beside them, and notes the `names` of those."""

    def __init__(self, added: Sequence[PlacedStage]) -> None:
        self.added = added
        self.names: set[str] = set()
        # What the passes that are computing will write.
        self.pending: set[str] = set()
        self.present: set[str] = set()

    def around_all(self, flow: Sequence[StageFields]) -> Iterator[StageFields]:
        passes = [stage.name for stage in flow if stage.name in PASSES]
        for stage in flow:
            if stage.name in PASSES:
                if stage.name == passes[0]:
                    for name in passes:
                        yield from self.beside("before", name)
                self.pending |= set(stage.writes) - self.present
                yield stage
                continue
            if stage.name == AFTER_PASSES:
                self.pending = set()
                for name in passes:
                    yield from self.beside("after", name)
            yield from self.around(stage)

    def around(self, stage: StageFields) -> Iterator[StageFields]:
        if stage.name in NOT_PLACES:
            yield stage
            return
        yield from self.beside("before", stage.name)
        self.present |= set(stage.writes)
        yield stage
        yield from self.beside("after", stage.name)

    def beside(self, side: str, name: str) -> Iterator[StageFields]:
        for placed in self.added:
            if getattr(placed.stage, side) == name:
                self.names.add(placed.name)
                self.check_pending(placed)
                yield from self.around(placed.fields)

    def check_pending(self, placed: PlacedStage) -> None:
        stage = placed.stage
        used = {*stage.reads, *stage.reads_if_present, *stage.writes}
        if early := self.pending & used:
            verb = "writes" if early <= set(stage.writes) else "reads"
            raise ConfigError(
                f"stage {placed.name} {verb} {', '.join(sorted(early))}, but beside "
                f"{stage.neighbour} it runs while this is computed; place it "
                f"after={COMPUTE_LOG_PROB.name!r}, or before={AFTER_PASSES!r}"
            )


def _no_place(placed: PlacedStage, flow: Sequence[StageFields]) -> str:
    side = "before" if placed.stage.before else "after"
    name, here = placed.stage.neighbour, f"stage {placed.name} stands"
    if name in NOT_PLACES:
        reason = "beside which no stage can stand"
    else:
        reason = "which this run does not have"
    known = list(dict.fromkeys(stage.name for stage in flow if stage.name not in NOT_PLACES))
    near = nearest_name(name, known)
    hint = f"did you mean {near}? " if near else ""
    return f"{here} {side} {name!r}, {reason}; {hint}stages: {', '.join(known)}"
