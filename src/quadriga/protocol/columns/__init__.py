"""The fields of a batch, local or remote.

- `column.py`: `RemoteColumn`, and operations on sets of columns.
- `remote_batch.py`: `RemoteBatch` and `RemoteArrays`, the two halves of a batch with remote fields.
- `contents.py`: the contents of a batch: taking rows, selecting, renaming, concatenating, checking.

Imports `values` only.
"""
