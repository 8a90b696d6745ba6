"""Parts of tensors, names of parameters, weights that are not finite, dtypes of an export."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ModelError
from quadriga.models import load_causal_lm, weights as weights_of
from quadriga.models.folder import StoredTensor
from quadriga.models.loading import VALUE_HEAD_PREFIX, model_without_weights
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.models.weights import (
    JoinedTensor,
    NotFinite,
    StoredDtypes,
    TensorReader,
    check_all_finite,
    count_not_finite,
    joined_tensor,
    joins_experts,
    match_names,
    stored_tensors,
)

SHAPE = TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path, ["one two three"], replace(SHAPE, tie_word_embeddings=True))
    return tmp_path


def save(folder, tensors, file="model.safetensors"):
    save_file(tensors, folder / file, {"format": "pt"})


def match(folder, *, value=False):
    model = model_without_weights(folder, value_head=value, dtype=torch.float32, buffers=True)
    prefix = VALUE_HEAD_PREFIX if value else None
    return match_names(model, stored_tensors(folder), new_prefix=prefix)


@pytest.mark.parametrize("dtype", weights_of.STORED_DTYPES.values(), ids=str)
@pytest.mark.parametrize("piece", [8, 24, 2**20])
def test_rows_are_read_in_pieces_and_cast(tmp_path, monkeypatch, dtype, piece):
    monkeypatch.setattr(weights_of, "PIECE_BYTES", piece)
    tensor = torch.arange(42).view(7, 6).to(dtype)
    save(tmp_path, {"a": torch.ones(3), "w": tensor, "x": torch.ones(5)})
    entry = stored_tensors(tmp_path)["w"]
    target = torch.full((3, 6), -1, dtype=torch.float64)
    with TensorReader(tmp_path) as opened:
        opened.read(entry, 2 * 6, target)
    assert torch.equal(target, tensor[2:5].double())


def test_a_number_and_an_empty_range_are_read(tmp_path):
    save(tmp_path, {"number": torch.tensor(3.0)})
    target = torch.zeros(())
    with TensorReader(tmp_path) as opened:
        opened.read(stored_tensors(tmp_path)["number"], 0, target)
        opened.read(stored_tensors(tmp_path)["number"], 1, torch.zeros(0))
    assert target == 3


def test_a_file_that_became_shorter_is_named(tmp_path):
    save(tmp_path, {"w": torch.ones(4, 2)})
    entry = stored_tensors(tmp_path)["w"]
    with (tmp_path / "model.safetensors").open("rb+") as file:
        file.truncate(entry.stop - 4)
    expected = rf"model.safetensors ends at byte {entry.stop - 4}, and .* at least {entry.stop}$"
    with TensorReader(tmp_path) as opened, pytest.raises(ModelError, match=expected):
        opened.read(entry, 0, torch.zeros(4, 2))


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for file in ("a.safetensors", "b.safetensors"):
        save(tmp_path, {"w": torch.ones(2)}, file)
    index = {"weight_map": {"w": "a.safetensors", "x": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'w' is in two files .* a.safetensors and b.safetensors"):
        stored_tensors(tmp_path)


def test_a_tied_parameter_has_one_tensor_of_any_of_its_names(folder):
    found = match(folder)
    assert found.reason == "" and EMBEDDING in found.stored and HEAD not in found.stored
    weights = load_file(folder / "model.safetensors")
    weights[HEAD] = weights.pop(EMBEDDING)
    save(folder, weights)
    assert match(folder).stored.keys() == found.stored.keys()


def renamed(weights):
    weights["model.layers.9.norm.weight"] = weights.pop("model.norm.weight")


def with_both_names(weights):
    weights[HEAD] = weights[EMBEDDING] + 1


def with_other_sizes(weights):
    weights["model.norm.weight"] = torch.ones(5)


def with_other_numbers(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed, "it has no tensor for model.norm.weight"),
        (with_both_names, f"{EMBEDDING} and {HEAD} are one parameter"),
        (with_other_sizes, "model.norm.weight is F32 [5], not [16]"),
        (with_other_numbers, "model.norm.weight is F8_E4M3 [16], not [16]"),
    ],
)
def test_folders_that_are_not_one_to_one_are_named_with_the_reason(folder, change, reason):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save(folder, weights)
    assert match(folder).reason == reason


def test_tensors_without_a_parameter_are_left_out_and_a_value_head_may_be_new(folder):
    weights = load_file(folder / "model.safetensors")
    save(folder, {**weights, "other.weight": torch.ones(3)})
    assert match(folder).reason == "" and "other.weight" not in match(folder).stored
    found = match(folder, value=True)
    assert found.reason == "" and found.new == {"score.weight", "score.bias"}


def test_elements_that_are_not_finite_are_counted():
    tensor = torch.ones(6)
    assert count_not_finite(tensor) == NotFinite(0, 0, 6)
    tensor[1:4] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert count_not_finite(tensor) == NotFinite(1, 2, 6)
    assert count_not_finite(torch.ones(0)) == NotFinite(0, 0, 0)
    assert count_not_finite(torch.ones(3, dtype=torch.int64)) == NotFinite(0, 0, 3)


def test_the_first_weight_that_is_not_finite_is_named_with_the_number_of_others(tmp_path):
    check_all_finite(tmp_path, {"a": NotFinite(0, 0, 4)})
    wrong = NotFinite(1, 2, 6)
    with pytest.raises(ModelError, match=r"finite: b has 1 NaN and 2 infinite values of 6$"):
        check_all_finite(tmp_path, {"a": NotFinite(0, 0, 4), "b": wrong})
    with pytest.raises(ModelError, match="of 6, and 1 other tensors have some"):
        check_all_finite(tmp_path, {"b": wrong, "c": wrong})


# Parameters of several tensors.

ROWS = WeightConverter(["gate", "up"], "both", [MergeModulelist(0), Concatenate(1)])
ONE = WeightConverter("down", "all", [MergeModulelist(0)])


def stored(*shape, dtype="F32"):
    return StoredTensor("file", dtype, shape, 0, 0)


@pytest.mark.parametrize(
    ("operations", "joins"),
    [
        ([MergeModulelist(0)], True),
        ([MergeModulelist(0), Concatenate(1)], True),
        ([MergeModulelist(1)], False),
        ([MergeModulelist(0), Concatenate(0)], False),
        ([MergeModulelist(0), Concatenate(1), Transpose(1, 2)], False),
        ([Concatenate(0)], False),
    ],
)
def test_rules_that_only_stack_experts(operations, joins):
    assert joins_experts(WeightConverter(["gate", "up"], "both", operations)) == joins


def test_the_tensors_of_experts_are_in_the_order_of_the_parameter():
    gates, ups = [stored(2, 5), stored(2, 5)], [stored(4, 5), stored(4, 5)]
    joined = joined_tensor(ROWS, {"up": ups, "gate": gates}, (2, 6, 5))
    assert [part is wanted for part, wanted in zip(
        joined.parts, [gates[0], ups[0], gates[1], ups[1]], strict=True
    )] == [True] * 4  # fmt: skip
    assert (joined.shape, joined.dtype) == ((2, 6, 5), "F32")
    # Parts of 10, 20, 10 and 20 elements: from 25 on, 5 of the second, 10, and 3 of the last.
    found = [(joined.parts.index(part), *rest) for part, *rest in joined.ranges(25, 18)]
    assert [rest for _, *rest in found] == [[15, 5], [0, 10], [0, 3]]
    assert list(joined.ranges(60, 0)) == list(joined.ranges(7, 0)) == []


@pytest.mark.parametrize(
    ("found", "shape"),
    [
        ({"gate": [stored(2, 5)], "up": [stored(2, 5)] * 2}, (2, 4, 5)),  # an expert lacks a gate
        ({"gate": [stored(2, 5)] * 2}, (2, 4, 5)),
        ({"gate": [stored(2, 5)] * 2, "up": [stored(3, 5)] * 2}, (2, 4, 5)),
        ({"gate": [stored(2, 4)] * 2, "up": [stored(2, 5)] * 2}, (2, 4, 5)),
        ({"gate": [stored(2, 5)] * 2, "up": [stored(2, 5, dtype="BF16")] * 2}, (2, 4, 5)),
    ],
)
def test_tensors_that_are_not_all_elements_of_a_parameter(found, shape):
    assert joined_tensor(ROWS, found, shape) is None


def test_one_tensor_of_each_expert():
    down = [stored(5, 2), stored(5, 2)]
    assert joined_tensor(ONE, {"down": down}, (2, 5, 2)).parts == tuple(down)
    assert joined_tensor(ONE, {"down": down}, (2, 2, 5)) is None
    assert joined_tensor(ONE, {"down": down}, (3, 5, 2)) is None
    assert joined_tensor(ONE, {"down": [stored(5), stored(5)]}, (2,)) is None


@pytest.mark.parametrize("box", [((0, 2), (0, 5), (0, 3)), ((1, 2), (1, 4), (0, 3)),
                                 ((0, 2), (2, 5), (1, 2)), ((0, 0), (0, 5), (0, 3))])  # fmt: skip
def test_a_box_of_several_tensors_is_read(tmp_path, box):
    parts = [torch.arange(6.0).view(2, 3), torch.arange(9.0).view(3, 3) + 10]
    parts += [part + 100 for part in parts]
    save(tmp_path, {str(number): part for number, part in enumerate(parts)})
    tensors = stored_tensors(tmp_path)
    joined = JoinedTensor((2, 5, 3), tuple(tensors[str(number)] for number in range(4)))
    whole = torch.cat(parts).view(2, 5, 3)
    with TensorReader(tmp_path) as opened:
        found = opened.read_box(joined, box)
        flat = torch.zeros(17)
        opened.read(joined, 4, flat)
    assert torch.equal(found, whole[tuple(slice(*sides) for sides in box)])
    assert torch.equal(flat, whole.flatten()[4:21])


# The dtypes of an export are the dtypes of the folder that the model was loaded from.


@pytest.fixture
def narrow_folder(folder):
    """A bfloat16 model whose final norm is float32."""
    file = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save(folder, weights)
    return folder


def test_cast_keeps_integers_and_gives_new_weights_the_default():
    dtypes = StoredDtypes({"a": torch.float16}, torch.bfloat16)
    weights = {"a": torch.ones(1), "new": torch.ones(1), "n": torch.ones(1).long()}
    found = [tensor.dtype for _, tensor in dtypes.cast(weights.items())]
    assert found == [torch.float16, torch.bfloat16, torch.int64]


def test_trained_bfloat16_model_is_exported_in_bfloat16(narrow_folder, tmp_path):
    engine = FSDPEngine(ModelConfig(path=str(narrow_folder)), EngineConfig(), OptimConfig())
    assert {tensor.dtype for _, tensor in engine.state_stream()} == {torch.float32}
    engine.save_hf(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    original = load_file(narrow_folder / "model.safetensors")
    assert {n: t.dtype for n, t in exported.items()} == {n: t.dtype for n, t in original.items()}
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_causal_lm(tmp_path / "export", dtype="auto").dtype == torch.bfloat16
    assert engine.module.config.dtype == torch.float32
