"""SGLang as a rollout engine. SGLang runs in processes of its own, never in the rank.

    rank ── host ── scheduler, detokenizer (SGLang's)
      │       │
      └───────┘   frames over a pipe; or HTTP to a server that runs already

`sglang.Engine` ends the process that it lives in when one of its own processes fails, and ends all
children of that process when it is closed. In a rank this would end training, so the rank starts a
host. The host ends itself and the schedulers when the rank ends, even if it was killed.

- `options`: SGLang before it is started: `rollout.options`, and what it can do with them.
- `engine`: `SGLangRollout`, the `RolloutEngine`; requests and answers.
- `client`: start SGLang, and how a request reaches it.
- `weights`: new weights in buckets, and what SGLang holds.
- `host`: what runs in the process of the host. Only this imports SGLang.

Importing this file imports neither torch nor SGLang.
"""
