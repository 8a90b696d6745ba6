"""The device memory of a run, known before any process starts.

- `machine`: how much memory a rank, or the ranks of a node, can use.
- `plan`: what each role needs on a rank.
- `phases`: how much of it exists at once in each phase of a step.
- `resharding`: what ranks receive and hold when a Megatron actor becomes a rollout.
- `host`: the memory of the host: loading, and what is kept there.
- `report`: the plan as a table, and the refusal of a run that does not fit.
- `remedies`: what to change if it does not fit.
- `sft`, `rm`: plan and refusal of a run of supervised fine-tuning, and of one on pairs.
- `one_engine`: what these two have in common.
- `generation`: plan of the commands that only generate.

May import what `trainer` may import.
"""
