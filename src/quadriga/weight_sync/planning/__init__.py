"""Who sends what to whom in a weight sync, computed from two layouts. Nothing here uses torch.

- `boxes`: rectangular parts of a tensor.
- `layout`: where each element of each checkpoint weight is stored.
- `parallel_layouts`: the layouts of engines: replicated, FSDP, tensor, pipeline, expert parallel.
- `plan`: the transfers between two layouts, their bytes, and the memory that they need.
- `grouping`: HybridFlow's generation groups without redundancy, and its formulas.

May import `errors`.
"""
