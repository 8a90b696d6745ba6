"""The device memory of a training engine on one rank, known before a weight is loaded.

- `passes`: activations of a micro-batch, counted on the meta device.
- `states`: parameters, gradients and the buffers of FSDP, by arithmetic.
- `traffic`: what a rank sends for FSDP.
- `optimizer_step`: the optimizer's state, and what its step allocates.
"""
