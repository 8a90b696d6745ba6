"""`quadriga generate`: responses of a model folder to one prompt, or to files of prompts."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.commands import GenerateConfig, GenerationConfig
from quadriga.config.convert import check_choice
from quadriga.config.paths import absolute_paths
from quadriga.config.role_ranks import trainer_settings
from quadriga.config.schema import ActorRolloutRefConfig, RolloutConfig, RolloutEngineConfig
from quadriga.data.images import TAG
from quadriga.data.rows import Row
from quadriga.errors import ConfigError, RolloutError
from quadriga.models.folder import check_model_folder
from quadriga.observability.console import RunConsole
from quadriga.observability.jsonl import JsonObject
from quadriga.protocol import DataProto, fields
from quadriga.rollout import ROLLOUTS, rollout_of
from quadriga.trainer import stages
from quadriga.trainer.checks.data import check_generation_data, check_generation_takes_images
from quadriga.trainer.checks.settings import check_device, check_generate_settings
from quadriga.trainer.evaluation.response_file import ResponseFile, inputs_of, rows_of
from quadriga.trainer.ingredients import image_rules
from quadriga.trainer.preflight import check_files, require_model_path
from quadriga.trainer.replicas import (
    FROM_FOLDER,
    Replicas,
    ReplicatedRollout,
    start_replicas,
)
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.workers import threads_per_rank
from quadriga.trainer.worker_groups import (
    StartedGroups,
    close_on_error,
    one_pool,
    open_backend,
    start_group,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import PromptDataset
    from quadriga.workers.generation import GeneratingGroup

Messages = Sequence[Mapping[str, object]]
"""A chat: messages with `role` and `content`."""


@dataclass(frozen=True)
class Answer:
    """One prompt and the responses to it."""

    prompt: Messages
    responses: list[str]


def run_generation(config: GenerateConfig) -> list[Answer]:
    """Generate `n` responses per prompt, and write them to `output` if it is set.

    Responses that `output` holds from an earlier run of the same command are kept.

    Returns:
        One entry per prompt, in the order of the prompts.

    Raises:
        ConfigError: neither or both of `prompt` and `data_files` are set, or another setting does
            not fit, or `output` is of other settings or data, or the generation does not fit the
            memory of the ranks.
        ModelError: the folder holds no model, or a sequence or a token does not fit it.
        WorkerError: a rank failed. What was generated before is in `output`.
    """
    if (config.prompt is None) == (not config.data_files):
        raise ConfigError("set either prompt=… or data_files=[…], and not both", key="prompt")
    if config.images and config.prompt is None:
        raise ConfigError(
            "images are the image files of prompt; set prompt=…, or write the images of data_files "
            "into the column image_key",
            key="images",
        )
    check_generate_settings(config)
    prompt = config.prompt
    if prompt is not None and TAG not in prompt:
        prompt = TAG * len(config.images) + prompt  # images without a tag come before the text
    prompts = load_prompts(config, prompt, config.images)
    if config.output is None:
        from quadriga.trainer.memory import RunMemory  # imports torch

        RunMemory(config, prompts).check()
        return [_answer(row) for batch in generate(config, prompts) for row in batch]
    write_responses(config, prompts, config.output)
    return [_answer(row) for row in rows_of(config.output)]


def _answer(row: ResponseRow) -> Answer:
    return Answer(row["prompt"], row[fields.RESPONSES])


def main_generation(config: GenerateConfig) -> list[Answer]:
    """Call `run_generation`; verl has this name for it."""
    return run_generation(config)


_log = logging.getLogger("quadriga")

ResponseRow = JsonObject
"""`index` of the prompt in the data, `prompt`, `responses`, `response_tokens`, `finished`, and of
`data_source`, `reward_model` and `extra_info` those that the row of the data has."""

_FROM_DATA = (fields.DATA_SOURCE, fields.REWARD_MODEL, fields.EXTRA_INFO)


def load_prompts(
    config: GenerationConfig, prompt: str | None = None, images: Sequence[str] = ()
) -> PromptDataset:
    """Check settings, files and the model, and load the prompts; nothing is started.

    Args:
        prompt: one prompt in place of `data_files`.
        images: the image files of this prompt.

    Raises:
        InputError: names the setting, the file or the row that does not fit.
    """
    from quadriga.data import PromptDataset
    from quadriga.workers.reward_model import tokenizer_of

    check_choice("rollout.name", config.rollout.name, sorted(ROLLOUTS))
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    engine = rollout_of(config.rollout)
    engine.check(ranks)
    engine.check_sampling(config.sampling)
    check_files(config.data_files, "data_files", needed=prompt is None)
    model = config.model
    require_model_path(model.path, "model.path")
    check_model_folder(model.path, trust_remote_code=model.trust_remote_code)
    tokenizer = tokenizer_of(model)
    check_generation_takes_images(config)
    rules = image_rules(model, config.image_key)
    files: Sequence[str | Row] = config.data_files
    if prompt is not None:
        message = {"role": "user", "content": prompt}
        row = {config.prompt_key: [message], str(config.image_key): list(images)}
        files = [Row(row, "given", 0)]
    dataset = PromptDataset.from_settings(files, tokenizer, config, images=rules)
    check_generation_data(config, tokenizer, dataset)
    if dataset.filtered:
        _log.warning(
            "%d prompts have more than max_prompt_length=%d tokens and are left out",
            dataset.filtered,
            config.max_prompt_length,
        )
    return dataset


def write_responses(config: GenerationConfig, prompts: PromptDataset, path: str) -> None:
    """Generate the responses that the file at `path` lacks.

    Raises:
        ConfigError: the file is of other settings or data, or another process writes it now, or
            rows are missing and their generation does not fit the memory of the ranks.
        InputError: it cannot be written.
        WorkerError: a rank failed. The batches before it are in the file.
    """
    from quadriga.trainer.memory import RunMemory

    total = len(prompts)
    why = rollout_of(config.rollout).not_reproduced(config.sampling)
    if why:
        _log.warning("the same command may generate other responses: %s", why)
    with ResponseFile.open(
        path,
        inputs_of(config),
        total=total,
        batch_size=config.batch_size,
        overwrite=config.overwrite,
        check=RunMemory(config, prompts).check,
    ) as file:
        if file.done:
            _log.warning("%s has the responses to %d of %d prompts", path, file.done, total)
        try:
            # Closed at once after an error, which could keep the ranks otherwise.
            with closing(generate(config, prompts, skip=file.done)) as batches:
                for rows in batches:
                    file.write(rows)
        except BaseException:
            _log.warning("the same command generates the responses that %s lacks", path)
            raise
        file.finish()


def generate(
    config: GenerationConfig, prompts: PromptDataset, *, skip: int = 0
) -> Generator[list[ResponseRow], None, None]:
    """Yield the rows of each batch of prompts, after the first `skip` prompts.

    The ranks start with the first batch and stop at the end, or when the iterator is closed.
    """
    from quadriga.data import PromptLoader

    loader = PromptLoader(prompts, config.batch_size, shuffle=False, drop_last=False)
    loader.batches_done = -(-skip // config.batch_size)
    if loader.batches_done >= len(loader):
        return
    console = RunConsole(len(loader), title="generate", file=sys.stderr)
    with rollout_group(config) as group, closing(console):
        for batch in loader:
            yield _generate_batch(config, group, batch, prompts.tokenizer)
            console.log(loader.batches_done, {})


def _generate_batch(
    config: GenerationConfig,
    group: GeneratingGroup,
    prompts: DataProto,
    tokenizer: PreTrainedTokenizerBase,
) -> list[ResponseRow]:
    expanded = stages.expand_prompts(prompts, n=config.n, seed=config.seed, seed_by_index=True)
    batch = stages.generate(expanded.batch, group, "train").batch
    versions = {*batch.batch[fields.WEIGHT_VERSION].tolist()} - {FROM_FOLDER}
    if versions:  # a server that runs already may hold weights of a training run
        raise RolloutError(
            f"rollout engine {config.rollout.name!r} generated with weights of version "
            f"{min(versions)} of a training run; start the server again with model.path"
        )
    pairs = zip(batch.batch[fields.RESPONSES], batch.batch[fields.RESPONSE_MASK], strict=True)
    ids = [row[mask.bool()].tolist() for row, mask in pairs]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    finished = batch.batch[fields.FINISHED].bool().tolist()
    arrays, n = prompts.non_tensor_batch, config.n
    rows: list[ResponseRow] = []
    for number in range(len(prompts)):
        own = slice(number * n, (number + 1) * n)
        row = {
            "index": int(arrays[fields.INDEX][number]),
            "prompt": arrays[fields.RAW_PROMPT][number],
            "responses": texts[own],
            "response_tokens": [len(tokens) for tokens in ids[own]],
            "finished": finished[own],
        }
        values = {key: arrays[key][number] for key in _FROM_DATA if key in arrays}
        rows.append(row | {key: value for key, value in values.items() if value is not None})
    return rows


class FolderReplicas(ReplicatedRollout):
    """Replicas that hold the weights of the model folder, which no weight sync changes.

    A lost replica has the right weights as soon as it has loaded the model again, so it is started
    again (`rollout.replicas.restarts`) before the next batch.
    """

    def __init__(self, replicas: Replicas, settings: RolloutEngineConfig) -> None:
        replicas.version = FROM_FOLDER
        super().__init__(replicas, settings.replicas, most_rows=settings.micro_batch_size)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row, after lost replicas were started again.

        Raises:
            As `ReplicatedRollout.generate_sequences`.
        """
        self.replicas.restart_lost()
        return super().generate_sequences(prompts)


@contextmanager
def rollout_group(config: GenerationConfig) -> Iterator[GeneratingGroup]:
    """Start the ranks, load the model on each of them, and stop them after the block.

    Each rank has a rollout engine, which samples by `config.sampling`. All ranks are one group, or
    each copy of the weights is a replica (`rollout.replicas`).

    Raises:
        PlacementError: the nodes cannot hold the ranks. Nothing was started.
        WorkerError: a rank failed while it started.
    """
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import ActorRolloutRefWorker, RankRuntime

    trainer = trainer_settings(config.trainer)
    check_device(trainer)
    runtime = RankRuntime(
        device=trainer.device,
        threads=threads_per_rank(trainer),
        seed=config.seed,
        max_response_length=config.max_response_length,
    )
    engine = {f.name: getattr(config.rollout, f.name) for f in dataclasses.fields(config.rollout)}
    policy = ActorRolloutRefConfig(
        model=absolute_paths(config.model),
        rollout=RolloutConfig(**engine, n=config.n, sampling=config.sampling),
    )
    worker = ClassWithInitArgs(
        ActorRolloutRefWorker, config=policy, role=Role.Rollout.key, runtime=runtime
    )
    backend = open_backend(trainer)
    with close_on_error(backend) as groups:
        pool, timeout = one_pool(trainer, backend), trainer.call_timeout_s
        rollout: GeneratingGroup
        if config.rollout.replicas.enable:
            members = {Role.Rollout.key: worker}
            replicas = start_replicas(
                config.rollout, backend, pool, members, groups, timeout=timeout
            )
            replicas.init_model()
            rollout = FolderReplicas(replicas, config.rollout)
        else:
            group = start_group(backend, pool, worker, groups, trainer)
            group.init_model()
            rollout = group
    try:
        yield rollout
    finally:
        StartedGroups(backend, groups).close()
