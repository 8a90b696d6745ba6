"""Which part of each checkpoint weight a rank stores. Nothing here uses torch.

- `boxes`: rectangular parts of a tensor.
- `layout`: where each element of each checkpoint weight is stored.
- `parallel_layouts`: the layouts of engines: replicated, FSDP, tensor, pipeline, expert parallel.

The Megatron engine loads, saves and streams its weights by these layouts, and a weight sync is
planned from them. May import `errors`.
"""
