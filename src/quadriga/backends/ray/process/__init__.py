"""The process of one rank: how it is started, what it runs, and how it uses memory.

`rank_process` is the actor class, `start` starts the actors of a group, `memory` sets the C heap
and the garbage collector, `user_code` makes the user's files known to the pickler,
`profiling` runs ranks under a profiler, `register_center` is an actor that knows where the ranks of
a group are, and `attach` asks ranks that exist for their classes.

May import: `cluster`, `calls`, and the packages below `backends`. A rank's process loads this
folder, so `rank_process` imports neither torch nor numpy before the user's variables are set.
"""
