"""All rows are checked before any worker starts: one that cannot be scored ends the command."""

import json

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import DataError
from quadriga.models import train_tokenizer
from quadriga.trainer.ingredients import load_ingredients

GOOD = {
    "prompt": "3+4",
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "7"},
}
BAD = [
    ({**GOOD, "data_source": "openai/gsm9k"}, "did you mean 'openai/gsm"),
    ({**GOOD, "data_source": None}, "no rule function for data_source None"),
    ({"prompt": "1", "data_source": "openai/gsm8k"}, "'ground_truth', got None"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["3+4=7\n#### 7"]).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def load(model, folder, split, row, *overrides):
    files = {}
    for name in ("train", "val"):
        files[name] = folder / f"{name}.jsonl"
        rows = [GOOD, row if name == split else GOOD]
        files[name].write_text("".join(f"{json.dumps(r)}\n" for r in rows))
    settings = [
        f"data.train_files={files['train']}",
        f"data.val_files={files['val']}",
        "data.train_batch_size=2",
        f"actor_rollout_ref.model.path={model}",
    ]
    return load_ingredients(load_config(TrainConfig, [*settings, *overrides]))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(("row", "words"), BAD)
def test_a_row_that_cannot_be_scored_is_named_before_the_start(row, words, split, model, tmp_path):
    with pytest.raises(DataError, match="row 1 cannot be scored") as caught:
        load(model, tmp_path, split, row)
    assert words in str(caught.value)


def test_a_function_of_the_user_accepts_rows_without_a_ground_truth(model, tmp_path):
    rule = tmp_path / "rule.py"
    rule.write_text("def compute_score(solution_str, **_):\n    return len(solution_str)\n")
    load(model, tmp_path, "train", {"prompt": "1"}, f"reward.path={rule}")
