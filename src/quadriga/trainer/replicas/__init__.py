"""A rollout of replicas: worker groups with an engine each, which are asked independently.

    rows of a call ──► prompt groups ──► requests ──► replica 0, 1, …
                          ▲                              │
                          └──── a replica is lost ◄──────┴──► answers ──► rows in their order

- `routing`: which replica has computed the beginning of a prompt before.
- `work`: the rows of one call: which wait, which are asked, which are answered.
- `replica`: the worker groups: starting them, losing one, starting it again.
- `rollout`: `ReplicatedRollout`, which generates with them.
- `weights`: `ReplicaLink`, the weight sync to them.
"""
