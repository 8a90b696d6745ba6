"""Two roles in one process: called one by one, and by a method of a fused class that uses both.

Run: python examples/controller/fused_roles.py [ray]
"""

from __future__ import annotations

import sys

from quadriga.backends import get_backend
from quadriga.single_controller import (
    Dispatch,
    Worker,
    create_colocated_worker_raw_cls,
    register,
)


class Actor(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def act(self, x: int) -> int:
        return x + self.rank


class Critic(Worker):
    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value(self, x: int) -> int:
        return self.scale * x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value_of_own_actor(self, x: int) -> int:
        """Call the other role of this process."""
        return self.value(self.actor.act(x))


def main(backend_name: str = "local") -> dict[str, list[int]]:
    backend = get_backend(backend_name)
    backend.start(num_cpus=2)
    roles = {
        "actor": backend.class_with_args(Actor),
        "critic": backend.class_with_args(Critic, 10),
    }
    pool = backend.resource_pool([2], use_gpu=False)
    both = backend.worker_group(pool, backend.colocate(roles))
    views = both.spawn(roles)  # one view for each role, on the same processes
    seen = {
        "by the name of the group": both.actor_act(1),
        "by the view of a role": views["critic"].value_of_own_actor(1),
    }
    both.shutdown()

    fused_class = create_colocated_worker_raw_cls(roles)

    class Pair(fused_class):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def act_and_value(self, x: int) -> int:
            return self.critic.value(self.actor.act(x))

    group = backend.worker_group(pool, backend.class_with_args(Pair))
    group.fuse(roles)
    seen |= {
        "both in one method": group.act_and_value(1),
        "one role alone": group.actor.act(1),
        "a role that calls its sibling": group.critic.value_of_own_actor(1),
    }
    for what, values in seen.items():
        print(f"{what}: {values}")
    group.shutdown()
    backend.shutdown()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
