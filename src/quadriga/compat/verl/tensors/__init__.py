"""verl's functions on tensors and batches.

balancing         sequence-length balancing       tensordicts     TensorDicts
serialization     tensors as bytes                model           masks, sizes of models
torch_functional  masked statistics, padding
"""
