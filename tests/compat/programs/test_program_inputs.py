"""Programs that make the datasets, samplers and rewards of verl's trainer themselves."""

import pytest
import torch
from torch.utils.data import DataLoader
from verl import DataProto
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_reward
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import collate_fn

from quadriga.errors import ConfigError


@pytest.fixture
def tokenizer(settings):
    from verl.utils import hf_tokenizer

    return hf_tokenizer(settings["actor_rollout_ref"]["model"]["path"])


def inputs(settings, tokenizer, train=None):
    """What `run` of verl's TaskRunner makes for the trainer."""
    data = settings["data"]
    train = create_rl_dataset(train or data["train_files"], data, tokenizer, None, is_train=True)
    val = create_rl_dataset([data["train_files"].replace("train", "test")], data, tokenizer, None)
    return {"train_dataset": train, "val_dataset": val, "collate_fn": collate_fn,
            "train_sampler": create_rl_sampler(data, train)}  # fmt: skip


def test_a_loader_of_ones_own_has_the_batches_of_the_trainer(settings, tokenizer):
    given = inputs(settings, tokenizer)
    trainer = RayPPOTrainer(settings, tokenizer, **given)
    assert (len(trainer.train_dataloader), len(trainer.val_dataloader)) == (4, 1)
    sampler = create_rl_sampler(settings["data"], given["train_dataset"])
    loader = DataLoader(given["train_dataset"], 4, sampler=sampler, collate_fn=collate_fn)
    for _ in range(2):  # epochs
        for batch_dict, own in zip(loader, trainer.train_dataloader, strict=True):
            assert type(batch_dict) is type(own) is dict
            ours, theirs = map(DataProto.from_single_dict, (own, batch_dict))
            same = ours.non_tensor_batch["index"], theirs.non_tensor_batch["index"]
            assert same[0].tolist() == same[1].tolist()
            width = ours.batch["input_ids"].shape[1]
            assert torch.equal(ours.batch["input_ids"], theirs.batch["input_ids"][:, -width:])
    assert trainer.train_dataloader.state_dict()["epoch"] == 2
    trainer.close()


def test_files_of_datasets_are_those_of_the_run(settings, tokenizer):
    other = settings["data"]["train_files"].replace("train", "test")
    trainer = RayPPOTrainer(settings, **inputs(settings, tokenizer, train=other))
    assert trainer.config.data.train_files == trainer.config.data.val_files == [other]
    trainer.close()


def test_what_the_trainer_cannot_take_is_refused(settings, tokenizer):
    given = inputs(settings, tokenizer)
    used = create_rl_sampler(settings["data"], given["train_dataset"])
    list(used)
    elsewhere = create_rl_dataset(
        settings["data"]["train_files"], {**settings["data"], "shuffle": False}, tokenizer
    )
    for name, value, use in (
        ("train_dataset", [1], "create_rl_dataset, or set data.custom_cls"),
        ("val_dataset", elsewhere, "the same section data"),
        ("collate_fn", list, "rl_dataset"),
        ("train_sampler", [0], "create_rl_sampler"),
        ("train_sampler", used, "a new one"),
        ("train_sampler", create_rl_sampler(settings["data"], elsewhere), "of train_dataset"),
        ("processor", object(), "pass None"),
    ):
        with pytest.raises(ConfigError, match=use) as told:
            RayPPOTrainer(settings, **{**given, name: value})
        assert told.value.key == name
    for name, value in (("max_samples", 3), ("processor", object())):
        options = {"processor": None, name: value}
        with pytest.raises(ConfigError, match=f"{name} has no counterpart"):
            create_rl_dataset(
                settings["data"]["train_files"], settings["data"], tokenizer, **options
            )


def responses(tokenizer, *texts):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, ids))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    rows = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
    return DataProto.from_dict(
        {"responses": torch.tensor(rows), "attention_mask": torch.cat([mask[:, :1], mask], 1)},
        {"data_source": ["quadriga/arithmetic"] * 2, "reward_model": [{"ground_truth": "7"}] * 2},
    )


def test_rules_of_the_settings_are_called_as_in_verl(settings, tokenizer):
    reward_fn = load_reward_manager(settings, tokenizer, num_examine=0)
    data = responses(tokenizer, "#### 7", "#### 8 8")
    scores, extra = compute_reward(data, reward_fn)
    last = data.batch["attention_mask"][:, 1:].sum(-1) - 1
    assert scores.sum(-1).tolist() == [1.0, 0.0] and scores[0, last[0]] == 1.0
    assert torch.equal(reward_fn(data), scores) and extra == {}
    assert compute_reward(data, lambda data: scores) == (scores, {})
    info = {"reward_tensor": scores, "reward_extra_info": {"acc": [1, 0]}}
    assert compute_reward(data, lambda data, return_dict: info) == (scores, {"acc": [1, 0]})
    with pytest.raises(ConfigError, match=r"reward_kwargs\.max_resp_len, got 5"):
        load_reward_manager(settings, tokenizer, max_resp_len=5)
    for wrong, message in ((lambda data: {"score": 1}, "with 'reward_tensor', got"), (5, "got 5")):
        with pytest.raises(ConfigError, match=message):
            compute_reward(data, wrong)
    val = load_reward_manager(settings, tokenizer, num_examine=1)
    trainer = RayPPOTrainer(settings, tokenizer, reward_fn=reward_fn, val_reward_fn=val)
    assert (trainer.reward_fn, trainer.val_reward_fn) == (reward_fn.manager, val.manager)
    trainer.close()
