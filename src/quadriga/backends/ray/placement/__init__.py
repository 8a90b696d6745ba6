"""Where processes run: pools of bundles on nodes, and the resources of each process.

`pool` holds the bundles, `placement_groups` makes Ray's placement groups for them, and
`class_with_args` is a worker class with its arguments and the options of its actor.

May import: `cluster`, `process.start`, and the packages below `backends`.
"""
