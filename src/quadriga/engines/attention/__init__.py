"""Attention over packed rows, by the kernel that fits the device and the model.

- `packed`: what transformers calls in each attention layer.
- `masks`: which tokens of its own row a token attends to.
- `choice`: which kernel computes which call, and why another one cannot.
- `blocks`, `varlen`, `flex`: the kernels, each with the arrangement of rows that it reads.
- `gather`: read packed tokens by index, with exact sums of their gradients.
- `check`: compare a kernel with `blocks` on the device on which it will run.
"""
