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
- `process`: starts and ends host and guard; `frames`: messages over the pipe.
- `guard`, `host`, `readback`: run in the processes below the rank. Only these import SGLang.

Importing this file imports neither torch nor SGLang.
"""
