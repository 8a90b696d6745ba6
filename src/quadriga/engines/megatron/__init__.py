"""The training engine over Megatron-core: tensor, pipeline, context, expert, data parallel.

- `families`: which architectures it computes, how their weights are stored, and which settings it
  follows and refuses.
- `ranks`: the process groups, and which part of the model a rank has.
- `model`: the layers of a rank, as a function of micro-batches.
- `weights`: a model folder; the slices of a rank, whole tensors, blocks of a checkpoint.
- `engine`: the `TrainEngine`, and the step of its optimizer over all meshes.
- `memory`: the device memory of the engine, known before it is built.

Only this package imports Megatron-core. Importing `families` needs neither it nor torch.
"""
