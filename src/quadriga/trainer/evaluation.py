"""`quadriga generate` and `quadriga eval`: responses of a model folder, and their scores.

    prompts ──► ranks ──► responses.jsonl ──┐
                                            ├──► reward ──► samples.jsonl, results.json, results.png
    response files ─────────────────────────┘

A second run of the same command continues its file of responses; `eval` computes scores again, so
that a changed reward function scores the responses that are there.

    answers.jsonl               one JSON object for each prompt, in the order of the data
    answers.jsonl.inputs.json   what the responses depend on (`inputs_of`)

A `.parquet` file cannot be extended, so its rows are first in `answers.parquet.rows.jsonl`.

Rows are written batch by batch. A run that was killed within a batch leaves some rows of it; the
next run removes them and generates the whole batch again, with the batch that an undisturbed run
has. Both files are then equal byte for byte.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from quadriga.agents.pool import FAILURES
from quadriga.checkpoint.files import digest_file, digest_json, read_json, write_json
from quadriga.config.commands import EvalConfig, GenerateConfig, GenerationConfig
from quadriga.config.convert import check_choice
from quadriga.config.loading import setting_leaves, to_yaml, written_settings
from quadriga.config.paths import absolute_paths, local_path
from quadriga.config.role_ranks import trainer_settings
from quadriga.config.schema import ActorRolloutRefConfig, DataConfig, RolloutConfig, TrainConfig
from quadriga.config.secrets import shown
from quadriga.data import PromptDataset
from quadriga.data.images import TAG
from quadriga.data.rows import Row, check_files as existing_files, read_pieces
from quadriga.errors import ConfigError, InputError, RolloutError
from quadriga.files import replacing, writing
from quadriga.models.folder import check_model_folder, local_folder
from quadriga.observability.console import RunConsole
from quadriga.observability.jsonl import JsonlFile, JsonObject, read_jsonl
from quadriga.observability.run_folder import RunLock
from quadriga.protocol import DataProto, fields
from quadriga.rewards import RewardManager
from quadriga.rewards.functions import SCORED, Outcome, Status
from quadriga.rewards.manager import parts_of
from quadriga.rollout import ROLLOUTS, rollout_of
from quadriga.single_controller import ClassWithInitArgs, WorkerGroup
from quadriga.streams.playing import EpisodeGenerator, EpisodeReward, make_episodes
from quadriga.streams.replicas import FROM_FOLDER, Replicas, ReplicatedRollout, start_replicas
from quadriga.trainer import stages
from quadriga.trainer.checkpoints import changed_inputs, contents_digest
from quadriga.trainer.checks.data import check_generation_data, check_images_supported
from quadriga.trainer.checks.early import check_files, require_model_path
from quadriga.trainer.checks.settings import (
    check_device,
    check_eval_settings,
    check_generate_settings,
)
from quadriga.trainer.ingredients import image_rules, make_space, with_tool_prompts
from quadriga.trainer.record import turns_of
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.roles.workers import threads_per_rank
from quadriga.trainer.validation import (
    NO_SOURCE,
    OVERALL,
    PromptScores,
    SourceSummary,
    SummarySettings,
    interval,
    summarise,
)
from quadriga.trainer.worker_groups import StartedGroups, one_pool, open_backend, start_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.workers.roles import GeneratingGroup

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
        from quadriga.trainer.checks.memory import RunMemory  # imports torch

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
`data_source`, `reward_model` and `extra_info` those that the row of the data has. With `agent.path`
`episodes`: the score, status, metrics and turns of each response."""
EPISODES = "episodes"

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
    from quadriga.models.loading import tokenizer_of

    check_choice("rollout.name", config.rollout.name, sorted(ROLLOUTS))
    engine = rollout_of(config.rollout)
    engine.check(config.trainer.ranks)
    engine.check_sampling(config.sampling)
    check_files(config.data_files, "data_files", needed=prompt is None)
    model = config.model
    require_model_path(model.path, "model.path")
    check_model_folder(model.path, trust_remote_code=model.trust_remote_code)
    tokenizer = tokenizer_of(model)
    check_images_supported(config)
    rules = image_rules(model, config.image_key)
    files: Sequence[str | Row] = config.data_files
    if prompt is not None:
        message = {"role": "user", "content": prompt}
        row = {config.prompt_key: [message], str(config.image_key): list(images)}
        files = [Row(row, "given", 0)]
    dataset = PromptDataset.from_settings(
        files, tokenizer, with_tool_prompts(config, config.agent), images=rules
    )
    make_space(dataset, config.agent)
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
    from quadriga.trainer.checks.memory import RunMemory

    total = len(prompts)
    why = rollout_of(config.rollout).not_reproduced(config.sampling)
    if why:
        _log.warning("the same command may generate other responses: %s", why)
    with ResponseFile.open(path, config, total, RunMemory(config, prompts).check) as file:
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
    from quadriga.data.loader import ordered_loader

    loader = ordered_loader(prompts, config.batch_size)
    loader.batches_done = -(-skip // config.batch_size)
    if loader.batches_done >= len(loader):
        return
    console = RunConsole(len(loader), title="generate", file=sys.stderr)
    scores = EpisodeReward(config.agent, config.batch_size * config.n)
    with rollout_group(config, prompts.tokenizer) as group, closing(console):
        for batch in loader:
            yield _generate_batch(config, group, batch, prompts.tokenizer, scores)
            console.log(loader.batches_done, {})


def _generate_batch(
    config: GenerationConfig,
    group: GeneratingGroup | EpisodeGenerator,
    prompts: DataProto,
    tokenizer: PreTrainedTokenizerBase,
    reward: EpisodeReward,
) -> list[ResponseRow]:
    expanded = stages.expand_prompts(prompts, n=config.n, seed=config.seed, seed_by_index=True)
    batch = stages.generate(expanded.batch, group, "train").batch
    versions = {*batch.batch[fields.WEIGHT_VERSION].tolist()} - {FROM_FOLDER}
    if versions:  # a server that runs already may hold weights of a training run
        raise RolloutError(
            f"rollout engine {config.rollout.name!r} generated with weights of version "
            f"{min(versions)} of a training run; start the server again with model.path"
        )
    width = batch.batch[fields.RESPONSES].shape[1]
    known = batch.batch[fields.ATTENTION_MASK][:, -width:]  # observations have no response mask
    pairs = zip(batch.batch[fields.RESPONSES], known, strict=True)
    ids = [row[mask.bool()].tolist() for row, mask in pairs]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    finished = batch.batch[fields.FINISHED].bool().tolist()
    episodes: list[JsonObject] = []
    if fields.EPISODE in batch.non_tensor_batch:
        scores = reward(batch).batch[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist()
        for i, about in enumerate(batch.non_tensor_batch[fields.EPISODE]):
            kept = {key: about[key] for key in ("status", "detail", "metrics")}
            turns = [{**turn, "seconds": None} for turn in turns_of(batch, i, tokenizer)]
            episodes.append({"score": round(scores[i], 6), **kept, "turns": turns})
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
            **({EPISODES: episodes[own]} if episodes else {}),
        }
        values = {key: arrays[key][number] for key in _FROM_DATA if key in arrays}
        rows.append(row | {key: value for key, value in values.items() if value is not None})
    return rows


@contextmanager
def rollout_group(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[GeneratingGroup | EpisodeGenerator]:
    """Start the ranks, load the model on each of them, and stop them after the block.

    Each rank has a rollout engine, which samples by `config.sampling`. All ranks are one group, or
    each copy of the weights is a replica (`rollout.replicas`). With `agent.path` they play
    episodes, as in the validation of a training run.

    Raises:
        PlacementError: the nodes cannot hold the ranks. Nothing was started.
        WorkerError: a rank failed while it started.
    """
    from quadriga.workers import ActorRolloutRefWorker, RankRuntime

    trainer = trainer_settings(config.trainer)
    check_device(trainer)
    runtime = RankRuntime(
        device=trainer.device,
        threads=threads_per_rank(trainer),
        seed=config.seed,
        max_response_length=config.max_response_length,
    )
    policy = ActorRolloutRefConfig(
        model=absolute_paths(config.model),
        rollout=RolloutConfig(**vars(config.rollout), n=config.n, sampling=config.sampling),
    )
    data = DataConfig(
        max_response_length=config.max_response_length,
        chat_template_kwargs=config.chat_template_kwargs,
    )
    run = absolute_paths(TrainConfig(agent=config.agent, data=data, actor_rollout_ref=policy))
    episodes = make_episodes(run, tokenizer)
    worker = ClassWithInitArgs(
        ActorRolloutRefWorker, config=policy, role=Role.Rollout.key, runtime=runtime
    )
    backend = open_backend(trainer)
    groups: list[WorkerGroup] = []
    with ExitStack() as stack:
        stack.enter_context(closing(StartedGroups(backend, groups)))
        if episodes is not None:
            stack.callback(episodes.close)
        pool = one_pool(trainer, backend)
        rollout: GeneratingGroup
        if config.rollout.replicas.enable:
            members = {Role.Rollout.key: worker}
            replicas = start_replicas(config.rollout, backend, pool, members, groups, trainer)
            replicas.init_model()
            replicas.version = FROM_FOLDER  # which no weight sync changes
            rollout = ReplicatedRollout(replicas, config.rollout)
        else:
            group = start_group(backend, pool, worker, groups, trainer)
            group.init_model()
            replicas, rollout = Replicas(lambda _: group, 1), group
        if episodes is None:
            yield rollout
        else:
            yield EpisodeGenerator(run, replicas, episodes, config.rollout.replicas.enable)


class ResponseFile:
    """The rows of one command. Only `open` creates one.

    Attributes:
        path: the output, `.jsonl` or `.parquet`.
        done: rows that are complete, of the `total` that the command has.
    """

    def __init__(self, path: Path, inputs: Inputs, total: int) -> None:
        self.path, self.total, self.done = path, total, 0
        self._inputs = inputs
        is_lines = path.suffix == ".jsonl"
        self._rows = path if is_lines else path.with_name(path.name + ".rows.jsonl")
        self._described = path.with_name(path.name + ".inputs.json")
        self._file: JsonlFile | None = None

    @classmethod
    @contextmanager
    def open(
        cls, path: str | Path, config: GenerationConfig, total: int, check: Callable[[], None]
    ) -> Iterator[ResponseFile]:
        """Open the output, and begin after the last complete batch that is in it.

        Args:
            total: rows that the command writes.
            check: called if rows are missing, before anything is changed; what it raises leaves the
                output as it is.

        Raises:
            ConfigError: the output is of another command, or another process writes it now.
            InputError: it cannot be written.
        """
        file = cls(path := Path(path), inputs_of(config), total)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = RunLock.acquire(path.with_name(f".{path.name}.lock"), path, "output")
        try:
            file._begin(config.batch_size, overwrite=config.overwrite, check=check)
            yield file
        finally:
            if file._file is not None:
                file._file.close()
            lock.release()

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append the rows of one batch.

        Raises:
            InputError: the disk is full, for example. The rows before it are kept.
        """
        if self._file is None:
            # Not masked: a response is data, also if it holds a word that looks like a secret.
            self._file = JsonlFile(self._rows, masked=False)
        for row in rows:
            self._file.write(row)
            self.done += 1

    def finish(self) -> None:
        """Make the `.parquet` file of the rows, if that is the output and it is not there."""
        if self.path == self._rows or not self._rows.exists():
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pa.Table.from_pylist(list(read_jsonl(self._rows)))
            with replacing(self.path) as fresh:
                pq.write_table(table, fresh)
            self._rows.unlink()
        except pa.ArrowException as error:  # a column with values of different types
            raise InputError(
                f"the rows of {self._rows} cannot be written as parquet: {error}; choose an "
                "output that ends in .jsonl",
                path=str(self._rows),
            ) from error

    def _begin(self, batch_size: int, *, overwrite: bool, check: Callable[[], None]) -> None:
        existing = sorted({file for file in (self.path, self._rows) if file.exists()})
        own = bool(existing) and self._matches(overwrite=overwrite)
        if own and not self._rows.exists():
            self.done = self.total  # the `.parquet` file is written when all rows are there
            return
        # The position behind each row that is there.
        ends = _ends_of_lines(self._rows) if own else []
        if not own or len(ends) != self.total:
            check()
            ends = ends[: len(ends) - len(ends) % batch_size]
        with writing(self.path):  # a folder, for example
            if own:
                os.truncate(self._rows, ends[-1] if ends else 0)
            for file in () if own else existing:
                file.unlink()
        if not own:
            write_json(self._described, self._inputs)
        self.done = len(ends)

    def _matches(self, *, overwrite: bool) -> bool:
        """Return whether the output is of this command; raise if it is not and must stay."""
        if not self._described.is_file():
            problem = f"{self.path} exists, and no {self._described.name} says what has made it"
        else:
            differences = changes(read_json(self._described), self._inputs)
            if not differences:
                return True
            problem = f"{self.path} was made with other inputs: {differences}"
        if not overwrite:
            raise ConfigError(
                f"{problem}; choose another output, or set overwrite=true to replace it",
                key="output",
            )
        return False


def rows_of(output: str | Path) -> Iterator[JsonObject]:
    """Yield the rows of an output."""
    path = Path(local_path(output))
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    return (row.values for piece in read_pieces(path) for row in piece.rows)


def _ends_of_lines(path: Path) -> list[int]:
    """Return the offset after each complete line of a file."""
    with path.open("rb") as file:
        return list(accumulate(len(line) for line in file if line.endswith(b"\n")))


Inputs = dict[str, object]
"""Settings by dotted key, and the contents of files as digests."""

_WITHOUT_EFFECT = (
    "trainer.", "cache_dir", "overwrite", "output", "data_files", "rollout.micro_batch_size",
    "rollout.replicas.", "model.path", "model.tokenizer_path", "model.use_shm",
)  # fmt: skip
"""Settings, or beginnings of their keys, that change no response."""
_OF_EPISODES = ("agent.", "rollout.slice_tokens")
_OF_AGENT_PROCESSES = ("agent.path", "agent.processes", "agent.spread", "agent.concurrency")
_OF_SCORES = ("reward.", "pass_at", "correct_at", "resamples", "confidence", "response_")
_LISTED = 8  # changes that a message names
_SAMPLES, _SAMPLE = 64, 64 << 10  # parts of a larger weight file that are digested, and their bytes


def inputs_of(config: GenerationConfig) -> Inputs:
    """Return what the responses of a command depend on.

    The number of ranks, their backend, replicas and the size of micro-batches are left out. In
    float32 a response of hf and vllm does not depend on them. One of sglang can
    (`Rollout.not_reproduced`), and a file that is continued with other ranks then holds responses
    of both.
    """
    settings = setting_leaves(written_settings(config))
    plays = config.agent.path is not None
    left_out = (*_WITHOUT_EFFECT, *_OF_SCORES, *(_OF_AGENT_PROCESSES if plays else _OF_EPISODES))
    kept: Inputs = {key: value for key, value in settings if not key.startswith(left_out)}
    model = config.model
    kept["content of data_files"] = contents_digest(config.data_files)
    if config.agent.path is not None:
        kept["content of agent.path"] = contents_digest([config.agent.path])
    if isinstance(config, GenerateConfig) and config.images:
        kept["content of images"] = contents_digest(config.images)
    for name, path in (("path", model.path), ("tokenizer_path", model.tokenizer_path)):
        if path is not None:
            kept[f"content of model.{name}"] = model_digest(path)
    return kept


def changes(saved: Mapping[str, object], own: Mapping[str, object]) -> str:
    """Return what differs between two results of `inputs_of`, "n: 2 → 4; seed: 0 → 1", or ""."""
    found = [*changed_inputs(saved, own).values()]
    more = [f"and {len(found) - _LISTED} others"] if len(found) > _LISTED else []
    return "; ".join([*found[:_LISTED], *more])


def model_digest(path: str) -> str:
    """Return a digest of all files of a model folder; its name and the times of files do not count.

    A file of more than 4 MiB is digested by its size and 64 parts of 64 KiB, evenly spaced.
    Training changes nearly every weight, so such a change is found.
    """
    files = sorted(file for file in local_folder(path).iterdir() if file.is_file())
    return digest_json({f.name: _sampled(f) for f in files if f.suffix not in (".md", ".lock")})


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    if size <= _SAMPLES * _SAMPLE:
        return digest_file(file)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for number in range(_SAMPLES):
            content.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE))
    return digest.hexdigest()


# `quadriga eval`: responses, scored and summarised.

RESPONSES, SAMPLES, RESULTS = "responses.jsonl", "samples.jsonl", "results.json"
PLOT, CONFIG = "results.png", "config.yaml"
_COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8e6c8a", "#b08d2f", "#4f9da6")
_TOGETHER = 256  # prompts that are scored together


@dataclass(frozen=True)
class Evaluation:
    """The summaries of all data sources, and what else the report tells.

    Attributes:
        failed: responses whose reward function failed.
        left_out: prompts that are longer than `max_prompt_length`.
        agent: with `agent.path`, means over the episodes, by the names of a training run.
    """

    folder: Path
    summaries: tuple[SourceSummary, ...]
    failed: int
    left_out: int
    agent: dict[str, float]


def run_evaluation(config: EvalConfig) -> Evaluation:
    """Generate the responses unless files hold them, score them, and write the report.

    Raises:
        InputError: settings, files or rows do not fit, or the folder holds the evaluation of
            another model or other data, or it cannot be written.
        WorkerError: a rank failed. The responses before it are kept.
        RewardError: no response has a score, or one failed and `reward.on_failure` is "fail".
    """
    check_eval_settings(config)
    parts_of(config.reward)  # its files exist, and have the functions
    folder, files = Path(config.output), config.response_files
    prompts: PromptDataset | None = None
    if files:
        check_files(files, "response_files", needed=True)
        inputs: Inputs = {"content of response_files": contents_digest(files)}
    else:
        prompts, inputs = load_prompts(config), inputs_of(config)
    with closing(RewardManager.from_settings(config.reward, None)) as reward:
        _check_folder(folder, inputs, overwrite=config.overwrite)
        rows: Iterable[JsonObject]
        if prompts is None:
            reward.check(read_responses(files, config.response_key), files)
            rows = read_responses(files, config.response_key)
        else:
            if config.agent.path is None:
                prompts.keeps_columns = reward.reads_columns
                reward.check(prompts, config.data_files)
            write_responses(config, prompts, str(folder / RESPONSES))
            written = zip(rows_of(folder / RESPONSES), prompts, strict=True)
            rows = ({**row, fields.COLUMNS: item.get(fields.COLUMNS)} for row, item in written)
        scored = list(_score(rows, reward, folder, played=config.agent.path is not None))
        failed = sum(count for _, count in scored)
        reward.check_any(samples=sum(len(prompt.scores) for prompt, _ in scored))
    ks, correct_at = tuple(config.pass_at), config.correct_at
    settings = SummarySettings(ks, correct_at, config.resamples, config.confidence, config.seed)
    summaries = summarise([prompt for prompt, _ in scored], settings)
    left_out = 0 if prompts is None else prompts.filtered
    agent = {} if config.agent.path is None else _of_episodes(rows_of(folder / RESPONSES))
    sources = [asdict(summary) for summary in summaries]
    results = {"sources": sources, "failed": failed, "left_out": left_out, "agent": agent}
    write_json(folder / RESULTS, {**results, "inputs": inputs})
    plot_results(summaries, folder / PLOT)
    with replacing(folder / CONFIG) as fresh:
        fresh.write_text(to_yaml(config), encoding="utf-8")
    return Evaluation(folder, summaries, failed, left_out, agent)


def _of_episodes(rows: Iterable[JsonObject]) -> dict[str, float]:
    sums, count = Counter[str](), 0
    for episode in (episode for row in rows for episode in row[EPISODES]):
        ended = f"agent/{'' if episode['status'] in FAILURES else 'ended/'}{episode['status']}"
        own = {f"agent/{name}": value for name, value in episode["metrics"].items()}
        sums.update({"agent/turns/mean": len(episode["turns"]), ended: 1, **own})
        count += 1
    return {name: value / count for name, value in sorted(sums.items())}


def read_responses(files: Sequence[str], key: str) -> Iterator[JsonObject]:
    """Yield the rows of files that hold responses, with a list of texts under "responses".

    Raises:
        DataError: a file cannot be read, or a row has no text or list of texts under `key`.
    """
    pieces = (piece for path in existing_files(files) for piece in read_pieces(path))
    for index, row in enumerate(row for piece in pieces for row in piece.rows):
        value = row.at(key)
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise row.error(f"{key!r} must be a text or a list of texts, got {value!r:.120}")
        own = {**row.values, fields.COLUMNS: row.values, fields.RESPONSES: texts}
        yield {fields.INDEX: index, **own}


def _check_folder(folder: Path, inputs: Inputs, *, overwrite: bool) -> None:
    """Check that the folder is free, or holds an evaluation of the same responses."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output={folder} is a file, expected a folder", key="output")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    if not path.is_file() or overwrite:
        return
    saved = read_json(path).get("inputs")
    differences = changes(saved if isinstance(saved, dict) else {}, inputs)
    if differences:
        raise ConfigError(
            f"{folder} holds an evaluation with other inputs: {differences}; choose "
            "another output, or set overwrite=true to replace it",
            key="output",
        )


def _score(
    rows: Iterable[JsonObject], reward: RewardManager, folder: Path, *, played: bool
) -> Iterator[tuple[PromptScores, int]]:
    """Yield the scores of each prompt with its failed responses, and write the samples. `played`:
    the environments of the responses have scored them."""
    with replacing(folder / SAMPLES) as fresh, closing(JsonlFile(fresh)) as file:
        read = iter(rows)
        while some := list(islice(read, _TOGETHER)):
            texts: list[list[str]] = [row[fields.RESPONSES] for row in some]
            every = [(row, text) for row, own in zip(some, texts, strict=True) for text in own]
            if played:
                outcomes = [_outcome(episode) for row in some for episode in row[EPISODES]]
                answers: Sequence[str | None] = [None] * len(every)
            else:
                rows_of_texts = [row for row, _ in every]
                outcomes = reward.score_texts([text for _, text in every], rows_of_texts)
                answers = reward.answers
            scored = iter(zip(every, outcomes, answers, strict=True))
            for row, own in zip(some, texts, strict=True):
                source = row.get(fields.DATA_SOURCE)
                found = PromptScores(NO_SOURCE if source is None else str(source), [], [])
                failed = 0
                for (_, text), outcome, answer in islice(scored, len(own)):
                    file.write(_sample(row, found.data_source, text, outcome, answer))
                    found.scores.append(outcome.score)
                    found.answers.append(answer)
                    failed += outcome.status != SCORED
                yield found, failed


def _outcome(episode: JsonObject) -> Outcome:
    status: Status = episode["status"] if episode["status"] in FAILURES else SCORED
    extra = {"turns": len(episode["turns"]), **episode["metrics"]}
    return Outcome(status, episode["score"], extra, episode["detail"])


def _sample(
    row: Mapping[str, object], source: str, text: str, outcome: Outcome, answer: str | None
) -> dict[str, object]:
    truth = row.get(fields.REWARD_MODEL)
    return {
        "index": row[fields.INDEX],
        "data_source": source,
        "prompt": row.get("prompt"),
        "response": text,
        "score": outcome.score,
        "answer": answer,
        "ground_truth": truth.get("ground_truth") if isinstance(truth, Mapping) else None,
        "status": outcome.status,
        **({"detail": outcome.detail} if outcome.detail else {}),
        **({"extra": outcome.extra} if outcome.extra else {}),
    }


def summary_table(summaries: Sequence[SourceSummary], confidence: float) -> Table:
    """Return a table with one row for each metric of each data source."""
    table = Table(title="evaluation", title_justify="left")
    for heading in ("data source", "prompts", "metric", "value", f"{confidence:.0%} interval"):
        left = heading in ("data source", "metric")
        table.add_column(heading, justify="left" if left else "right")
    for summary in summaries:
        for number, (name, estimate) in enumerate(summary.metrics.items()):
            head = (shown(summary.data_source), str(summary.prompts))
            cells = (name, f"{estimate.value:.3f}", interval(estimate))
            table.add_row(*(head if number == 0 else ("", "")), *cells)
        table.add_section()
    return table


def plot_results(summaries: Sequence[SourceSummary], picture: Path) -> None:
    """Plot pass@k over k for each data source, with intervals.

    Raises:
        InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    # `Figure` and not `pyplot`: it needs no display and keeps no global list of open figures.
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, summary in enumerate(summaries):
        found = {n: e for n, e in summary.metrics.items() if n.startswith("pass@")}
        ks = [int(name.partition("@")[2]) for name in found]
        # (value, low, high) of each k; without an interval the value three times
        bounds = [
            (e.value, *(e.value if b is None else b for b in (e.low, e.high)))
            for e in found.values()
        ]
        values, lows, highs = zip(*bounds, strict=True)
        colour = "black" if summary.data_source == OVERALL else _COLOURS[number % len(_COLOURS)]
        axes.plot(ks, values, marker="o", markersize=4, color=colour, label=summary.data_source)
        axes.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    with replacing(picture) as fresh:
        figure.savefig(str(fresh), format="png")
