"""The weights of a model folder.

- `reader`: read parts of the tensors in the files.
- `names`: which tensor belongs to which parameter.
- `finite`: find weights that are NaN or infinite.
"""
