"""Devices, process groups and meshes; packed batches; balanced partitions.

- `device`: the device, dtype and collective library of a rank.
- `distributed`: join the process group, build the device mesh, reduce numbers over ranks.
- `packing`, `attention_blocks`: from padded rows to packed tokens, which of them make up each row,
  and the blocks of rows for attention with a mask.
- `aligned_rows`: rows with their padding at the end, for models that cannot be packed.
- `targets`: the response tokens whose outputs are needed, for both forms of rows.
- `balancing`, `initial_partitions`, `exchanges`: partitions and micro-batches of about equal token
  counts or costs.
- `costs`: what sequences cost, linear and quadratic in their tokens.
- `layouts`: which part of each checkpoint weight a rank stores.
- `group_partitions`: partitions of whole prompt groups.
- `model_parallel`: ranks that compute the same rows together.
- `node_memory`: weight files that the ranks of a node read once and share.

May import `errors`, `config`, `protocol`, `algorithms` and `observability`.
"""
