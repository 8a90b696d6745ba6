"""The training engine over Megatron-core: tensor, pipeline, context, expert, data parallel.

- `availability`: whether Megatron-core is installed, and computes on this device.
- `families`: which architectures it computes, and how their weights are stored.
- `settings`: the settings of an engine that it follows and those that it refuses.
- `ranks`: the process groups, and which part of the model a rank has.
- `layers`: the modules that replace Megatron-core's: norm, attention over packed rows.
- `model`: a stage of the model, as a function of micro-batches.
- `weights`: read the slices of a rank from a folder; whole tensors, blocks of a checkpoint.
- `optimizer`: the step over all meshes.
- `engine`: the `TrainEngine`.

Only this package imports Megatron-core. Importing `availability`, `families` and `settings` needs
neither it nor torch.
"""
