"""What a batch can do besides selecting and concatenating rows, as functions of its `Contents`.

- `construct.py`: from and to dicts and `TensorDict`.
- `join.py`: union. `split.py`: columns into rows, mini-batches.
- `describe.py`: tables of the fields. `disk.py`: files.

Imports `values`, `columns`, `batch_file` and `containers`; `DataProto` calls these functions.
"""
