"""The format of batch files: safetensors for bytes, JSON for everything else, no pickle.

A batch file is a safetensors file, so every safetensors reader opens it. Its entries, in the order
of their bytes:

    structure   U8    JSON: the fields, their types, and all values that are not bytes
    0 x, 1 y    any   the tensors and arrays of the fields
    nested      U8    bytes of tensors, arrays, images and byte strings within rows and `meta_info`
    sha256      U8    SHA-256 of everything before it, the header included

- `container.py`: entries, digest, atomic writing, the checks before anything is allocated.
- `dtypes.py`: the dtypes that a file can hold. `limits.py`: limits, checks of JSON values.
- `encode_values.py`, `decode_values.py`: values as JSON and bytes, and back.
- `plain_values.py`: numbers, dates and containers of Python. `images.py`: images of Pillow.

Nothing in a file names code: a tag of the JSON selects a function in a table of this package.
Imports `values` only.
"""
