"""A rollout of replicas: worker groups with an engine each, which are asked independently.

    rows of a call ──► prompt groups ──► requests ──► replica 0, 1, …
                          ▲                              │
                          └──── a replica is lost ◄──────┴──► answers ──► rows in their order

- `replica`: the worker groups: starting them, losing one, starting it again, the weight sync.
- `rollout`: `ReplicatedRollout`, which generates with them.
"""
