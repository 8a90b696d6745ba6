"""Where processes run: pools of places on nodes, and what each process asks Ray for.

`pool` holds the places, `placement_groups` makes Ray's placement groups for them, and
`class_with_args` is a worker class with its arguments and the options of its actor.

May import: `cluster`, `process.start`, and the packages below `backends`.
"""
