"""Devices, process groups and meshes; packed batches; balanced partitions.

- `device`: the device, dtype and collective library of a rank.
- `distributed`: join the process group, build the device mesh, reduce numbers over ranks.
- `packing`, `attention_blocks`: from padded rows to packed or aligned rows, and the blocks of
  packed tokens for attention with a mask.
- `balancing`: partitions and micro-batches of about equal token counts or costs.
- `costs`: what sequences cost, linear and quadratic in their tokens.
- `layouts`: which part of each checkpoint weight a rank stores.
- `model_ranks`, `token_exchange`: ranks that compute the same rows together, and their collectives.
- `control_groups`: the CPUs and the memory that this process may use.
- `node_memory`: weight files that the ranks of a node read once and share.

May import `errors`, `config`, `protocol`, `algorithms` and `observability`.
"""
