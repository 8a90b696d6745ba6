"""Attention over packed rows, by the kernel that fits the device and the model.

- `packed`: what transformers calls in each attention layer.
- `masks`: which tokens of its own row a token attends to.
- `choice`: which kernel computes which call, why another one cannot, and a comparison of kernels on
  the device on which they will run.
- `kernels`, `flex`: the kernels, each with the arrangement of rows that it reads.
"""
