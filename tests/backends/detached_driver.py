"""A driver program: `start` leaves a detached group behind, `take` finds it and ends it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import Adder

from quadriga.backends.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ensure_ray

what, address = sys.argv[1:]
session = ensure_ray(address=address, namespace="quadriga-test")
cls = RayClassWithInitArgs(Adder, 1)
if what == "start":
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, detached=True)
    group = RayWorkerGroup(pool, cls, name_prefix="lasting_", detached=True)
    print(sum(group.add(0)))
else:
    names = ["lasting_Adder_0:1", "lasting_Adder_0:0"]
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=cls)
    print(*group.add(10))
    group.shutdown()
session.close()
