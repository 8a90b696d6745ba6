"""The training engine over Megatron-core: tensor, pipeline, context, expert, data parallel.

- `settings`: whether Megatron-core can be used, which settings it follows and which it refuses.
- `families`: which architectures it computes, and how their weights are stored.
- `ranks`: the process groups, and which part of the model a rank has.
- `model`: the layers of a rank, as a function of micro-batches.
- `weights`: a model folder; the slices of a rank, whole tensors, blocks of a checkpoint.
- `engine`: the `TrainEngine`, and the step of its optimizer over all meshes.
- `memory`: the device memory of the engine, known before it is built.

Only this package imports Megatron-core. Importing `families` and `settings` needs neither it nor
torch.
"""
