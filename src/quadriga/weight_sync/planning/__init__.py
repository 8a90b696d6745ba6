"""Who sends what to whom in a weight sync, computed from two layouts. Nothing here uses torch.

- `plan`: the transfers between two layouts, their bytes, and the memory that they need.
- `grouping`: HybridFlow's generation groups without redundancy, and its formulas.

May import `errors` and `parallel.layouts`.
"""
