"""Models without numbers: what a forward and a backward pass allocate, counted on the meta device.

- `allocations`: count the bytes of the tensors that operators make.
- `kernels`: operators that have no form on the meta device, or another one than on a device.
- `model`: a model of a config.json on the meta device.
"""
