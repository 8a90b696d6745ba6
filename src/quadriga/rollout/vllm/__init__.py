"""Generation with vLLM in the process of the rank.

- `options`: vLLM before it is started: its settings, and whether it is installed.
- `start`: from settings to a running vLLM engine.
- `weights`: vLLM's parameters and adapters by checkpoint name: write, read back, compare.
- `engine`: `VLLMRollout`, the `RolloutEngine`, its calls as requests of vLLM, and the state of the
  process outside of them.

Only these modules import vllm, within functions, because it is installed in an environment of its
own (scripts/engines.sh).
"""
