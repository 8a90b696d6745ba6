"""What can be told of a run in a moment: checks that import neither torch, Ray nor transformers.

They are a first look. The command repeats them with all that they leave out: names that code of
the user can add, engines and devices, sizes and tokens of models, every row of the data.
"""

from collections.abc import Iterable, Iterator

from quadriga.config import commands
from quadriga.config.convert import check_values
from quadriga.config.paths import PROGRAM, is_remote
from quadriga.config.schema import ModelConfig, RewardConfig, TrainConfig
from quadriga.config.stores import local_file
from quadriga.containment import without_code
from quadriga.data.rows import check_files as existing_files, read_pieces
from quadriga.errors import DataError, ModelError
from quadriga.models.folder import check_model_files
from quadriga.observability.callbacks import callback_file
from quadriga.observability.trackers import check_packages
from quadriga.rewards.functions import load_reward_function
from quadriga.trainer.checks.settings import check_against_each_other

AnyConfig = TrainConfig | commands.SFTConfig | commands.RMConfig | commands.GenerationConfig


def check_early(config: object, *, complete: bool = True) -> None:
    """Check types and ranges, files and folders, the columns of the first row of each file, and
    settings against each other. No code that the settings name is run.

    Args:
        config: the settings of a command. Those of `quadriga data make` and the like have no files.
        complete: a file or folder that every run needs must be given.

    Raises:
        InputError: names the setting, the file, the column or the folder.
    """
    if not isinstance(config, AnyConfig):
        return
    check_values(config)
    if complete or not isinstance(config, commands.EvalConfig):
        check_against_each_other(config)
    trains = complete and not isinstance(config, commands.GenerationConfig)
    for setting, files, columns in _data(config):
        check_files(files, setting, needed=trains and setting.endswith("train_files"))
        near = [file for file in files if columns and not is_remote(file)]
        for file in existing_files(near) if near else ():
            row = next(read_pieces(file)).rows[0]
            for column in columns:
                row.at(column)
    if isinstance(config, TrainConfig | commands.SFTConfig | commands.EvalConfig):
        _check_reward_files(config.reward)
    if not isinstance(config, commands.GenerationConfig):
        callbacks = config.trainer.callbacks
        check_files((str(callback_file(one)) for one in callbacks), "trainer.callbacks")
        check_packages(config.trainer.loggers if complete else ())
    _check_models(config, needed=trains)


def _check_models(config: AnyConfig, *, needed: bool) -> None:
    for key, model, tokenizer in _models(config):
        if model.path and not is_remote(model.path):
            check_model_files(model.path, tokenizer=tokenizer and model.tokenizer_path is None)
        elif needed:
            require_model_path(model.path, f"{key}.path")


def _data(config: AnyConfig) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield setting, files, and the columns that each row of them has."""
    if isinstance(config, commands.GenerationConfig):
        yield "data_files", config.data_files, [config.prompt_key]
        if isinstance(config, commands.EvalConfig):
            yield "response_files", config.response_files, [config.response_key]
        return
    data = config.data
    columns, val = [data.prompt_key], [data.prompt_key]
    if isinstance(data, commands.RMDataConfig):
        columns = val = [data.chosen_key, data.rejected_key]
    elif isinstance(data, commands.SFTDataConfig):
        columns = [data.messages_key] if data.messages_key else [data.prompt_key, data.response_key]
        val = columns[:1]
    elif data.dataset.path is not None:  # it decides which columns there are
        columns = val = []
    yield "data.train_files", data.train_files, columns
    yield "data.val_files", data.val_files, val


def _models(config: AnyConfig) -> Iterator[tuple[str, ModelConfig, bool]]:
    """Yield section, settings, and whether its tokenizer is read."""
    if not isinstance(config, TrainConfig):
        if not (isinstance(config, commands.EvalConfig) and config.response_files):
            yield "model", config.model, True
        return
    yield "actor_rollout_ref.model", config.actor_rollout_ref.model, True
    if config.critic.model.path:
        yield "critic.model", config.critic.model, False


def _check_reward_files(reward: RewardConfig) -> None:
    parts = [part for part in reward.parts.values() if isinstance(part, dict)]
    for path in [reward.path, *(part.get("path") for part in parts)]:
        if isinstance(path, str) and path != PROGRAM:
            with without_code():
                load_reward_function(path)


def check_files(files: Iterable[str], setting: str, *, needed: bool = False) -> None:
    """Check that every file exists and, if `needed`, that there is at least one.

    Raises:
        DataError: names the setting and the file.
    """
    files = list(files)
    if needed and not files:
        raise DataError(f"{setting} is empty: give at least one .parquet or .jsonl file")
    for file in files:
        if not local_file(file).is_file():
            raise DataError(f"{setting}: no such file: {file}", path=file)


def require_model_path(path: str, setting: str) -> None:
    """Raise `ModelError`, naming `setting`, if `path` is empty."""
    if not path:
        raise ModelError(f"{setting} is empty: give a model folder or hf://owner/name", path="")
