"""Generation with vLLM in the process of the rank.

- `options`: vLLM before it is started: its settings, and whether it is installed.
- `weights`: vLLM's parameters and adapters by checkpoint name: write, read back, compare.
- `engine`: `VLLMRollout`, the `RolloutEngine`: start and end of vLLM, its calls as requests, and
  the state of the process outside of them.

Only these modules import vllm, within functions, because it is installed in an environment of its
own (scripts/engines.sh).
"""
