"""Episodes of a run: what plays them, and their rewards as the scores of a batch.

With `trainer.max_staleness=0`, and in validations, `EpisodeGenerator` is the rollout of the run: it
plays all episodes of a batch to their ends. Otherwise they are rows of the stream.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quadriga.agents.environments import EnvironmentRef
from quadriga.agents.pool import FAILURES, EpisodePool
from quadriga.agents.tool_calls import call_format
from quadriga.agents.tools import with_tools
from quadriga.agents.turns import Turns
from quadriga.config.schema import AgentConfig, TrainConfig
from quadriga.containment import code_runs
from quadriga.errors import RewardError
from quadriga.models.folder import end_token_ids
from quadriga.protocol import DataProto, fields
from quadriga.rewards.pool import Start, start_here
from quadriga.streams.episodes import Episodes, turn_spans
from quadriga.streams.generation import SlicedGeneration
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replicas
from quadriga.streams.staleness import StalenessBound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("quadriga")


def start_of(spread: bool) -> Start:
    """Return what starts the processes of a pool: on all nodes of the Ray cluster, or here."""
    if not spread:
        return start_here
    from quadriga.backends.ray.processes import start_on_a_node

    return start_on_a_node


def make_episodes(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Episodes | None:
    """Return the episodes of a run; None: its responses are one turn.

    Raises:
        InputError: the class of the environment cannot be loaded; see `EnvironmentRef.load`.
        ConfigError: the chat template cannot write the tools of the environment.
        ModelError: the chat template cannot write several turns.
    """
    agent, data = config.agent, config.data
    if agent.path is None:
        return None
    ref = EnvironmentRef(agent.path, agent.name, agent.options)
    ref, tools = with_tools(ref, lambda: call_format(tokenizer))
    ends = end_token_ids(config.actor_rollout_ref.model.path, tokenizer)
    turns = Turns(tokenizer, data.chat_template_kwargs, tools, ends)
    template, bounds = agent.history == "template", (agent.processes, agent.step_timeout_s)
    start = start_of(agent.spread)
    pool = EpisodePool(ref.loaded(), *bounds, agent.process_memory_gb, template, start)
    return Episodes(
        pool, turns, data.max_response_length, agent.max_turns, agent.max_turn_tokens,
        agent.concurrency,
        max_seconds=agent.max_seconds,
        tells_tokens=code_runs() and not inspect.isclass(ref.load()),
        rewrites=template,
    )  # fmt: skip


@dataclass(eq=False)
class EpisodeGenerator:
    """Plays the episodes of batches.

    Args:
        replicas: of the rollout.
        apart: they have ranks of their own.
    """

    config: TrainConfig
    replicas: Replicas
    episodes: Episodes
    apart: bool

    def play(self, rows: DataProto, inputs: Callable[[DataProto], DataProto]) -> DataProto:
        """Return the rows with the whole episodes as responses, in their order. `inputs` returns
        what generation reads."""
        if not len(rows):
            return rows
        queue = PromptQueue(StalenessBound(len(rows), 0), len(rows))
        groups = [PromptGroup(i, rows.select_idxs([i])) for i in range(len(rows))]
        queue.add(groups)
        rollout = self.config.actor_rollout_ref.rollout
        share = -(-len(rows) // self.replicas.count)
        generation = SlicedGeneration(
            self.replicas, queue, inputs,
            slice_tokens=rollout.slice_tokens,
            response_tokens=self.config.data.max_response_length,
            rows=min(rollout.micro_batch_size, share) if self.apart else share,
            kept_rows=rollout.micro_batch_size,
            episodes=self.episodes,
            loses=self.apart,
            note=lambda *_, **__: None,
        )  # fmt: skip
        complete = dict[int, DataProto]()
        try:
            while len(complete) < len(rows):
                generation.submit()
                for group in generation.keep(generation.wait()):
                    if group.batch is not None:
                        complete[group.number] = group.batch
            generation.forget_caches()
        finally:  # after an error another attempt may play others
            self.episodes.forget(groups)
        return DataProto.concat([complete[i] for i in range(len(rows))])


@dataclass(eq=False)
class EpisodeReward:
    """Scores batches with the rewards of their environments.

    Args:
        batch_rows: episodes of a step; an error if so many have failed one after the other.

    Attributes:
        metrics: of the last batch: turns, rewards by turn, failures, and what the environments say.
        masked_rows: rows of the last batch that take no part in the update.
    """

    config: AgentConfig
    batch_rows: int
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    masked_rows: list[int] = field(default_factory=list, init=False)
    _failed: int = field(default=0, init=False)  # episodes in a row, in calls without another one
    _names: set[str] = field(default_factory=set, init=False)  # metrics of all calls

    def __call__(self, data: DataProto, /) -> DataProto:
        """Return the scores of every row.

        Raises:
            RewardError: an environment has failed and `agent.on_error` is "fail", or all have.
        """
        episodes = data.non_tensor_batch[fields.EPISODE].tolist()
        rewards_BR = data.batch[fields.TURN_REWARDS]
        counts = Counter(episode["status"] for episode in episodes)
        failed = [i for i, episode in enumerate(episodes) if episode["status"] in FAILURES]
        own = self._by_turn(data)
        for episode in episodes:
            for name, value in episode["metrics"].items():
                own[f"agent/{name}"] += value / len(episodes)
        # A mean over several calls needs the same metrics of all of them.
        self._names |= set(own)
        own |= dict.fromkeys(self._names - set(own), 0.0)
        turns, most = [episode["turns"] for episode in episodes], max(1, len(episodes))
        for name in ("contexts", "rewritten_turns"):
            own[f"agent/{name}"] = sum(episode[name] for episode in episodes) / most
        self.masked_rows = failed if self.config.on_error == "mask" else []
        self.metrics = {
            **own,
            "agent/turns/mean": sum(turns) / max(1, len(turns)),
            "agent/turns/max": float(max(turns, default=0)),
            **{
                f"agent/ended/{name}": counts[name] / max(1, len(turns))
                for name in ("done", "turns", "length", "seconds")
            },
            **{f"agent/{name}": counts[name] / max(1, len(turns)) for name in FAILURES},
        }
        self._failed = 0 if len(failed) < len(episodes) else self._failed + len(failed)
        if failed:
            self._tell(episodes, failed)
        return DataProto.from_dict({fields.TOKEN_LEVEL_SCORES: rewards_BR.clone()})

    def _by_turn(self, data: DataProto) -> defaultdict[str, float]:
        """Return the mean reward of turn 1, 2, …, which is 0 for an episode without this turn."""
        rewards_BR, mask_BR = data.batch[fields.TURN_REWARDS], data.batch[fields.RESPONSE_MASK]
        found = defaultdict[str, float](float)
        for rewards, mask in zip(rewards_BR, mask_BR, strict=True):
            for turn, (_, last) in enumerate(turn_spans(mask), 1):
                found[f"agent/reward/turn_{turn}"] += float(rewards[last - 1]) / len(data)
        return found

    def _tell(self, episodes: Sequence[dict[str, object]], failed: Sequence[int]) -> None:
        first = episodes[failed[0]]
        text = (
            f"the environments of {len(failed)} of {len(episodes)} episodes have failed; the first "
            f"is {first['status']} in turn {first['turns']}: {first['detail']}"
        )
        lost = self._failed >= max(self.batch_rows, 2)
        if self.config.on_error == "fail" or lost:
            hint = "" if lost else ", or set agent.on_error to zero or mask"
            text += f". Correct agent.path={self.config.path}{hint}"
            raise RewardError(text, status=str(first["status"]))
        consequence = "are left out of the update" if self.masked_rows else "count as 0"
        _log.warning("%s. They %s", text, consequence)
