"""One field of a batch: its rows, its encoding, its storage.

- `field_spec.py`: the description of a field; types of values and payloads.
- `storage.py`: handles, stores, the writers of values, traffic counters.
- `row_index.py`: the rows that an index of the user selects.
- `rows.py`: selections of rows, and in which shards the rows of a batch are stored.
- `cut.py`: rows of a payload, in the process that stores it.
- `stored_once.py`: a local value is stored once while it is unchanged.
- `jagged.py`, `operations.py`: operations on one local value.
- `encode.py`, `decode.py`, `buffer_pool.py`: a value as payload, and back; memory for large values.

Imports nothing of `protocol` outside this folder.
"""
