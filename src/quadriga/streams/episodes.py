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
from collections.abc import Iterator, Mapping, Sequence
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
        results: the fields of the row after its last call; None: `reset` has not answered.
        waits: whether its environment must answer before the row goes on.
        turns: that its environment has, or gets next.
        failure: the last answer of an environment that has failed.
        times: of the turns that its environment has answered here: number, seconds until the turn
            was written and until it was answered, and the roles of the observation.
        since: when the last turn was written or answered, on the clock of `time.monotonic`.
    """

    group: PromptGroup
    row: int
    results: DataProto | None = None
    waits: bool = True
    turns: list[Action] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Answer | None = None
    times: list[list[object]] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    policy_s: float = 0.0


@dataclass(eq=False)
class Episodes:
    """The episodes on their way, one for each row.

    Args:
        turns: tokens and texts of the model that generates.
        response_tokens: R, the columns of a response: turns and observations.
        max_turns: after so many turns, an episode ends.
        max_turn_tokens: a turn with so many tokens has ended; None: only R bounds it.
        concurrency: the most rows at once.
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
    tells_tokens: bool = False
    rewrites: bool = False
    _rows: dict[int, _Episode] = field(default_factory=dict, init=False)
    _numbers: dict[tuple[PromptGroup, int], int] = field(default_factory=dict, init=False)
    _begun: int = field(default=0, init=False)
    _complete: list[PromptGroup] = field(default_factory=list, init=False)
    # Rows that end without an answer: their environments have failed before, or know all but the
    # last turn, which the length limit has cut.
    _alone: list[int] = field(default_factory=list, init=False)

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

    def act(self, group: PromptGroup, rows: Rows, results: DataProto) -> None:
        """Give the turns that rows have written to their environments. `results`: the fields of
        these rows after their call."""
        results.prefetch([*BEGUN_RESPONSES, fields.FINISHED])
        for place, row in enumerate(rows.tolist()):
            number, episode = self._open(group, row)
            episode.results, episode.waits = results.select_idxs([place]), True
            now = time.monotonic()
            episode.policy_s, episode.since = now - episode.since, now
            self._add_turns(episode, episode.results)
            if episode.failure is not None or len(episode.turns) == len(episode.rewards):
                self._alone.append(number)
            else:
                self._play(number, episode)

    def turn_ended(
        self, group: PromptGroup, rows: Rows, tokens: DataProto
    ) -> npt.NDArray[np.bool_]:
        """Return which rows have a turn that is as long as it may be, [B] bool."""
        ended = np.zeros(len(rows), dtype=np.bool_)
        for place, row in enumerate(rows.tolist()):
            limits = group.max_tokens.get(row), self.max_turn_tokens
            most = min(filter(None, limits), default=None)
            ended[place] = most is not None and len(_turns(tokens, place)[-1]) >= most
        return ended

    def wait(self, timeout: float) -> bool:
        """Wait for an answer, at most `timeout` seconds; return whether `collect` finds one."""
        return bool(self._alone) or self.pool.wait(timeout)

    def collect(self) -> Iterator[Paused]:
        """Take the answers that have come: yield the rows that go on, and end the others."""
        for answer in self.pool.answers():
            if (episode := self._rows.get(answer.episode)) is not None:
                yield from self._answered(answer, episode)
        for number in self._alone:
            episode = self._rows[number]
            self._end(episode, "length" if episode.failure is None else episode.failure.status)

    def complete(self) -> list[PromptGroup]:
        """Return the groups whose last row has ended since the last call."""
        found, self._complete = self._complete, []
        return [group for group in found if group.batch is not None]

    def has(self, group: PromptGroup) -> bool:
        """Return whether a row of a group waits for its environment."""
        return any(e.group is group and e.waits for e in self._rows.values())

    def held(self, group: PromptGroup) -> list[DataProto]:
        """Return what the rows of a group that wait for their environments have."""
        own = [e.results for e in self._rows.values() if e.group is group and e.waits]
        return [results for results in own if results is not None]

    def waiting(self) -> list[tuple[PromptGroup, Rows, DataProto]]:
        """Return the rows that wait for their environments, with their fields, for a checkpoint."""
        return [
            (e.group, np.array([e.row]), e.results)
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

    def _add_turns(self, episode: _Episode, results: DataProto) -> None:
        """Add the turns that the environment does not have, but for a last one that was cut at the
        end of the row."""
        ids = results.batch[fields.RESPONSES][0].tolist()
        log_probs = results.batch[fields.ROLLOUT_LOG_PROBS][0].tolist()
        spans = turn_spans(results.batch[fields.RESPONSE_MASK][0])
        count, finished = len(spans) - self._is_full(results), int(results.batch[fields.FINISHED])
        versions = results.batch[fields.TOKEN_VERSIONS][0].tolist()
        prompt = int(episode.group.prompts.batch[fields.ATTENTION_MASK][episode.row].sum())
        for turn, (first, last) in list(enumerate(spans[:count], 1))[len(episode.turns) :]:
            own, tokens = ids[first:last], list[tuple[str, float]]()
            if self.tells_tokens:
                tokens = list(zip(self.turns.pieces(own), log_probs[first:last], strict=True))
            text, ended = self.turns.text(own), turn < len(spans) or bool(finished)
            begins = max((i for i in range(first) if versions[i] <= CONTEXT), default=-prompt)
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
        self._alone = [other for other in self._alone if other != number]
        self.pool.end(number)

    def _is_full(self, results: DataProto) -> bool:
        """Return whether the length limit has cut the last turn of a row."""
        cut = not int(results.batch[fields.FINISHED])
        return cut and int(_known(results).sum()) >= self.response_tokens

    def _answered(self, answer: Answer, episode: _Episode) -> Iterator[Paused]:
        """Let a row go on behind the answer of its environment, or end it."""
        results, more, marker = episode.results, list[int](), OBSERVED
        turns = [] if results is None else _turns(results)
        self._note(answer, episode, len(turns))
        full = results is not None and self._is_full(results)
        try:
            if results is None:
                self._begin_prompt(episode, answer)
            elif answer.status == "observed" and not full:
                more, marker = self._following(episode, results, answer)
        except QuadrigaError as error:  # what the template cannot write
            episode.failure = Answer(answer.episode, "raised", detail=str(error))
        if results is None:  # after a failure its first turn is written, and then it ends
            none = torch.zeros(1, self.response_tokens, dtype=torch.int64)
            own = {**dict.fromkeys(BEGUN_RESPONSES, none), fields.ROLLOUT_LOG_PROBS: none.float()}
        else:
            first = int(_known(results).sum())
            ends = {
                "length": full or first + len(more) >= self.response_tokens,
                "turns": len(turns) >= self.max_turns and not full,
                "done": answer.status == "done" and not full,
            }
            if episode.failure is not None:
                return self._end(episode, episode.failure.status)
            if found := [status for status, holds in ends.items() if holds]:
                return self._end(episode, found[-1])
            own = {name: results.batch[name].clone() for name in BEGUN_RESPONSES}
            place = slice(first, first + len(more))
            own[fields.RESPONSES][0, place] = torch.tensor(more)
            own[fields.TOKEN_VERSIONS][0, place] = OBSERVED
            own[fields.TOKEN_VERSIONS][0, first] = marker
        episode.waits = False
        episode.group.max_tokens.pop(episode.row, None)
        if answer.max_tokens:
            episode.group.max_tokens[episode.row] = answer.max_tokens
        first_row = np.zeros(1, dtype=np.int64)
        yield Paused(episode.group, first_row + episode.row, DataProto.from_dict(own), first_row)

    def _note(self, answer: Answer, episode: _Episode, turns: int) -> None:
        """Keep rewards and metrics of an answer, which are of all turns if they were played again,
        its time, and a failure."""
        again = len(answer.rewards) == turns
        episode.rewards = [*([] if again else episode.rewards), *answer.rewards]
        for name, value in answer.metrics.items():
            episode.metrics[name] = value + (0.0 if again else episode.metrics.get(name, 0.0))
        now = time.monotonic()
        if turns:
            who = ", ".join(f"{m['role']} {m.get('name', '')}".strip() for m in answer.messages)
            took = round(episode.policy_s, 4), round(now - episode.since, 4)
            episode.times.append([turns, *took, who])
        episode.since = now
        if answer.status in FAILURES:
            episode.failure = answer

    def _following(
        self, episode: _Episode, results: DataProto, answer: Answer
    ) -> tuple[list[int], int]:
        """Return the tokens behind the last turn of a row, and the version of the first of them.

        Raises:
            ModelError, ConfigError: the template cannot write them; see `Turns`.
            InputError: a context begins in a row with images.
        """
        turns, marker = self.turns.with_tools(answer.tools), OBSERVED
        if answer.new_context:
            marker = CONTEXT
        elif self.rewrites:
            versions = results.batch[fields.TOKEN_VERSIONS][0].tolist()
            begins = max((i for i, v in enumerate(versions) if v <= CONTEXT), default=-1)
            spans = turn_spans(results.batch[fields.RESPONSE_MASK][0])
            own = [a.text for a, (f, _) in zip(episode.turns, spans, strict=True) if f > begins]
            marker = REWRITTEN if turns.rewrites(answer.chat, own) else OBSERVED
        if marker == OBSERVED:
            return turns.following_ids(_turns(results)[-1], answer.messages), marker
        if fields.MULTI_MODAL_INPUTS in episode.group.prompts.non_tensor_batch:
            raise InputError("a row with images cannot begin another context")
        messages = answer.messages if marker == CONTEXT else answer.chat
        return turns.context_ids(messages, answer.text), marker

    def _begin_prompt(self, episode: _Episode, answer: Answer) -> None:
        """Add what `reset` has returned to the prompt of a row, or put it in its place.

        Raises:
            InputError: it has more tokens than `agent.reset_tokens`.
        """
        if not answer.messages:
            return
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

    def _end(self, episode: _Episode, status: str) -> None:
        """End a row with the rewards of its turns."""
        group, row, results = episode.group, episode.row, episode.results
        assert results is not None
        rewards, versions = (
            torch.zeros(1, self.response_tokens),
            results.batch[fields.TOKEN_VERSIONS],
        )
        spans = turn_spans(results.batch[fields.RESPONSE_MASK][0])
        for (_, last), reward in zip(spans, episode.rewards, strict=False):
            rewards[0, last - 1] = reward if episode.failure is None else 0.0
        about = {
            "status": status,
            "turns": len(spans),
            "contexts": 1 + int((versions <= CONTEXT).sum()),
            "rewritten_turns": int((versions == REWRITTEN).sum()),
            "times": episode.times,
            "metrics": episode.metrics,
            "detail": "" if episode.failure is None else episode.failure.detail,
        }
        kept = [str(k) for k in results.batch.keys() if k != fields.FINISHED]  # noqa: SIM118
        ended = results.select(kept).union(
            DataProto.from_dict(
                {
                    fields.FINISHED: torch.tensor([int(status != "length")]),
                    fields.TURN_REWARDS: rewards,
                },
                non_tensors={fields.EPISODE: object_array([about])},
            )
        )
        self._drop(group, row)
        group.end(np.array([row]), ended)
        if group.batch is not None:
            self._complete.append(group)


def _columns(group: PromptGroup, row: int) -> Mapping[str, object]:
    """Return the data row of a row of a group."""
    arrays = group.prompts.non_tensor_batch
    if fields.COLUMNS in arrays:
        columns: Mapping[str, object] = arrays[fields.COLUMNS][row]
        return columns
    known = fields.DATA_SOURCE, fields.REWARD_MODEL, fields.EXTRA_INFO  # a dataset of the user
    return {name: arrays[name][row] for name in known if name in arrays}


def _known(rows: DataProto) -> torch.Tensor:
    """Return 1 at the response tokens of rows so far, [B, R]."""
    return known_tokens(rows.batch[fields.RESPONSE_MASK], rows.batch[fields.TOKEN_VERSIONS])


def turn_spans(response_mask: torch.Tensor) -> list[tuple[int, int]]:
    """Return (first, behind the last) of each turn of a row. `response_mask` is [R]."""
    spans, first = list[tuple[int, int]](), 0
    for sampled, same in groupby(response_mask.tolist()):
        last = first + len(list(same))
        spans += [(first, last)] if sampled else []
        first = last
    return spans


def _turns(rows: DataProto, place: int = 0) -> list[list[int]]:
    """Return the tokens of each turn of a row."""
    ids = rows.batch[fields.RESPONSES][place].tolist()
    return [ids[first:last] for first, last in turn_spans(rows.batch[fields.RESPONSE_MASK][place])]
