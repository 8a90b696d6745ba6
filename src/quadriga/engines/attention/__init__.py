"""Attention over packed rows, by the kernel that fits the device and the model.

- `kernels`: the masks of layers, the three kernels, each with the arrangement of rows that it
  reads, and what transformers calls in each attention layer.
- `choice`: which kernel computes which call, why another one cannot, and a comparison of kernels on
  the device on which they will run.
"""
