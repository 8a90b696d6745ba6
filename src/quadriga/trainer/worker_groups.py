"""The worker groups of a run: which roles share processes, and how they start and stop."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quadriga.backends import get_backend, profiler_options
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.errors import QuadrigaError, RolloutOutputError
from quadriga.files import atomic_write, writing
from quadriga.observability.jsonl import JsonlFile, read_jsonl
from quadriga.observability.profiling import ProfiledCall, stop_profile
from quadriga.observability.run_folder import CALLS, METRICS, PROFILE, STREAM
from quadriga.observability.trackers import points_of
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.streams.replicas import (
    Applying,
    ReplicaLink,
    Replicas,
    ReplicatedRollout,
    are_replicas,
    start_replicas,
)
from quadriga.streams.timeline import Span, chrome_trace, recorded_spans
from quadriga.trainer.checkpoints import check_states, unchanged_handlers
from quadriga.trainer.roles.needs import CRITIC, REWARD_MODEL, reads_ref_log_prob
from quadriga.trainer.roles.registry import ResourcePoolManager, Role, added_roles
from quadriga.trainer.roles.workers import (
    INIT,
    SAVE,
    has_method,
    pool_manager,
    start_order,
    use_gpu,
    uses_by_pool,
    worker_classes,
    worker_keys,
    workers_of,
)
from quadriga.workers import roles

_log = logging.getLogger("quadriga")

if TYPE_CHECKING:
    from quadriga.checkpoint.folders import Resumed, SavedGroups
    from quadriga.single_controller import (
        Backend,
        ClassWithInitArgs,
        ResourcePool,
        Worker,
        WorkerGroup,
    )
    from quadriga.weight_sync.transport import WeightNeeds

ACTOR_VERSION = "actor_weight_version"
"""The method of the policy's worker that returns the version of the actor's weights."""

WEIGHT_BYTES = "weight_bytes"
"""The method of the policy's worker that returns the bytes of the last weight sync by path."""

CLOSE_ROLLOUT = "close_rollout"
"""The method of the policy's worker that ends its rollout engine."""
CLOSE_S = 10.0
"""Seconds that rollout engines have to end before their processes are killed."""

ALIVENESS_CHECK_S = 3.0
"""Seconds between two checks that every process of a group is alive. Calls notice a death by
themselves; the check finds it also in a role that no call waits for."""


@dataclass(frozen=True)
class StartedGroups:
    """The worker groups that a trainer has started, and their backend."""

    backend: Backend
    groups: Sequence[WorkerGroup]

    def close(self) -> None:
        """Stop every process of these groups, and the backend if this run started it.

        Rollout engines end first, because they may have processes and files of their own. If one of
        them cannot be stopped, the others are stopped before its error is raised.
        """
        for group in self.groups:
            close_rollouts(group)
        with ExitStack() as stack:  # which calls the last callback first
            stack.callback(self.backend.shutdown)
            for group in reversed(self.groups):
                stack.callback(group.shutdown)

    def _profiled_calls(self, view: WorkerGroup) -> list[ProfiledCall]:
        """End the profile of a group, and return its calls; none if it was lost meanwhile."""
        try:
            return list(chain.from_iterable(view.stop_profile()))
        except QuadrigaError:
            if self.backend.dead(view._ranks.handles):
                return []
            raise

    @contextmanager
    def profiled(self, trainer: RunConfig, step: int) -> Iterator[None]:
        """Within the block, trace every rank if the step is one of `trainer.profile.steps`. Then
        write one file for each rank, and `roles.json` with the work of all roles. `calls.jsonl`
        has the calls of each such step; calls of replicas are in `stream.jsonl`."""
        run, tool = Path(trainer.default_local_dir), trainer.profile.tool
        if step not in (trainer.profile.steps or [step] * (tool == "calls")):
            yield
            return
        folder = run / PROFILE / f"step_{step}"
        views: dict[str, WorkerGroup] = {}
        for group in self.groups:
            role, name = group.roles[0], "+".join(group.roles)
            streamed = tool == "calls" and role == "rollout" and (run / STREAM).is_file()
            lost = bool(self.backend.dead(group._ranks.handles))
            if has_method(group, role, "start_profile") and not (streamed or lost):
                name += f"_{len(views)}" if name in views else ""
                views[name] = group.spawn([role])[role]
                views[name].stop_profile()  # one that a lost step has left
        began = time.time()
        for name, view in views.items():
            view.start_profile(tool, str(folder / name))
        try:
            yield
        except BaseException:  # of the local backend: other processes end, or go on
            stop_profile()
            raise
        ended = time.time()
        calls = list(chain.from_iterable(map(self._profiled_calls, views.values())))
        ranks = [
            (f"{c.role} rank {c.rank}", c.method, c.start - ended, c.end - ended) for c in calls
        ]
        place = folder.parent if tool == "calls" else folder
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
        with closing(JsonlFile(run / CALLS)) as lines:
            lines.write({"step": step, "calls": ranks})
        if tool == "calls":
            return
        took = ended - began
        spans = [Span(role, name, start + took, end + took, 0) for role, name, start, end in ranks]
        if (run / METRICS).is_file():  # its last row is this step's, and was written just now
            _, elapsed = points_of(read_jsonl(run / METRICS), "progress/elapsed")
            spans = [span for span in recorded_spans(run) if span.end > [0.0, *elapsed][-2]]
        with atomic_write(folder / "roles.json") as file:
            file.write(json.dumps(chrome_trace(spans)).encode())


def close_rollouts(group: WorkerGroup) -> None:
    """End the rollout engines of a group. What fails is logged: the processes are ended next."""
    for role in group.roles:
        if not has_method(group, role, CLOSE_ROLLOUT):
            continue
        try:
            group.spawn([role])[role].close_rollout.options(timeout=CLOSE_S)()
        except QuadrigaError as error:
            _log.debug("the rollout engines of role %s did not end: %s", role, error)


@contextmanager
def close_on_error(backend: Backend) -> Iterator[list[WorkerGroup]]:
    """Yield a list for the groups that the block starts. If the block raises, stop them and the
    backend, so that a failed start leaves no process."""
    groups: list[WorkerGroup] = []
    try:
        yield groups
    except BaseException:
        StartedGroups(backend, groups).close()
        raise


@dataclass(frozen=True)
class WeightLink:
    """From the actor to a rollout in other processes.

    Each rank of the actor puts its part of a round into the store. The controller holds the
    handles, and the ranks of the rollout read the parts. While they do, the actor makes the next
    round. With `joined`, the ranks of both groups exchange the parts in one process group instead.
    """

    sender: roles.SendingGroup
    receiver: roles.ReceivingGroup
    joined: bool = False

    def sync(self) -> None:
        """Copy all weights, then compare digests on every rank of the rollout.

        Raises:
            WorkerError: names the weights that are missing or differ.
        """
        every = self.receiver.weight_needs()
        if self.joined:
            self._sync_over_group(every)
            return
        needs = every[0]
        reading: DataProtoFuture | None = None
        # Closed if a rank of the rollout fails: the generators of the actor's ranks then end.
        with closing(self.sender.send_weights.stream(needs)) as rounds:
            for parts in rounds:
                if reading is not None:
                    reading.get()  # two rounds at most are in the store
                reading = self.receiver.receive_weights.submit(parts)
        if reading is not None:
            reading.get()
        self.receiver.finish_weights()

    def _sync_over_group(self, needs: list[WeightNeeds]) -> None:
        ticket, *_ = self.sender.offer_weights(needs)
        assert ticket is not None
        sending = self.sender.send_weights_over.submit(ticket)
        receiving = self.receiver.receive_weights_over.submit(ticket)
        # The first failure ends the wait: a rank that is gone leaves the others in a collective.
        DataProtoFuture.wait_all([sending, receiving])
        sending.get()
        receiving.get()


@dataclass(frozen=True)
class PPOGroups(StartedGroups):
    """One view per role; views may share processes.

    `ref` is None if no stage reads `ref_log_prob`, `critic` is None if no stage reads `values`,
    `reward_model` is None unless it is enabled, `turns` is None unless the engines of the policy
    take turns in device memory, and `link` is None unless actor and rollout are in different
    processes. `replicas` has the replicas of the rollout, one if all its ranks are one group.
    `actor_version` returns the version of the actor's weights; None if the worker class of the
    actor has no such method. `added` has the
    groups of added roles by their keys.
    """

    starter: GroupStarter
    actor: roles.ActorGroup
    rollout: roles.GeneratingGroup
    ref: roles.RefGroup | None
    critic: roles.CriticGroup | None
    reward_model: roles.RewardModelGroup | None
    turns: roles.TurnTakingGroup | None
    link: WeightLink | ReplicaLink | None
    replicas: Replicas
    actor_version: Callable[[], int] | None = None
    added: Mapping[str, WorkerGroup] = field(default_factory=dict)

    def lost_alone(self, error: QuadrigaError) -> list[str]:
        """Return the pools that were lost if no other pool needs a checkpoint for that, else [].

        Then no role with a state of its own is lost, and no added role has one that may have
        changed since the beginning of the step.
        """
        lost = self.starter.lost_pools(error)
        uses, saved = {use for pool in lost for use in self.starter.pools[pool]}, set(self.saved)
        return [] if uses & saved or saved - {"actor", CRITIC} else lost

    @contextmanager
    def generating(self, add: Callable[[Mapping[str, float]], None]) -> Iterator[None]:
        """Give the device memory of the policy to the rollout within the block, then back. `add`
        is called with metrics of the memory that each rank has in use before and after."""
        if self.turns is None:
            yield
            return
        for metrics in filter(None, self.turns.rollout_mode()):
            add(metrics)
        yield
        # Not after an error: it ends the run, and a call to a failed rank would hide it.
        for metrics in filter(None, self.turns.trainer_mode()):
            add(metrics)

    @property
    def generator(self) -> roles.GeneratingGroup:
        """The rollout, whose responses must come from the weights that the actor has."""
        if self.actor_version is None:
            return self.rollout
        return VersionedRollout(self.rollout, self.actor_version)

    def sync_weights(self, applying: Applying | None = None) -> dict[str, float]:
        """Copy the actor's weights to the rollout, and check that all of them arrived. `applying`:
        the replicas generate meanwhile (`ReplicaLink.sync`). Return the bytes by path, as metrics.

        Raises:
            WorkerError: names the weights that are missing or differ.
        """
        if self.link is None:
            self.actor.sync_weights()
        elif isinstance(self.link, ReplicaLink):
            self.link.sync(applying)
        else:
            self.link.sync()
        replicas, found = self.replicas, Counter[str]()
        # a worker class without the base classes of the package may have no such method
        if all(hasattr(replica.group, WEIGHT_BYTES) for replica in replicas.working):
            calls = replicas.submit(lambda group: getattr(group, WEIGHT_BYTES).submit())
            for per_rank in replicas.collect(calls):
                for counts in cast("list[Counter[str]]", per_rank):
                    found.update(counts)
        return dict(found)

    @property
    def saved(self) -> dict[str, roles.TrainedGroup | WorkerGroup]:
        """The groups whose ranks have a state that belongs to a checkpoint, by their roles."""
        groups: dict[str, roles.TrainedGroup | WorkerGroup] = {"actor": self.actor}
        if self.critic is not None:
            groups["critic"] = self.critic
        return groups | {k: group for k, group in self.added.items() if has_method(group, k, SAVE)}

    def load(self, resumed: Resumed) -> None:
        """Load actor, critic and added roles, unless they hold the state already.

        Raises:
            CheckpointError: the checkpoint has no state of a role that saves one.
        """
        if resumed.folder is None and resumed.load is None:
            return
        load_roles(resumed, self.saved)
        if self.link is not None:
            self.link.sync()


def load_roles(resumed: Resumed, groups: SavedGroups) -> None:
    """Load the states of groups, by the names of their roles, from a checkpoint or a snapshot.

    Raises:
        CheckpointError: the checkpoint has no state of a role.
    """
    if resumed.load is not None:
        resumed.load(groups)
    if resumed.folder is not None:
        check_states(resumed.folder, groups)
        for key, group in groups.items():
            group.load_checkpoint(str(resumed.folder / key), resumed.state.step)


def gather(pending: Iterable[DataProtoFuture]) -> list[DataProto]:
    """Wait for every future and return the batches in the same order.

    Waits for: the calls behind the futures, which run side by side.
    Unblocked by: their results, or the first failure of any of them, whatever its place.
    """
    futures = list(pending)
    DataProtoFuture.wait_all(futures)
    return [future.get() for future in futures]


def start_groups(
    config: TrainConfig,
    *,
    total_steps: int,
    role_worker_mapping: Mapping[Role, type[Worker]],
    resource_pool_manager: ResourcePoolManager | None,
) -> PPOGroups:
    """Place the roles, start their processes and load their models.

    Roles that are mapped to one pool share the processes of one worker group.

    Raises:
        ConfigError: a worker class or the placement does not fit the settings.
        PlacementError: the nodes cannot hold the pools. Nothing was started.
    """
    backend = open_backend(config.trainer)
    with close_on_error(backend) as groups:
        manager = resource_pool_manager or pool_manager(config, backend)
        pools = uses_by_pool(config, manager)
        classes = worker_classes(config, workers_of(pools), total_steps, role_worker_mapping)
        manager.create_resource_pool(backend)
        placed = {pool: manager.resource_pool_dict[pool] for pool in pools}
        return GroupStarter(config, backend, pools, placed, classes, groups).start(pools)


@dataclass(eq=False)
class GroupStarter:
    """Starts the roles of pools: of all at the beginning of a run, of some after a loss.

    Args:
        pools: name of a pool → uses of its processes. Roles of one pool are built in the same
            processes, so they share the device's memory and their calls take turns. Roles of
            different pools run side by side.
        placed: the pools by name.
        classes: worker key → class with its arguments.
        groups: receives every group that is started.
    """

    config: TrainConfig
    backend: Backend
    pools: Mapping[str, Sequence[str]]
    placed: Mapping[str, ResourcePool]
    classes: Mapping[str, ClassWithInitArgs]
    groups: list[WorkerGroup]
    views: dict[str, WorkerGroup] = field(default_factory=dict)
    replicas: Replicas | None = None

    def start(self, names: Iterable[str]) -> PPOGroups:
        """Start the processes of pools, load their models, and return the groups of the run."""
        config, started = self.config, set[str]()
        for pool in names:
            uses, place = self.pools[pool], self.placed[pool]
            members = {key: self.classes[key] for key in worker_keys(uses)}
            started |= members.keys()
            if are_replicas(config, uses):
                rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
                self.replicas = start_replicas(
                    rollout, self.backend, place, members, self.groups, trainer
                )
                continue
            cls = self.backend.colocate(members)
            group = start_group(self.backend, place, cls, self.groups, config.trainer)
            self.views.update(group.spawn(members))
        workers = workers_of(self.pools)
        for key in start_order(workers, added_roles(config)):
            if key not in started:
                continue
            if key in self.views and has_method(self.views[key], key, INIT):
                self.views[key].init_model()
            elif self.replicas is not None and key not in self.views:
                self.replicas.init_model()
        return _ppo_groups(self)

    def lost_pools(self, error: QuadrigaError) -> list[str]:
        """Return the pools with a rank that has ended, and that of the role which `error` names.

        A pool of replicas is lost if no replica is left.
        """
        lost = []
        for pool, uses in self.pools.items():
            groups = self._groups_of(pool)
            named = any(getattr(error, "role", None) in group.roles for group in groups)
            ended = [bool(self.backend.dead(group._ranks.handles)) for group in groups]
            gone = all(ended) if are_replicas(self.config, uses) else any(ended)
            if named or gone or not groups:  # none: the pool was being started again
                lost.append(pool)
        return lost

    def _groups_of(self, pool: str) -> list[WorkerGroup]:
        keys = worker_keys(self.pools[pool])
        return [group for group in self.groups if group.roles[0] in keys]

    def end(self, pool: str) -> None:
        """End all processes of a pool, and release its resources."""
        for group in self._groups_of(pool):
            close_rollouts(group)
            group.shutdown()
            self.groups.remove(group)
        self.placed[pool].release()


def _ppo_groups(starter: GroupStarter) -> PPOGroups:
    """Return the groups of a run, with equal weights.

    Uses of the policy that share processes are one view. Replicas are in place of the view of the
    rollout.
    """
    views, replicas = starter.views, starter.replicas
    workers = workers_of(starter.pools)
    view_of = {u: views[key] for key, uses in workers.items() if key in views for u in uses}
    config, actor = starter.config, view_of["actor"]
    settings = config.actor_rollout_ref.rollout
    rollout: roles.GeneratingGroup
    link: WeightLink | ReplicaLink | None = None
    if replicas is not None:
        rollout = ReplicatedRollout(replicas, settings)
        link = ReplicaLink(actor, replicas)
    else:
        rollout = view_of["rollout"]
        if actor is not rollout:
            joined = settings.weight_transport == "collective"
            link = WeightLink(actor, view_of["rollout"], joined=joined)
    if link is not None:
        link.sync()
    return PPOGroups(
        backend=starter.backend, groups=starter.groups, starter=starter, actor=actor,
        rollout=rollout, ref=view_of["ref"] if reads_ref_log_prob(config) else None,
        critic=view_of.get(CRITIC),
        reward_model=view_of[REWARD_MODEL] if has_reward_model(config) else None,
        turns=actor if settings.take_turns else None, link=link,
        replicas=replicas or Replicas(lambda _: view_of["rollout"], 1),
        actor_version=getattr(actor, ACTOR_VERSION, None),
        added={added.key: view_of[added.key] for added in added_roles(config)},
    )  # fmt: skip


def open_backend(trainer: RunConfig) -> Backend:
    """Return the backend that the settings name, connected. Start Ray unless a cluster runs."""
    backend = get_backend(trainer.backend)
    with unchanged_handlers():
        backend.start(num_cpus=trainer.num_cpus)
    return backend


def one_pool(trainer: RunConfig, backend: Backend) -> ResourcePool:
    """Return a pool of `nnodes × n_gpus_per_node` ranks.

    Raises:
        PlacementError: the nodes cannot hold them.
    """
    ranks, gpu = [trainer.n_gpus_per_node] * trainer.nnodes, use_gpu(trainer.device)
    pool = backend.resource_pool(ranks, name_prefix="global", use_gpu=gpu, max_colocate_count=1)
    backend.check_placement([pool])
    return pool


def start_group(
    backend: Backend,
    pool: ResourcePool,
    worker: ClassWithInitArgs,
    groups: list[WorkerGroup],
    trainer: RunConfig,
) -> WorkerGroup:
    """Start a worker group that is watched, and add it to `groups`."""
    options = profiler_options(trainer)
    group: WorkerGroup = backend.worker_group(
        pool, worker, timeout=trainer.call_timeout_s, **options
    )
    groups.append(group)
    group.start_worker_aliveness_check(ALIVENESS_CHECK_S)
    return group


@dataclass(frozen=True)
class VersionedRollout:
    """The rollout of a run: what it generates comes from the weights that the actor has.

    Args:
        rollout: the worker group that generates.
        actor_version: returns the version of the actor's weights.
    """

    rollout: roles.GeneratingGroup
    actor_version: Callable[[], int]

    @property
    def world_size(self) -> int:
        """The number of ranks of the rollout."""
        return self.rollout.world_size

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Call the method of the group, and compare versions.

        Raises:
            RolloutOutputError: a row has another version than the actor. Attributes: `row` (the
                first one), `version`.
        """
        generated, expected = self.rollout.generate_sequences(prompts), self.actor_version()
        found_B = generated.batch[fields.WEIGHT_VERSION]
        wrong = (found_B != expected).nonzero().flatten().tolist()
        if wrong:
            versions = sorted(set(found_B[wrong].tolist()))
            raise RolloutOutputError(
                f"{len(wrong)} of {len(found_B)} responses, row {wrong[0]} first, were sampled by "
                f"weights of version {', '.join(map(str, versions))}, but the actor has version "
                f"{expected}; the last weight sync did not reach every rank of the rollout, or "
                "another program updates its engine",
                fault="weight version",
                row=wrong[0],
                version=versions[0],
            )
        return generated
