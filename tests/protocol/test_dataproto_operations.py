"""Operations on rows and fields: joining, collating, folding, conversion, checks."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from protocol_cases import rows_of_six, shard, six
from tensordict import TensorDict

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
)


def test_union_helpers():
    a = TensorDict({"x": torch.ones(2)}, [2])
    assert set(union_tensor_dict(a, TensorDict({"y": torch.ones(2)}, [2])).keys()) == {"x", "y"}
    with pytest.raises(ConflictError, match="'x'"):
        union_tensor_dict(a, TensorDict({"x": torch.zeros(2)}, [2]))
    with pytest.raises(LengthError, match=r"\[2\] and \[3\]"):
        union_tensor_dict(a, TensorDict({"z": torch.zeros(3)}, [3]))
    one = np.array([1, {"k": [2, np.float64("nan")]}], dtype=object)
    two = np.array([1, {"k": [2, np.float64("nan")]}], dtype=object)
    assert set(union_numpy_dict({"o": one}, {"o": two, "p": two})) == {"o", "p"}
    nan = np.array([float("nan"), 1.0])
    assert list(union_numpy_dict({"a": nan}, {"a": nan.copy(), "b": nan})) == ["a", "b"]
    with pytest.raises(ConflictError, match="'o'"):
        union_numpy_dict({"o": one}, {"o": one[::-1]})


def test_concat_merges_meta_info():
    def part(**meta):
        return DataProto.from_dict({"x": torch.ones(1)}, meta_info=meta)

    first = part(metrics={"loss": 1.0}, same=[1, 2])
    second = part(metrics=[{"loss": 2.0}, {"loss": 3.0, "lr": 0.1}], same=[1, 2])
    joined = DataProto.concat([first, second, part(metrics=None, only=5)])
    metrics = {"loss": [1.0, 2.0, 3.0], "lr": [0.1]}
    assert joined.meta_info == {"metrics": metrics, "same": [1, 2], "only": 5}
    with pytest.raises(ConflictError, match=r"meta_info key 'same'.*1 and 2"):
        DataProto.concat([part(same=1), part(same=2)])
    with pytest.raises(FieldError, match="a dict or a list of dicts, got float"):
        DataProto.concat([part(metrics=[0.5])])


def test_concat_refuses_parts_that_do_not_fit(form):
    with pytest.raises(LengthError, match="empty list"):
        DataProto.concat([])
    with pytest.raises(FieldError, match=r"part 0 has field 'rag' of batch, part 1 does not"):
        DataProto.concat([form(six()), form(six()).select(["x", "xy"])])
    with pytest.raises(FieldError, match="concat: part 0 has tensors and part 1 has none"):
        DataProto.concat([form(six()), DataProto()])
    narrow = form(six()).select(["xy"], [])
    wide = form(DataProto.from_dict({"xy": torch.ones(2, 3)}, meta_info={"temperature": 0.7}))
    with pytest.raises(FieldError, match="field 'xy' cannot be concatenated"):
        DataProto.concat([narrow, wide])


def test_concat_promotes_as_local_tensors_do(form):
    ints, floats = {"x": torch.arange(4)}, {"x": torch.arange(4) / 2}
    joined = DataProto.concat([form(DataProto.from_dict(t)) for t in (ints, floats)])
    assert joined.batch["x"].dtype == torch.float32
    assert joined.batch["x"].tolist() == [0, 1, 2, 3, 0, 0.5, 1, 1.5]


def test_make_iterator(form):
    data = form(six())
    assert [rows_of_six(b) for b in data.make_iterator(2, 2)] == [[0, 1], [2, 3], [4, 5]] * 2
    options = {"seed": 4, "dataloader_kwargs": {"shuffle": True}}
    one, two = ([rows_of_six(b) for b in data.make_iterator(3, 2, **options)] for _ in range(2))
    assert one == two and one[:2] != [[0, 1, 2], [3, 4, 5]]
    assert sorted(one[0] + one[1]) == [0, 1, 2, 3, 4, 5]
    assert list(data[:0].make_iterator(2, 1)) == []
    assert next(data.make_iterator(2, 1)).meta_info == {"temperature": 0.7}
    with pytest.raises(LengthError, match=r"6 = 4 × 1 \+ 2"):
        data.make_iterator(4, 1)


def test_collate(form):
    assert rows_of_six(collate_fn([form(six())[i] for i in (3, 1)])) == [3, 1]
    with pytest.raises(LengthError, match="got none"):
        collate_fn([])


def test_fold_and_unfold(form):
    data = form(six()).select(["x", "xy"], ["s"])
    folded = fold_batch_dim(data, 2)
    assert folded.batch["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded.batch["xy"].shape == (2, 3, 2) and len(folded) == 2
    assert folded.non_tensor_batch["s"].tolist() == [["a", "b", "c"], ["d", "e", "f"]]
    back = unfold_batch_dim(folded)
    assert back.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert list(back.non_tensor_batch["s"]) == list("abcdef")
    with pytest.raises(LengthError, match="6 rows do not fold into 4"):
        fold_batch_dim(data, 4)
    with pytest.raises(FieldError, match="'rag' is jagged"):
        fold_batch_dim(form(six()), 2)
    with pytest.raises(FieldError, match="'x' has shape"):
        unfold_batch_dim(data)


JAGGED = {"q": TensorDict({"rag": six().batch["rag"]}, [6])}


@pytest.mark.parametrize(
    ("fold", "tensors", "error", "text"),
    [
        (lambda d: fold_batch_dim(d, True), {}, LengthError, "new_batch_size.*1 or more, got True"),
        (lambda d: fold_batch_dim(d, "2"), {}, LengthError, "new_batch_size.*got '2'"),
        (lambda d: unfold_batch_dim(d, 0), {}, LengthError, "batch_dims.*1 or more, got 0"),
        (lambda d: unfold_batch_dim(d, (2, 3)), {}, LengthError, r"batch_dims.*got \(2, 3\)"),
        (unfold_batch_dim, {"y": torch.zeros(6, 3)}, FieldError, r"'y' .*\[6, 3\].*\[6, 2\]"),
        (lambda d: fold_batch_dim(d, 2), JAGGED, FieldError, "'q' is jagged"),
    ],
)
def test_what_cannot_be_folded_is_refused_by_name(fold, tensors, error, text):
    with pytest.raises(error, match=text):
        fold(DataProto.from_dict({"x": torch.zeros(6, 2), **tensors}))


def test_unfold_column_chunks(form):
    data = form(six())[1:3]
    split = data.unfold_column_chunks(2, ["xy"])
    assert split.batch["xy"].tolist() == [[1.0], [10.0], [2.0], [20.0]]
    assert split.batch["x"].tolist() == [1, 1, 2, 2]
    assert list(split.non_tensor_batch["s"]) == list("bbcc")
    assert len(data.unfold_column_chunks(3)) == 6
    with pytest.raises(LengthError, match=r"'xy' .*divides into 3"):
        data.unfold_column_chunks(3, ["xy"])
    with pytest.raises(FieldError, match="no field 'nope'"):
        data.unfold_column_chunks(2, ["nope"])


def test_tensordict_and_back(form):
    td = form(six()).to_tensordict()
    assert isinstance(td, TensorDict) and td["temperature"] == 0.7
    back = DataProto.from_tensordict(td)
    assert rows_of_six(back[:]) == [0, 1, 2, 3, 4, 5] and back.meta_info == {"temperature": 0.7}
    clash = six()
    clash.meta_info["x"] = 1
    with pytest.raises(FieldError, match="'x' names two fields"):
        clash.to_tensordict()


def test_construction_checks_lengths_and_types():
    with pytest.raises(LengthError, match=r"'a' has \[2\], 'b' has \[3\]") as caught:
        DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)})
    assert caught.value.field == "b"
    with pytest.raises(LengthError, match="the batch has 2 rows, 's' has 1"):
        DataProto.from_dict({"a": torch.ones(2)}, {"s": ["x"]})
    for make, words in (
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a' in tensors is a list"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1)}), r"'a' has shape \[\]"),
        (lambda: DataProto.from_dict({}, {"s": "text"}), "'s' in non_tensors is a str"),
        (lambda: DataProto.from_dict({}, {"s": torch.ones(2)}), "it goes into tensors"),
        (lambda: DataProto.from_dict({1: torch.ones(2)}), "expected field names, got 1"),
        (lambda: DataProto.from_single_dict({"n": 3}), "'n' in non_tensors is a int"),
        (lambda: DataProto(meta_info=[1]), "meta_info: expected a dict, got list"),
        (lambda: DataProto(non_tensor_batch={"s": [1]}), "'s' of non_.* a numpy array, got list"),
        (lambda: DataProto(batch=TensorDict(batch_size=[])), "at least one batch dimension"),
    ):
        with pytest.raises(FieldError, match=words):
            make()
    broken = six()
    broken.non_tensor_batch["s"] = np.array(["only one"], dtype=object)
    with pytest.raises(LengthError, match="'s' has 1"):
        broken.check_consistency()


def test_from_single_dict_separates_tensors_and_lists():
    data = DataProto.from_single_dict(
        {"x": torch.ones(2), "s": np.array(["a", "b"], dtype=object), "l": [[1, 2], [3, 4]]}
    )
    assert list(data.batch.keys()) == ["x"]
    assert data.non_tensor_batch["l"].shape == (2,) and data.non_tensor_batch["l"][1] == [3, 4]


def test_two_batch_dimensions():
    data = DataProto.from_dict({"x": torch.arange(12).view(2, 3, 2)}, num_batch_dims=2)
    assert data.batch.batch_size == torch.Size([2, 3]) and len(data) == 2
    assert data[1:].batch.batch_size == torch.Size([1, 3])
    with pytest.raises(LengthError, match="non-tensors have one batch dimension"):
        DataProto.from_dict({"x": torch.ones(2, 3)}, {"s": ["a", "b"]}, num_batch_dims=2)
    with pytest.raises(LengthError, match="at least one batch dimension"):
        DataProto.from_dict({"x": torch.ones(2, 3)}, num_batch_dims=0)


def test_setting_a_field_checks_its_length(store):
    data = shard(six(), 2)
    data.batch["new"] = torch.arange(6)
    assert data.chunk(2)[1].batch["new"].tolist() == [3, 4, 5]
    with pytest.raises(LengthError, match=r"the batch has \[6\], 'new' has \[5\]"):
        data.batch["new"] = torch.arange(5)
    with pytest.raises(FieldError, match="expected a tensor, got list"):
        data.batch["new"] = [1] * 6


def test_repeats_are_checked(form):
    for kind, counts, message in (
        (LengthError, [1, 2], "expected 6 counts of 0 or more"),
        (FieldError, [0.5] * 6, "one integer per row"),
        (LengthError, [1, 1, 1, 1, 1, -1], "of 0 or more"),
    ):
        with pytest.raises(kind, match=message):
            form(six()).sample_level_repeat(counts)


@dataclass
class Statistics:
    """A value of a user, with `==` of tensors, which has no truth value."""

    mean: torch.Tensor
    more: object = None


@pytest.mark.parametrize(
    "make",
    [Statistics, lambda mean: deque([mean, 1]), lambda mean: DataProto.from_dict({"m": mean})],
    ids=["dataclass", "deque", "batch"],
)
def test_meta_values_that_hold_tensors_are_compared_by_their_parts(make):
    def batch(value: float) -> DataProto:
        meta = {"s": make(torch.tensor([value, 2.0]))}
        return DataProto.from_dict({"x": torch.ones(1)}, meta_info=meta)

    assert len(DataProto.concat([batch(1.0), batch(1.0)])) == 2
    with pytest.raises(ConflictError, match="s"):
        DataProto.concat([batch(1.0), batch(3.0)])
