"""Runs with a sampler, a dataset class and a mixture of files that the user gives."""

from contextlib import closing
from pathlib import Path

import pytest
from run_cases import STREAMED, timeless

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import CheckpointError, ConfigError
from quadriga.trainer.ingredients import load_ingredients
from quadriga.trainer.main import run_training

CURRICULUM = Path(__file__).parents[2] / "examples" / "trainer" / "curriculum.py"
SAMPLER = (f"data.sampler.path={CURRICULUM}", "data.sampler.name=NearTarget")
DATASET = """
from quadriga.data import PromptDataset


class Backwards(PromptDataset):
    def __init__(self, files, tokenizer, config):
        super().__init__(files, tokenizer, max_prompt_length=config.max_prompt_length)

    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)
"""


@pytest.mark.parametrize("more", [(), STREAMED], ids=["", "streamed"])
def test_a_curriculum_run_that_is_resumed_equals_an_undisturbed_one(run, tmp_path, more) -> None:
    given = *SAMPLER, *more, "trainer.total_training_steps=3", "trainer.max_ckpt_to_keep=null"
    whole = run(*given, "trainer.save_freq=1")
    half = f"trainer.resume_mode={tmp_path / 'run' / 'checkpoints' / 'global_step_1'}"
    folder = f"trainer.default_local_dir={tmp_path / 'resumed'}"
    assert timeless(run(*given, half, folder)) == timeless(whole)[-2:]
    with pytest.raises(CheckpointError, match=r"content of data.sampler.path"):
        run(folder, "trainer.total_training_steps=4", "trainer.resume_mode=auto")


def test_a_sampler_learns_from_every_step(train_overrides, tmp_path) -> None:
    learned = tmp_path / "learned.py"
    learned.write_text(
        CURRICULUM.read_text() + "\n\nclass Told(NearTarget):\n    def update(self, data):\n"
        "        assert data.batch['token_level_scores'].shape[0] == 16\n"
        "        super().update(data)\n        assert len(self.state_dict()) >= 8\n"
        f"        open({str(tmp_path / 'told')!r}, 'a').write('x')\n"
    )
    settings = [f"data.sampler.path={learned}", "data.sampler.name=Told"]
    run_training(load_config(TrainConfig, [*train_overrides, *settings]))
    assert (tmp_path / "told").read_text() == "xx"


def test_a_dataset_class_is_used_for_training_and_validation(train_overrides, tmp_path) -> None:
    file = tmp_path / "backwards.py"
    file.write_text(DATASET)
    plain = load_ingredients(load_config(TrainConfig, train_overrides))
    settings = [f"data.dataset.path={file}", "data.dataset.name=Backwards"]
    own = load_ingredients(load_config(TrainConfig, [*train_overrides, *settings]))
    with closing(plain), closing(own):
        for a, b in ((plain.train_loader, own.train_loader), (plain.val_loader, own.val_loader)):
            assert b.dataset[0] == a.dataset[len(a.dataset) - 1]
    for setting in ("data.special_tokens=refuse", "+data.chat_template_kwargs.thinking=true"):
        with pytest.raises(ConfigError, match=r"has no effect: Backwards of .* does not pass"):
            load_ingredients(load_config(TrainConfig, [*train_overrides, *settings, setting]))


def test_a_mixture_of_files(train_overrides, tiny_task) -> None:
    train, test = (tiny_task.data(part).strip("[]") for part in ("train", "test"))
    config = load_config(
        TrainConfig,
        [*train_overrides, f"data.train_files=[{train},{test}]", "data.train_weights=[1,3]"],
    )
    made = load_ingredients(config)
    with closing(made):
        rows = [n for batch in made.train_loader for n in batch.non_tensor_batch["index"]]
    assert len(rows) == 80 and sum(row >= 64 for row in rows) == 60
