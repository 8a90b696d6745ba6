"""The order in which the workers of a run load their models.

Without declarations: critic, reference, reward model, added roles, a rollout in other processes,
and the actor last, because then the memory that the others need is known. A worker with several
uses has the place of its last one. A worker that must come earlier than another one comes directly
before it:

    roles       critic, actor_rollout, judge (starts_before critic), mirror (starts_after actor)
    order       judge, critic, actor_rollout, mirror
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quadriga.errors import ConfigError
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.registry import AddedRole, is_built_in

_ORDER = ("critic", "ref", "reward_model", "", "rollout", "actor")
"""The uses in the order without declarations; "" stands for the other roles of users."""
_USES: dict[Role, tuple[str, ...]] = {
    Role.Actor: ("actor",),
    Role.Rollout: ("rollout",),
    Role.ActorRollout: ("actor", "rollout"),
    Role.ActorRolloutRef: ("actor", "rollout", "ref"),
    Role.RefPolicy: ("ref",),
    Role.Critic: ("critic",),
}


def start_order(workers: Mapping[str, Sequence[str]], added: Sequence[AddedRole]) -> list[str]:
    """Return the keys of the workers in the order in which they load their models.

    Args:
        workers: worker key → its uses.
        added: the added roles of the run.

    Raises:
        ConfigError: the declarations have a cycle, or name a role that is not registered.
    """
    earlier: dict[str, set[str]] = {key: set() for key in workers}
    for role in added:
        earlier[role.key] |= _workers_of(role, role.starts_after, workers, added)
        for other in _workers_of(role, role.starts_before, workers, added):
            earlier[other].add(role.key)
    own, numbers = {role.key for role in added}, list(workers)

    def place(key: str, after: tuple[str, ...] = ()) -> int:
        if key in after:
            raise ConfigError(_cycle([*after[after.index(key) :], key][::-1], workers))
        before = [place(other, (*after, key)) for other in earlier[key]]
        found = max(_ORDER.index(use if use in _ORDER else "") for use in workers[key])
        # An added role comes after its predecessors; it must not pull the actor to the front.
        return max([found, *before]) if key in own else found

    ranked = sorted(workers, key=lambda key: (place(key), numbers.index(key)))
    order: dict[str, None] = {}

    def append(key: str) -> None:
        for other in sorted(earlier[key], key=ranked.index):
            append(other)
        order.setdefault(key)

    for key in ranked:
        append(key)
    return list(order)


def _workers_of(
    role: AddedRole,
    others: Sequence[Role],
    workers: Mapping[str, Sequence[str]],
    added: Sequence[AddedRole],
) -> set[str]:
    """Return the workers of the run that have a use of these roles."""
    known = {one.role for one in added}
    for other in others:
        if not is_built_in(other) and other != Role.RewardModel and other not in known:
            raise ConfigError(
                f"role {role.key} is to start before or after role {other}, which is not part of "
                "the run; register it with register_role, or name another role"
            )
    uses = {use for other in others for use in _USES.get(other, (other.key,))}
    return {key for key, own in workers.items() if uses & set(own)}


def _cycle(keys: Sequence[str], workers: Mapping[str, Sequence[str]]) -> str:
    shared = [key for key in dict.fromkeys(keys) if len(workers[key]) > 1]
    notes = [f"{key} is one worker with {', '.join(workers[key])}" for key in shared]
    return (
        f"the start order of the roles has a cycle: {' before '.join(keys)}; change starts_after "
        f"or starts_before of one of them{''.join(f' ({note})' for note in notes)}"
    )
