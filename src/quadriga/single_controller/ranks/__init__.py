"""What runs in the process of a rank, for every backend.

- `environment`: the environment variables of a rank, its reserved port, modules to import first.
- `worker`: `Worker`, the base class of the user's classes.
- `class_with_args`: a worker class with its arguments; several roles in one process.
- `call_order`: start calls in the order in which they were sent.
- `streams`: a generator method that runs in a rank.
- `rank_host`: holds the workers of a rank and runs calls on them.

May import `quadriga.errors`, `single_controller.call`, `.dispatch` and `.placement`.
"""
