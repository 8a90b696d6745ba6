"""SGLang as a rollout engine. SGLang runs in processes of its own, never in the rank.

    rank ── guard ── host ── scheduler, detokenizer (SGLang's)
      │                │
      └── transport ───┘   frames over a pipe (the engine), or HTTP on loopback (the server)

`sglang.Engine` ends the process that it lives in when one of its own processes fails, and ends all
children of that process when it is closed. In a rank this would end training, so the rank starts a
host. The guard ends host and schedulers when the rank ends, even if it was killed.

- `engine`: `SGLangRollout`, the `RolloutEngine`.
- `options`: what `rollout.options` may hold.
- `sampling`: requests and answers of SGLang.
- `weights`: new weights in buckets, and what the engine holds.
- `transports`: how a request reaches SGLang: `PipeTransport`, `HTTPTransport`.
- `start`, `process`: start and end host and guard. `processes`: what runs in them.
- `client`: requests and weights over restarts.
- `untested`: a comparison with transformers for models that were not tested with SGLang.
- `declared`: what an SGLang with given options can do.

Importing this file imports neither torch nor SGLang.
"""
