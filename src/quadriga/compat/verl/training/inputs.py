"""What a program of verl makes for its trainer: datasets, samplers, loaders, rewards.

Each is an object of Quadriga's under verl's interface. `RayPPOTrainer` takes the object itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.compat.verl.core_algos import compute_response_mask
from quadriga.compat.verl.training.run_settings import train_settings
from quadriga.compat.verl_settings import plain_values
from quadriga.config.schema import DataConfig, TrainConfig
from quadriga.data.loader import PromptLoader, epoch_order
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.protocol.values import object_array
from quadriga.rewards import RewardManager
from quadriga.rewards.tensors import EXTRA, SCORES, BatchFunction, TensorReward, batch_reward
from quadriga.trainer.ingredients import load_prompts
from quadriga.trainer.stages import ModelReward

OWN = "set data.custom_cls.path and .name for a dataset class of your own"


class RLHFDataset(Dataset[dict[str, Any]]):
    """The prompts of files. A row is a dict of its tensors, padded on the left, and its columns.

    `config`: the section `data`. Raises `ConfigError` for a processor and for `max_samples`, which
    have no counterpart, and as `load_prompts`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,  # of transformers
        config: VerlConfig,
        processor: object = None,
        max_samples: int = -1,
    ) -> None:
        self.settings = data_settings(config, data_files)
        if processor is not None:
            raise refused("processor", "None: images are encoded by the trainer")
        self.prompts = load_prompts(self.settings.train_files, self.settings, tokenizer)
        self.prompts.same_width = True  # so that rows can be stacked
        if 0 <= max_samples < len(self):
            raise refused("max_samples", f"-1, or files with fewer rows than {len(self)}")

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = as_dict(self.prompts.collate([self.prompts[index]]))
        return {name: values[0] for name, values in row.items()}


def data_settings(config: VerlConfig, files: str | Sequence[str] | None = None) -> DataConfig:
    """Return the settings of a section `data`, with other files if some are given."""
    paths = None if files is None else [files] if isinstance(files, str) else [*files]
    if isinstance(config, DataConfig):
        return config if paths is None else replace(config, train_files=paths)
    given = {} if paths is None else {"train_files": paths}
    return train_settings({"data": {**plain_values(config), **given}}, tell=False).data


def as_dict(batch: DataProto) -> dict[str, Any]:
    """Return the fields of a batch, as verl's loaders yield them."""
    return {**batch.batch, **batch.non_tensor_batch}


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of rows; other values become arrays."""
    columns = {name: [row[name] for row in data_list] for name in data_list[0]}
    return {
        name: torch.stack(rows) if isinstance(rows[0], Tensor) else object_array(rows)
        for name, rows in columns.items()
    }


class RLSampler(Sampler[int]):
    """The rows in the order of the trainer. Each iteration is the next epoch."""

    def __init__(self, dataset: RLHFDataset, settings: DataConfig) -> None:
        self.dataset, self.settings, self.epoch = dataset, settings, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        seed = TrainConfig().trainer.seed if self.settings.seed is None else self.settings.seed
        shuffle, epoch = self.settings.shuffle, self.epoch
        self.epoch += 1
        yield from epoch_order(len(self), seed=seed, epoch=epoch, shuffle=shuffle).tolist()


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: VerlConfig,
    tokenizer: Any,  # of transformers
    processor: object = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> RLHFDataset:
    """Return the prompts of files, for `RayPPOTrainer` or a loader of a program's own."""
    return RLHFDataset(data_paths, tokenizer, data_config, processor, max_samples)


def create_rl_sampler(data_config: VerlConfig, dataset: RLHFDataset) -> RLSampler:
    """Return the order of the rows. Raises `ConfigError` if the settings name a sampler class."""
    settings = data_settings(data_config)
    if settings.sampler.path is not None:
        raise refused("train_sampler", "None: the trainer makes the sampler that data names")
    return RLSampler(dataset, settings)


def with_inputs(
    config: TrainConfig, train: object, val: object, collate: object, sampler: object
) -> TrainConfig:
    """Return the settings of a run that reads the files of these datasets.

    Raises `ConfigError` for an object that the functions above have not made from its settings.
    """
    data = config.data
    for name, dataset in (("train", train), ("val", val)):
        if dataset is None:
            continue
        if type(dataset) is not RLHFDataset:
            raise refused(f"{name}_dataset", f"the result of create_rl_dataset, or {OWN}")
        own = dataset.settings
        if replace(own, train_files=data.train_files, val_files=data.val_files) != data:
            raise refused(f"{name}_dataset", "a dataset that is made with the same section data")
    if collate is not None and collate is not collate_fn:
        raise refused("collate_fn", f"that of verl.utils.dataset.rl_dataset, or {OWN}")
    if sampler is not None and not isinstance(sampler, RLSampler):
        raise refused("train_sampler", "the result of create_rl_sampler, or set data.sampler")
    if isinstance(sampler, RLSampler) and (sampler.dataset is not train or sampler.epoch):
        raise refused("train_sampler", "a new one of train_dataset")
    if isinstance(train, RLHFDataset):
        data = replace(data, train_files=train.settings.train_files)
    if isinstance(val, RLHFDataset):
        data = replace(data, val_files=val.settings.train_files)
    return config if data == config.data else replace(config, data=data)


def refused(name: str, use: str) -> ConfigError:
    """Return the error of an argument of the trainer. `use`: what to pass."""
    return ConfigError(f"RayPPOTrainer: {name} has no counterpart; pass {use}", key=name)


class BatchDicts:
    """A loader of prompts whose batches are dicts, for `DataProto.from_single_dict`."""

    def __init__(self, loader: PromptLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(as_dict, self._loader)

    def __getattr__(self, name: str) -> Any:  # `state_dict`, `dataset` and the like
        return getattr(self._loader, name)


def with_response_mask(data: DataProto) -> DataProto:
    """Return a batch that has a `response_mask`, from its `attention_mask` if it has none."""
    if fields.RESPONSE_MASK in data.batch:
        return data
    mask = DataProto.from_dict({fields.RESPONSE_MASK: compute_response_mask(data)})
    return data.select().union(mask)


class LoadedRewards:
    """The rules of the settings as verl calls them: `f(data)` returns scores [B, R].

    `return_dict=True`: a dict with them and with what the rules return besides. `manager` is what
    `RayPPOTrainer` uses.
    """

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        scores: Tensor = self.manager(with_response_mask(data)).batch[fields.TOKEN_LEVEL_SCORES]
        rows = [outcome.extra for outcome in self.manager.outcomes]
        names = dict.fromkeys(name for row in rows for name in row)
        extra = {name: [row.get(name) for row in rows] for name in names}
        return {SCORES: scores, EXTRA: extra} if return_dict else scores


def load_reward_manager(
    config: VerlConfig, tokenizer: Any, num_examine: int = 0, **reward_kwargs: object
) -> LoadedRewards:
    """Return the rules that the settings describe.

    `num_examine`: not used, because a run writes samples with their scores to `samples.jsonl`.
    Raises `ConfigError` for `reward_kwargs` that differ from the settings.
    """
    known = setting(setting(config, "reward_model"), "reward_kwargs", {})
    for name, value in reward_kwargs.items():
        if setting(known, name) != value:
            text = f"set reward_model.reward_kwargs.{name}, got {value!r}"
            raise ConfigError(f"load_reward_manager: {text}", key=name)
    ours = train_settings(config, tell=False)
    components = ours.algorithm.reward_components
    return LoadedRewards(RewardManager.from_settings(ours.reward, tokenizer, components))


def compute_reward(
    data: DataProto, reward_fn: BatchFunction
) -> tuple[Tensor, dict[str, Sequence[object]]]:
    """Return the scores [B, R] of a reward function, and its other values by name."""
    reward: Any = batch_reward(reward_fn)
    found: Any = reward.returned(data) if isinstance(reward, TensorReward) else reward(data)
    if isinstance(found, DataProtoFuture):
        found = found.get()
    if isinstance(found, DataProto):
        return found.batch[fields.TOKEN_LEVEL_SCORES], {}
    if SCORES not in found:
        text = f"expected a dict with {SCORES!r}, got {sorted(map(str, found))}"
        raise ConfigError(f"compute_reward: {text}", key="reward_fn")
    return found[SCORES], dict(found.get(EXTRA) or {})


class RulesAfterModel:
    """Scores as verl does: the function of a program receives the scores of the reward model.

    The scores that the function returns are the scores of the step.

    Attributes:
        metrics: the mean of the model's scores, and what the function has measured.
        masked_rows: rows that the function excludes from the update.
    """

    def __init__(self, model: ModelReward) -> None:
        self.model = model
        self.metrics: dict[str, float] = {}
        self.masked_rows: list[int] = []

    def __call__(self, data: DataProto, /) -> DataProto:
        """Score every row of `data`."""
        of_model = self.model(data).select(batch_keys=[fields.RM_SCORES])
        found = self.model.rules(data.select().union(of_model))
        scored = found.get() if isinstance(found, DataProtoFuture) else found
        self.metrics = {**self.model.metrics, **getattr(self.model.rules, "metrics", {})}
        self.masked_rows = list(getattr(self.model.rules, "masked_rows", []))
        return scored.union(of_model)
