"""Replicas that sample known tokens, and a stream over them without a model."""

import random
from collections.abc import Iterator, Sequence

import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import WorkerDiedError
from quadriga.protocol import DataProto, fields
from quadriga.streams.replicas import Replicas
from quadriga.trainer.stages import StageRunner
from quadriga.trainer.streaming import StreamedSampler

COLUMNS = 9


def length_of(seed: int) -> int:
    """The tokens of the response of a row, between 1 and the limit; most are short."""
    return 1 + min(seed % 31 % 13, COLUMNS - 1)


class Future:
    def __init__(self, result: DataProto | None, looks: int) -> None:
        self._result, self._looks = result, looks

    def done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def get(self) -> DataProto:
        if self._result is None:
            raise WorkerDiedError("the process of rollout rank 0 ended", role="rollout", rank=0)
        return self._result


class Engine:
    """The group of a replica: token t of a row is its seed + t, by the weights that it has then.

    Args:
        dies: how likely a call is the last one.
    """

    world_size, answered = 1, 0
    """`answered`: tokens of all calls that were not the last one."""

    def __init__(self, clock: random.Random, dies: float = 0.0, world_size: int = 1) -> None:
        self.clock, self.dies, self.world_size = clock, dies, world_size
        self.version, self.ended = 0, False
        self.asked: list[list[int]] = []
        self.generate_sequences = self

    def submit(self, rows: DataProto) -> Future:
        assert not self.ended and len(rows) % self.world_size == 0
        seeds, at_most = rows.batch[fields.SAMPLE_SEED], rows.meta_info["at_most"]
        self.asked.append(seeds.tolist())
        none = torch.zeros(len(rows), COLUMNS, dtype=torch.int64)
        begun = fields.RESPONSES in rows.batch.keys()  # noqa: SIM118
        greedy = rows.batch.get(fields.GREEDY, none[:, 0]).tolist()
        ids, mask, versions = (
            rows.batch[name].clone() if begun else none.clone()
            for name in (fields.RESPONSES, fields.RESPONSE_MASK, fields.TOKEN_VERSIONS)
        )
        paused, finished = [], []
        for row, seed in enumerate(seeds.tolist()):
            first, whole = int(mask[row].sum()), length_of(seed)
            assert first < whole, "a row that has ended is asked again"
            end = min(first + at_most, whole)
            ids[row, first:end] = torch.arange(first, end) + seed * (1 - greedy[row])
            mask[row, first:end], versions[row, first:end] = 1, self.version
            paused.append(int(end < whole))
            finished.append(int(end == whole < COLUMNS))
        answer = {
            fields.RESPONSES: ids, fields.RESPONSE_MASK: mask, fields.TOKEN_VERSIONS: versions,
            fields.ROLLOUT_LOG_PROBS: -ids.float(), fields.PAUSED: torch.tensor(paused),
            fields.FINISHED: torch.tensor(finished), fields.WEIGHT_VERSION: versions[:, 0],
            fields.SEQUENCE_LENGTH: mask.sum(-1) + 1,
        }  # fmt: skip
        died = self.clock.random() < self.dies
        if not died:
            before = rows.batch[fields.RESPONSE_MASK].sum() if begun else 0
            Engine.answered += int(mask.sum() - before)
        return Future(None if died else DataProto.from_dict(answer), self.clock.randrange(3))

    def __call__(self, rows: DataProto) -> None:
        assert not len(rows) and not self.ended

    def init_model(self) -> None:
        return

    def shutdown(self) -> None:
        self.ended = True


def score(data: DataProto) -> DataProto:
    """The score of a response is its number of tokens, at the first of them."""
    scores = torch.zeros(len(data), COLUMNS)
    scores[:, 0] = data.batch[fields.RESPONSE_MASK].sum(-1).float()
    return DataProto.from_dict({fields.TOKEN_LEVEL_SCORES: scores})


def batches(size: int) -> Iterator[DataProto]:
    """Batches of prompts without end; the only token of a prompt is its number."""
    first = 0
    while True:
        ids = torch.arange(first, first + size)[:, None]
        yield DataProto.from_dict(
            {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: torch.ones_like(ids)}
        )
        first += size


def sampler(
    clock: random.Random,
    *,
    prompts: int = 3,
    n: int = 2,
    staleness: int = 1,
    steps: int = 6,
    replicas: int = 2,
    overlaps: bool = True,
    dies: float = 0.0,
    slice_tokens: int = 2,
    more: Sequence[str] = (),
) -> StreamedSampler:
    config = load_config(
        TrainConfig,
        [
            f"data.train_batch_size={prompts}", f"data.max_response_length={COLUMNS}",
            f"actor_rollout_ref.rollout.n={n}", f"trainer.max_staleness={staleness}",
            f"actor_rollout_ref.rollout.slice_tokens={slice_tokens}", *more,
        ],
    )  # fmt: skip
    Engine.answered = 0
    group = Replicas(
        lambda number: Engine(clock, dies * (number > 0), 1 if overlaps else 3),
        replicas if overlaps else 1,
        restarts=100,
    )
    return StreamedSampler(
        config, group, score, batches(prompts), StageRunner(), steps, overlaps, overlaps
    )
