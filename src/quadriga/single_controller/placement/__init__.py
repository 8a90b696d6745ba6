"""Where ranks run, as arithmetic: no process is started here.

- `resource_pool`: how many processes run on each node; split and merge pools.
- `feasibility`: whether several pools fit on the nodes of a cluster at the same time.
- `rank_layout`: the coordinates of a rank in a tp × cp × dp × pp layout.
- `devices`: which accelerators a process may use.

May import `quadriga.errors` only.
"""
