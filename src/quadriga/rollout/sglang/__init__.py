"""SGLang as a rollout engine. SGLang runs in processes of its own, never in the rank.

    rank ── guard ── host ── scheduler, detokenizer (SGLang's)
      │                │
      └── transport ───┘   frames over a pipe; or HTTP to a server that runs already

`sglang.Engine` ends the process that it lives in when one of its own processes fails, and ends all
children of that process when it is closed. In a rank this would end training, so the rank starts a
host. The guard ends host and schedulers when the rank ends, even if it was killed.

- `options`: SGLang before it is started: `rollout.options`, and what it can do with them.
- `engine`: `SGLangRollout`, the `RolloutEngine`.
- `client`: start SGLang; requests, weights, pauses and memory over its restarts.
- `requests`: requests and answers of SGLang. `weights`: new weights in buckets, and what it holds.
- `transports`: the processes, and how a request reaches SGLang.
- `host`, `guard`, `scheduler`: what runs in the processes. Only these import SGLang.

Importing this file imports neither torch nor SGLang.
"""
