"""The weights of a model folder.

- `reader`: read parts of the tensors in the files.
- `names`: which tensor belongs to which parameter.
- `joined`: parameters that are made of several tensors.
- `finite`: find weights that are NaN or infinite.
"""
