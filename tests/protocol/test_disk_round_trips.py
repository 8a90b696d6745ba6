"""A batch that is loaded from a file equals the one that was saved, bit for bit."""

from __future__ import annotations

import datetime
import enum
import io
import zoneinfo
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from disk_values import VALUES, identical, one_of_each, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from protocol_cases import ARRAYS, TENSORS
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto
from quadriga.protocol.values.operations import object_array

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of hypothesis and torch
MANY = settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
ONE_OF_EACH = one_of_each()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file that is not flushed to disk, so that hundreds of examples take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda handle: None)
        yield tmp_path_factory.mktemp("disk") / "batch"


def loaded(data: DataProto, path) -> DataProto:
    data.save_to_disk(path)
    return DataProto.load_from_disk(path)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_value_is_loaded_identical(name, path):
    """As a setting, in a row, within containers; a field of each that can be one."""
    value = ONE_OF_EACH[name]
    rows = object_array([value, [value], {"k": (value,)}])
    back = loaded(DataProto.from_dict(None, {"o": rows}, {"m": value, "n": [value]}), path)
    assert identical(back.non_tensor_batch["o"], rows)
    assert identical(back.meta_info, {"m": value, "n": [value]})


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_loaded_identical(name, path):
    data = DataProto.from_dict({"x": TENSORS[name], "y": torch.arange(4)})
    assert identical(loaded(data, path).batch, data.batch)


@pytest.mark.parametrize("name", sorted(set(ARRAYS) - {"script classes"}))
def test_an_array_is_loaded_identical(name, path):
    data = DataProto.from_dict(non_tensors={"x": ARRAYS[name], "a": ARRAYS["strings"]})
    assert identical(loaded(data, path).non_tensor_batch, data.non_tensor_batch)


@pytest.mark.parametrize("array", [
    np.array(["2026-01-02", "NaT"], "M8[D]"), np.array([b"a", b"\0b"]), np.zeros(2, "V5"),
    np.array([1 + 2j], ">c16"), np.empty((2, 0, 3), "<U4"), np.array([True, False]),
    np.array([], dtype=object), np.empty((2, 0), dtype=object), np.arange(3, dtype="m8[25s]"),
], ids=repr)  # fmt: skip
def test_arrays_of_other_dtypes(array, path):
    data = DataProto.from_dict(non_tensors={"x": array})
    back = loaded(data, path).non_tensor_batch["x"]
    assert identical(back, array) and back.flags.writeable


@MANY
@given(st.lists(VALUES, max_size=4), st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_drawn_values_are_loaded_identical(path, rows, meta):
    data = DataProto.from_dict(None, {"o": object_array(rows)}, meta)
    back = loaded(data, path)
    assert identical(back.non_tensor_batch["o"], object_array(rows))
    assert identical(back.meta_info, meta)


@MANY
@given(st.dictionaries(st.text(max_size=4), tensors(), max_size=4), st.integers(0, 3))
def test_drawn_batches_are_loaded_identical(path, found, rows):
    fields = {key: value.new_zeros(rows, *value.shape) for key, value in found.items()
              if value.dtype != torch.float4_e2m1fn_x2}  # fmt: skip
    data = DataProto.from_dict(fields, {"o": list(range(rows))}, {"t": list(found.values())})
    back = loaded(data, path)
    assert identical(back.batch, data.batch) and identical(back.meta_info, data.meta_info)
    assert len(back) == len(data)


@pytest.mark.parametrize("rows", [0, 3])
def test_batches_without_fields_keep_their_rows(rows, path):
    data = DataProto(TensorDict({}, [rows, 2]))
    assert loaded(data, path).batch.batch_size == data.batch.batch_size
    empty = loaded(DataProto(meta_info=OrderedDict(b=1, a=2)), path)
    assert empty.batch is None and identical(empty.meta_info, OrderedDict(b=1, a=2))


def opened(image: Image.Image, kind: str, **options) -> Image.Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.open(io.BytesIO(file.getvalue()))


PIXELS = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX",
         "RGBa", "La", "I;16", "I;16B", "I;16L"]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_every_mode_is_loaded_identical(mode, path):
    image = Image.new(mode, (9, 5))
    size = len(image.tobytes())
    image.frombytes(bytes(i % 251 for i in range(size)))
    image.info["dpi"] = (72, 72.5)
    back = loaded(DataProto(meta_info={"image": image}), path).meta_info["image"]
    assert identical(back, image) and back.tobytes() == image.tobytes()
    back.putpixel((0, 0), back.getpixel((1, 1)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM"])
def test_an_image_that_was_opened_keeps_its_class(kind, path):
    image = opened(PIXELS, kind)
    back = loaded(DataProto(meta_info={"image": image}), path).meta_info["image"]
    assert identical(back, image) and type(back).__name__.endswith("ImageFile")
    assert back.convert("RGB").resize((2, 2)).size == (2, 2)


def test_palettes_keep_their_transparency(path):
    image = Image.new("RGBA", (4, 4), (1, 2, 3, 4)).quantize(4)
    back = loaded(DataProto(meta_info={"image": image}), path).meta_info["image"]
    assert back.getpalette(None) == image.getpalette(None)
    assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


class Number(enum.IntEnum):
    one = 1


Pair = namedtuple("Pair", "a b")
SELF = [1]
SELF.append(SELF)
DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
REFUSED = {
    "enum": (Number.one, "Number"),
    "named tuple": (Pair(1, 2), "Pair"),
    "default dict": (defaultdict(list), "defaultdict"),
    "class": (int, "class <class 'int'>"),
    "function": (len, "builtin_function"),
    "object": (object(), "builtins.object"),
    "time zone": (datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "ZoneInfo"),
    "list within itself": (SELF, "nested more than 100"),
    "200 lists": (DEEP, "nested more than 100"),
    "batch": (DataProto(), "DataProto"),
    "sparse": (torch.eye(2).to_sparse(), "sparse"),
    "meta": (torch.empty(2, device="meta"), "device meta"),
    "quantized": (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
    "lazy stack": (LazyStackedTensorDict(TensorDict({"a": torch.ones(1)}, [])), "LazyStacked"),
    "one value for all rows": (
        TensorDict({"k": NonTensorData("v", batch_size=[2])}, [2]), "'k'.*NonTensorData"
    ),
    "tensor as a key": ({torch.ones(1): 1}, "tensor as a key"),
    "masked": (np.ma.masked_array([1.0], [True]), "MaskedArray"),
    "records": (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "recarray"),
    "record": (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0], "record"),
    "long double": (np.longdouble(1), "longdouble|float128"),
    "array of long doubles": (np.ones(1, np.longdouble), "longdouble|float128"),
    "variable strings": (np.array(["a"], dtype=np.dtypes.StringDType()), "StringDType"),
    "structures with objects": (np.array([(1, None)], [("a", "i4"), ("b", object)]), "'O'"),
    "dtype with metadata": (np.zeros(1, np.dtype("i4", metadata={"a": 1})), "dtype"),
    "items without bytes": (np.zeros(2, "V0"), r"dtype\('V'\)"),
    "several frames": (opened(PIXELS, "GIF", save_all=True, append_images=[PIXELS.rotate(90)]),
                       "several frames"),
    "image without pixels": (Image.new("L", (0, 3)), "0 × 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_does_not_hold_is_refused_by_name(name, tmp_path):
    value, match = REFUSED[name]
    path = tmp_path / "x"
    for data in (
        DataProto.from_dict(non_tensors={"some field": object_array([0, {"k": (value,)}])}),
        DataProto(meta_info={"some field": value}),
    ):
        with pytest.raises(FieldError, match=rf"some field'.*{match}") as caught:
            data.save_to_disk(path)
        assert caught.value.field == "some field"
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_texts_are_refused(tmp_path):
    with pytest.raises(FieldError, match="field 3 has a name of type int"):
        DataProto(non_tensor_batch={3: np.arange(2)}).save_to_disk(tmp_path / "x")
    with pytest.raises(FieldError, match=r"meta_info is a .*defaultdict"):
        DataProto(meta_info=defaultdict(int)).save_to_disk(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_an_image_that_is_cut_is_refused(tmp_path):
    file = io.BytesIO()
    PIXELS.resize((64, 64)).save(file, "png")
    image = Image.open(io.BytesIO(file.getvalue()[:100]))
    with pytest.raises(FieldError, match=r"some image.*cannot be read"):
        DataProto(meta_info={"some image": image}).save_to_disk(tmp_path / "x")
