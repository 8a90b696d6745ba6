"""Public names load when they are first used; the package does not import Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quadriga.protocol as protocol
from quadriga.protocol import fields

PUBLIC = [
    *("DataProto", "DataProtoItem", "DataProtoFuture", "DataProtoConfig", "parallel_put"),
    *("pad_dataproto_to_divisor", "unpad_dataproto", "fold_batch_dim", "unfold_batch_dim"),
    *("union_tensor_dict", "union_numpy_dict", "collate_fn"),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    assert getattr(protocol, name).__doc__ and name in dir(protocol)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nope"):
        protocol.nope  # noqa: B018


def test_importing_the_package_loads_nothing_heavy_and_using_it_no_ray():
    script = (
        "import sys, quadriga.protocol as p; assert 'torch' not in sys.modules; "
        "p.DataProto; import quadriga.protocol.boundary; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_file_of_the_package_imports_ray():
    for file in Path(protocol.__file__).parent.rglob("*.py"):
        assert "import ray" not in file.read_text() and "from ray" not in file.read_text()


def test_every_field_has_one_name_shape_and_writer():
    constants = {
        value
        for name, value in vars(fields).items()
        if name[0].isupper() and isinstance(value, str)
    }
    assert constants == set(fields.BY_NAME)
    assert len(fields.BY_NAME) == len(fields.FIELDS)
    for field in fields.BY_NAME.values():
        assert field.shape.startswith("[B") and field.unit and field.written_by
