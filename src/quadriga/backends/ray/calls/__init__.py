"""How a call reaches the ranks, and how its results come back.

`submission` encodes the calls and starts the actor tasks, `pickling` encodes calls with objects or
code of the user, `waiting` and `slices` wait for their results, `splitting` has
one rank split a future for many, `referenced` is the future of a reference that is an argument,
`values` sends calls for programs that call Ray themselves, `store` keeps large fields in Ray's
object store, and `row_store` has rows of other nodes cut out there. A rank's process imports
`store` and `row_store`, and `referenced` with the first such argument.

May import: `cluster`, `health`, `process.memory`, `process.user_code`, and the packages below
`backends`.
"""
