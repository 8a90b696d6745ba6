"""Generation that goes on while the policy is trained, with a bound on how old a response may be.

    staleness.py    `StalenessBound`: how many prompt groups may be on their way, and which of the
                    complete ones a step may train
    queue.py        `PromptQueue`: the prompt groups on their way, each in one state
    generation.py   `SlicedGeneration`: generates the responses of the groups, slice by slice
    episodes.py     rows that wait for their environments
    playing.py      plays the episodes of a batch; their rewards as its scores
    replicas.py     worker groups of the rollout that fail and start again one by one
    saved.py        the groups on their way in a checkpoint
    timeline.py     when a run was at work, from its record; a file for Perfetto
    simulation.py   a run in virtual time, for `quadriga plan --async` and benchmarks/streams.py

The trainer's part, which draws prompts and scores responses, is `trainer.streaming`. May import
every package below `streams` in docs/architecture.md.
"""
