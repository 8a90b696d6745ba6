"""The fields of a batch, local or remote.

- `column.py`: `RemoteColumn`, and operations on sets of columns.
- `cut_rows.py`: rows of remote shards are fetched without the rest of their shards.
- `lost_fields.py`: the error that names a lost field.
- `remote_batch.py`: `RemoteBatch` and `RemoteArrays`, the two halves of a batch with remote fields.
- `contents.py`: the contents of a batch: taking rows, selecting, renaming, concatenating, checking.

Imports `values` only.
"""
