"""The rows of prompt groups that wait for their environments.

    row of a call, its turn has ended ──► text ──► environment ──► observation ──► tokens behind the
                                                       │           turn, mask 0 ──► next call
                                                       └──► done ──► the row has ended

    prompt   turn 1     observation   turn 2     tokens of a row
             1 1 1 1    0 0 0 0       1 1 1      response_mask
             5 5 5 5   -2-2-2-2       6 6 6      token_versions: weights were updated between
             0 0 0 .2   0 0 0 0       0 0 1      turn_rewards

Sampled tokens are never tokenised again: the tokens of an observation are appended to them. An
environment has no state of its own in a checkpoint: it is begun again, and the turns in the tokens
of its row are played again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quadriga.agents.environments import Action
from quadriga.agents.pool import FAILURES, Answer, EpisodePool
from quadriga.agents.turns import Turns
from quadriga.errors import InputError, QuadrigaError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.values import object_array
from quadriga.streams.queue import PromptGroup
from quadriga.workers.actor_rollout_ref import known_tokens
from quadriga.workers.method_fields import BEGUN_RESPONSES, CONTEXT, OBSERVED, REWRITTEN

Rows = npt.NDArray[np.int64]


class Paused(NamedTuple):
    """Rows of a group between two calls. The group has no `home` while they wait for another one.

    Attributes:
        answers: what the rows have so far (`BEGUN_RESPONSES`), among the rows of their last call.
        places: of the rows in `answers`.
    """

    group: PromptGroup
    rows: Rows
    answers: DataProto
    places: Rows

    @property
    def tokens(self) -> DataProto:
        """What the rows have so far."""
        return self.answers.select_idxs(self.places)


@dataclass(eq=False)
class _Episode:
    """A row.

    Attributes:
        results: the fields of the rows of its last call; None: `reset` has not answered.
        place: of the row in `results`.
        spans: of its turns; see `turn_spans`.
        tokens: of the response so far.
        full: the length limit has cut the last turn.
        ends: how the row ends if its environment has not failed; empty: it goes on.
        waits: whether its environment must answer before the row goes on.
        turns: that its environment has, or gets next.
        failure: the last answer of an environment that has failed.
        times: of the turns that its environment has answered here: number, seconds until the turn
            was written and until it was answered, and the roles of the observation.
        began, since: when its environment had begun here, 0 before, and when the last turn was
            written or answered, on the clock of `time.monotonic`.
    """

    group: PromptGroup
    row: int
    results: DataProto | None = None
    place: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    full: bool = False
    ends: str = ""
    waits: bool = True
    turns: list[Action] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Answer | None = None
    times: list[list[object]] = field(default_factory=list)
    began: float = 0.0
    since: float = field(default_factory=time.monotonic)
    policy_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether the row ends with the turns that it has."""
        # After a failure of `reset` its first turn is written, and then it ends.
        return self.results is not None and self.waits and bool(self.failure or self.ends)

    def of_row(self, name: str) -> torch.Tensor:
        """Return a field of the row after its last call."""
        assert self.results is not None
        return self.results.batch[name][self.place]


_Answered = tuple[_Episode, Answer]
_Following = tuple[_Episode, Answer, list[int], int]
"""A row, the answer of its environment, the tokens that follow, and the version of the first."""


@dataclass(eq=False)
class Episodes:
    """The episodes on their way, one for each row.

    Args:
        turns: tokens and texts of the model that generates.
        response_tokens: R, the columns of a response: turns and observations.
        max_turns: after so many turns, an episode ends.
        max_turn_tokens: a turn with so many tokens has ended; None: only R bounds it.
        concurrency: the most rows at once.
        max_seconds: after so many an episode ends, when its environment has answered; None: never.
        tells_tokens: environments get the tokens of turns with their log-probabilities.
        rewrites: a turn after which the template would write the conversation in another way than
            the row has it begins a new context, with the text of the template.
    """

    pool: EpisodePool
    turns: Turns
    response_tokens: int
    max_turns: int
    max_turn_tokens: int | None
    concurrency: int
    max_seconds: float | None = None
    tells_tokens: bool = False
    rewrites: bool = False
    _rows: dict[int, _Episode] = field(default_factory=dict, init=False)
    _numbers: dict[tuple[PromptGroup, int], int] = field(default_factory=dict, init=False)
    _begun: int = field(default=0, init=False)
    _complete: list[PromptGroup] = field(default_factory=list, init=False)

    @property
    def acting(self) -> bool:
        """Whether a row waits for its environment."""
        return any(episode.waits for episode in list(self._rows.values()))

    def has_room(self, rows: int) -> bool:
        """Whether so many rows may begin."""
        return not self._rows or len(self._rows) + rows <= self.concurrency

    def rows_of(self, home: object) -> int:
        """Return how many rows a replica has."""
        return sum(episode.group.home is home for episode in self._rows.values())

    def begin(self, group: PromptGroup) -> None:
        """Begin the episodes of a group."""
        for row in range(len(group.prompts)):
            self._play(*self._open(group, row))

    def act(self, rows: Sequence[tuple[PromptGroup, int]], results: DataProto) -> None:
        """Give the turns that rows have written to their environments. `results`: the fields of
        these rows after their call."""
        results.prefetch([*begun_fields(results), fields.FINISHED])
        tokens_B, finished_B = _known(results).sum(1).tolist(), results.batch[fields.FINISHED]
        for place, (group, row) in enumerate(rows):
            number, episode = self._open(group, row)
            episode.results, episode.place, episode.waits = results, place, True
            episode.spans = turn_spans(episode.of_row(fields.RESPONSE_MASK))
            finished, episode.tokens = bool(finished_B[place]), tokens_B[place]
            episode.full = not finished and episode.tokens >= self.response_tokens
            now = time.monotonic()
            episode.policy_s, episode.since = now - episode.since, now
            self._add_turns(episode, finished)
            # Otherwise it ends without an answer: its environment has failed before, or knows all
            # but the last turn, which the length limit has cut.
            episode.ends = "length" if len(episode.turns) == len(episode.rewards) else ""
            if not episode.has_ended:
                self._play(number, episode)

    def turn_ended(
        self, rows: Sequence[tuple[PromptGroup, int]], tokens: DataProto
    ) -> npt.NDArray[np.bool_]:
        """Return which rows have a turn that is as long as it may be, [B] bool."""
        ended, mask_BR = np.zeros(len(rows), dtype=np.bool_), tokens.batch[fields.RESPONSE_MASK]
        for place, (group, row) in enumerate(rows):
            limits = group.max_tokens.get(row), self.max_turn_tokens
            if (most := min(filter(None, limits), default=None)) is not None:
                first, last = turn_spans(mask_BR[place])[-1]
                ended[place] = last - first >= most
        return ended

    def wait(self, timeout: float) -> bool:
        """Wait for an answer, at most `timeout` seconds; return whether `collect` finds one."""
        return any(e.has_ended for e in list(self._rows.values())) or self.pool.wait(timeout)

    def collect(self) -> list[Paused]:
        """Take the answers that have come: return the rows that go on, and end the others."""
        found = [
            (episode, answer)
            for answer in self.pool.answers()
            if (episode := self._rows.get(answer.episode)) is not None
        ]
        for episode, answer in found:
            self._note(answer, episode)
        paused = self._go_on([one for one in found if not one[0].has_ended])
        self._end([episode for episode in self._rows.values() if episode.has_ended])
        self._release()
        return paused

    def _release(self) -> None:
        """Copy the rows that are left of calls most of whose rows have ended. Otherwise one slow
        environment would keep the fields of all rows of its call in memory."""
        held = dict[int, list[_Episode]]()
        for episode in list(self._rows.values()):
            held.setdefault(id(episode.results), []).append(episode)
        for own in held.values():
            if own[0].results is not None and len(own) <= len(own[0].results) // 4:
                rows = own[0].results.select_idxs([episode.place for episode in own])
                for place, episode in enumerate(own):
                    episode.results, episode.place = rows, place

    def complete(self) -> list[PromptGroup]:
        """Return the groups whose last row has ended since the last call."""
        found, self._complete = self._complete, []
        return [group for group in found if group.batch is not None]

    def has(self, group: PromptGroup) -> bool:
        """Return whether a row of a group waits for its environment."""
        return any(e.group is group and e.waits for e in self._rows.values())

    def held(self, group: PromptGroup) -> list[DataProto]:
        """Return what the rows of a group that wait for their environments have."""
        found = list[DataProto]()
        for e in self._rows.values():
            if e.group is group and e.waits and e.results is not None:
                e.results, e.place = e.results.select_idxs([e.place]), 0  # the caller fetches it
                found.append(e.results)
        return found

    def waiting(self) -> list[tuple[PromptGroup, Rows, DataProto]]:
        """Return the rows that wait for their environments, with their fields, for a checkpoint."""
        return [
            (e.group, np.array([e.row]), e.results.select_idxs([e.place]))
            for e in self._rows.values()
            if e.waits and e.results is not None
        ]

    def settle(self) -> list[Paused]:
        """Wait for all environments that begin; return the rows that go on."""
        parts = list[Paused]()
        while any(e.results is None and e.waits for e in self._rows.values()):
            self.wait(1.0)
            parts += self.collect()
        return parts

    def forget(self, groups: Sequence[PromptGroup]) -> None:
        """Drop the episodes of groups that begin again."""
        dropped = set(groups)
        for group, row in [key for key in self._numbers if key[0] in dropped]:
            self._drop(group, row)
        self._complete = [group for group in self._complete if group not in dropped]

    def close(self) -> None:
        """End the environments."""
        self.pool.close()
        self._rows.clear()
        self._numbers.clear()

    def _play(self, number: int, episode: _Episode) -> None:
        """Send the turns of a row to its environment."""
        group, row = episode.group, episode.row
        chat = group.chats.get(row, group.prompts.non_tensor_batch[fields.RAW_PROMPT][row])
        self.pool.play(number, _columns(group, row), episode.turns, chat)

    def _add_turns(self, episode: _Episode, finished: bool) -> None:
        """Add the turns that the environment does not have, but for a last one that was cut at the
        end of the row."""
        ids_R, spans = episode.of_row(fields.RESPONSES), episode.spans
        contexts = (episode.of_row(fields.TOKEN_VERSIONS) <= CONTEXT).nonzero()[:, 0].tolist()
        prompt = int(episode.group.prompts.batch[fields.ATTENTION_MASK][episode.row].sum())
        count = len(spans) - episode.full
        for turn, (first, last) in list(enumerate(spans[:count], 1))[len(episode.turns) :]:
            own, tokens = ids_R[first:last].tolist(), list[tuple[str, float]]()
            if self.tells_tokens:
                log_probs = episode.of_row(fields.ROLLOUT_LOG_PROBS)[first:last].tolist()
                tokens = list(zip(self.turns.pieces(own), log_probs, strict=True))
            text, ended = self.turns.text(own), turn < len(spans) or finished
            begins = max((i for i in contexts if i < first), default=-prompt)
            episode.turns.append(Action(text, turn, ended, tokens, first - begins))

    def _open(self, group: PromptGroup, row: int) -> tuple[int, _Episode]:
        """Return an episode, a new one for a row that a checkpoint had begun."""
        if (group, row) not in self._numbers:
            self._begun += 1
            self._numbers[group, row] = self._begun
            self._rows[self._begun] = _Episode(group, row)
        number = self._numbers[group, row]
        return number, self._rows[number]

    def _drop(self, group: PromptGroup, row: int) -> None:
        number = self._numbers.pop((group, row))
        del self._rows[number]
        self.pool.end(number)

    def _go_on(self, answered: Sequence[_Answered]) -> list[Paused]:
        """Return the rows that go on behind the answers of their environments, in one batch. The
        others end."""
        rows = [(*one, list[int](), OBSERVED) for one in answered if one[0].results is None]
        begun = [one for one in answered if one[0].results is not None]
        for _, of_tools in groupby(begun, lambda one: one[1].tools):
            rows += self._following(list(of_tools))
        for episode, _, ids, _ in rows:
            episode.ends = "length" if episode.tokens + len(ids) >= self.response_tokens else ""
        rows = [row for row in rows if not row[0].has_ended]
        tokens, places = no_tokens(len(rows), self.response_tokens), np.arange(len(rows))
        for place, (episode, answer, more, marker) in enumerate(rows):
            if episode.results is not None:
                for name in begun_fields(episode.results):
                    value = episode.of_row(name)
                    if name not in tokens:  # the experts, which rows that begin do not have
                        tokens[name] = value.new_full((len(rows), *value.shape), -1)
                    tokens[name][place] = value
                first = episode.tokens
                columns = slice(first, first + len(more))
                tokens[fields.RESPONSES][place, columns] = torch.tensor(more)
                tokens[fields.TOKEN_VERSIONS][place, columns] = OBSERVED
                tokens[fields.TOKEN_VERSIONS][place, first] = marker
            episode.waits = False
            episode.group.max_tokens.pop(episode.row, None)
            if answer.max_tokens:
                episode.group.max_tokens[episode.row] = answer.max_tokens
        answers = DataProto.from_dict(tokens)
        of_rows = zip(rows, places[:, None], strict=True)
        return [Paused(e.group, np.array([e.row]), answers, p) for (e, *_), p in of_rows]

    def _note(self, answer: Answer, episode: _Episode) -> None:
        """Keep rewards and metrics of an answer, which are of all turns if they were played again,
        its time, a failure, and whether the row ends."""
        turns = len(episode.spans)
        again = len(answer.rewards) == turns
        episode.rewards = [*([] if again else episode.rewards), *answer.rewards]
        for name, value in answer.metrics.items():
            episode.metrics[name] = value + (0.0 if again else episode.metrics.get(name, 0.0))
        now = time.monotonic()
        episode.began = episode.began or now
        if turns:
            who = ", ".join(f"{m['role']} {m.get('name', '')}".strip() for m in answer.messages)
            took = round(episode.policy_s, 4), round(now - episode.since, 4)
            episode.times.append([turns, *took, who])
        episode.since = now
        if answer.status in FAILURES:
            episode.failure = answer
        if episode.results is None:
            try:
                self._begin_prompt(episode, answer)
            except QuadrigaError as error:  # what the template cannot write
                episode.failure = Answer(answer.episode, "raised", detail=str(error))
        elif episode.full or answer.status == "done":
            episode.ends = "length" if episode.full else "done"
        elif turns >= self.max_turns:
            episode.ends = "turns"
        elif self.max_seconds is not None and now - episode.began >= self.max_seconds:
            episode.ends = "seconds"

    def _following(self, rows: Sequence[_Answered]) -> list[_Following]:
        """Return the tokens behind the last turn of each row. The rows have the same tools. A row
        whose tokens the template cannot write fails."""
        try:
            turns = self.turns.with_tools(rows[0][1].tools)
            markers = [self._marker(*row, turns) for row in rows]
            behind = [
                (e.of_row(fields.RESPONSES)[slice(*e.spans[-1])].tolist(), answer.messages)
                for (e, answer), marker in zip(rows, markers, strict=True)
                if marker == OBSERVED
            ]
            observed = iter(turns.following_ids(behind))
            found = list[_Following]()
            for (episode, answer), marker in zip(rows, markers, strict=True):
                chat = answer.messages if marker == CONTEXT else answer.chat
                begins = marker != OBSERVED
                ids = turns.context_ids(chat, answer.text) if begins else next(observed)
                found.append((episode, answer, ids, marker))
            return found
        except QuadrigaError as error:
            if len(rows) > 1:
                return [self._following([row])[0] for row in rows]
            rows[0][0].failure = Answer(-1, "raised", detail=str(error))
            return [(*rows[0], [], OBSERVED)]

    def _marker(self, episode: _Episode, answer: Answer, turns: Turns) -> int:
        """Return the version of the first token behind the last turn of a row.

        Raises:
            InputError: a context begins in a row with images.
        """
        marker = CONTEXT if answer.new_context else OBSERVED
        if self.rewrites and not answer.new_context:
            contexts = (episode.of_row(fields.TOKEN_VERSIONS) <= CONTEXT).nonzero()[:, 0].tolist()
            begins = max(contexts, default=-1)
            pairs = zip(episode.turns, episode.spans, strict=True)
            if turns.rewrites(answer.chat, [a.text for a, (f, _) in pairs if f > begins]):
                marker = REWRITTEN
        if marker != OBSERVED:
            _check_images(episode)
        return marker

    def _begin_prompt(self, episode: _Episode, answer: Answer) -> None:
        """Add what `reset` has returned to the prompt of a row, or put it in its place.

        Raises:
            InputError: it has more tokens than `agent.reset_tokens`, or the row has images.
        """
        if not answer.messages:
            return
        _check_images(episode)
        prompts, row = episode.group.prompts, episode.row
        given = list(prompts.non_tensor_batch[fields.RAW_PROMPT][row])
        before = episode.group.chats.setdefault(row, given)
        chat: Any = [*([] if answer.new_context else before), *answer.messages]
        ids = self.turns.with_tools(answer.tools).context_ids(chat, answer.text)
        width = prompts.batch[fields.INPUT_IDS].shape[1]
        if len(ids) > width:
            raise InputError(
                f"the prompt has {len(ids)} tokens with what reset has returned, and space for "
                f"{width}; raise agent.reset_tokens by {len(ids) - width}"
            )
        changed = {
            fields.INPUT_IDS: torch.tensor([0] * (width - len(ids)) + ids),
            fields.ATTENTION_MASK: torch.tensor([0] * (width - len(ids)) + [1] * len(ids)),
            fields.PROMPT_LENGTH: torch.tensor(len(ids)),
        }
        for name, value in changed.items():
            prompts.batch[name] = torch.where(
                (torch.arange(len(prompts)) == row).view(-1, *[1] * value.dim()),
                value,
                prompts.batch[name],
            )
        prompts.non_tensor_batch[fields.RAW_PROMPT][row] = chat

    def _end(self, ended: Sequence[_Episode]) -> None:
        """End rows with the rewards of their turns: those of one call and group together."""
        parts = dict[tuple[int, PromptGroup], list[_Episode]]()
        for episode in ended:
            parts.setdefault((id(episode.results), episode.group), []).append(episode)
        for (_, group), own in parts.items():
            results, rewards = own[0].results, torch.zeros(len(own), self.response_tokens)
            assert results is not None
            for place, episode in enumerate(own):
                for (_, last), reward in zip(episode.spans, episode.rewards, strict=False):
                    rewards[place, last - 1] = reward if episode.failure is None else 0.0
                self._drop(group, episode.row)
            about = [_about(episode) for episode in own]
            finished = torch.tensor([int(one["status"] != "length") for one in about])
            kept = [str(k) for k in results.batch.keys() if k != fields.FINISHED]  # noqa: SIM118
            rows = results.select(kept).select_idxs([episode.place for episode in own])
            more = {fields.FINISHED: finished, fields.TURN_REWARDS: rewards}
            rows.union(DataProto.from_dict(more, {fields.EPISODE: object_array(about)}))
            group.end(np.array([episode.row for episode in own]), rows)
            if group.batch is not None:
                self._complete.append(group)


def _check_images(episode: _Episode) -> None:
    if fields.MULTI_MODAL_INPUTS in episode.group.prompts.non_tensor_batch:
        raise InputError(
            "a row with images keeps the prompt of its data; what `reset` returns, contexts and "
            "requests of a function are texts without images"
        )


def _about(episode: _Episode) -> dict[str, object]:
    """Return what a row tells about its episode."""
    versions, failure = episode.of_row(fields.TOKEN_VERSIONS), episode.failure
    return {
        "status": episode.ends if failure is None else failure.status,
        "turns": len(episode.spans),
        "contexts": 1 + int((versions <= CONTEXT).sum()),
        "rewritten_turns": int((versions == REWRITTEN).sum()),
        "times": episode.times,
        "metrics": episode.metrics,
        "detail": "" if failure is None else failure.detail,
    }


def no_tokens(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return `BEGUN_RESPONSES` of rows that begin, [rows, columns]."""
    tokens = {name: torch.zeros(rows, columns, dtype=torch.int64) for name in BEGUN_RESPONSES}
    return tokens | {fields.ROLLOUT_LOG_PROBS: torch.zeros(rows, columns)}


def _columns(group: PromptGroup, row: int) -> Mapping[str, object]:
    """Return the data row of a row of a group."""
    arrays = group.prompts.non_tensor_batch
    if fields.COLUMNS in arrays:
        columns: Mapping[str, object] = arrays[fields.COLUMNS][row]
        return columns
    known = fields.DATA_SOURCE, fields.REWARD_MODEL, fields.EXTRA_INFO  # a dataset of the user
    return {name: arrays[name][row] for name in known if name in arrays}


def begun_fields(rows: DataProto) -> list[str]:
    """Return the fields of rows with what they have so far."""
    return [n for n in (*BEGUN_RESPONSES, fields.ROUTED_EXPERTS) if n in {*rows.batch.keys()}]


def with_routes(parts: list[DataProto]) -> list[DataProto]:
    """Return the rows with the field of their experts, if some have it: others have none yet."""
    name = fields.ROUTED_EXPERTS
    known = [part for part in parts if name in part.batch.keys()]  # noqa: SIM118
    if known:
        one = known[0][:1].batch[name]
        for part in parts:
            part.batch.setdefault(name, one.new_full((len(part), *one.shape[1:]), -1))
    return parts


def _known(rows: DataProto) -> torch.Tensor:
    """Return 1 at the response tokens of rows so far, [B, R]."""
    return known_tokens(rows.batch[fields.RESPONSE_MASK], rows.batch[fields.TOKEN_VERSIONS])


def turn_spans(response_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first, behind the last) of each turn of a row. `response_mask` is [R]."""
    changes = np.diff(response_mask.numpy().astype(np.int8), prepend=0, append=0).nonzero()[0]
    bounds = iter(changes.tolist())
    return list(zip(bounds, bounds, strict=True))
