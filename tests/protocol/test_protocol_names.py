"""Public names load when they are first used; the package does not import Ray."""

from processes import run_python
from quadriga.protocol import fields


def test_importing_the_package_loads_nothing_heavy_and_using_it_no_ray():
    script = (
        "import sys, quadriga.protocol as p; assert 'torch' not in sys.modules; "
        "p.DataProto; import quadriga.protocol.boundary; assert 'ray' not in sys.modules"
    )
    run_python("-c", script, timeout=60)


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
