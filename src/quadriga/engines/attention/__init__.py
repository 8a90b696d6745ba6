"""Attention over packed rows, by the kernel that fits the device and the model.

- `packed`: what transformers calls in each attention layer, also where ranks have the tokens in
  parts.
- `kernels`: the masks of layers, and the three kernels, each with the arrangement of rows that it
  reads.
- `choice`: which kernel computes which call, why another one cannot, and a comparison of kernels on
  the device on which they will run.
"""
