"""The table of fields has an entry for each name."""

from quadriga.protocol import fields


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
