"""Generation with vLLM in the process of the rank.

- `options`: the settings of `rollout.options`, and whether vLLM is installed.
- `isolation`: what vLLM changes in the process is undone outside its calls.
- `start`: from settings to a running vLLM engine, and its end.
- `weights`: vLLM's parameters by checkpoint name: write, read back, compare with the files.
- `adapters`: the adapter of the model, beside its weights.
- `requests`: one call of `generate` or `score` as requests of vLLM.
- `engine`: `VLLMRollout`, the `RolloutEngine`.

Only these modules import vllm, within functions, because it is installed in an environment of its
own (scripts/engines.sh).
"""
