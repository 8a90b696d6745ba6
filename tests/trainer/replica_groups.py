"""Worker groups of replicas that answer, fail and die as a test says. No process, no clock."""

import torch

from quadriga.errors import QuadrigaError, WorkerDiedError, WorkerMethodError
from quadriga.protocol import DataProto, fields
from quadriga.weight_sync.transport import WeightNeeds

NEEDS = WeightNeeds({}, None, "node")


def prompts(*texts: str, n: int = 1) -> DataProto:
    """Rows of prompts, one token per letter, padded on the left; row i has the seed i."""
    rows = [text for text in texts for _ in range(n)]
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    for row, text in enumerate(rows):
        ids[row, width - len(text) :] = torch.tensor([ord(letter) for letter in text])
        mask[row, width - len(text) :] = 1
    batch = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: mask.long(),
        fields.SAMPLE_SEED: torch.arange(len(rows)),
    }
    return DataProto.from_dict(batch, meta_info={"sampling": "train"})


def died() -> WorkerDiedError:
    return WorkerDiedError("the process of rollout rank 0 ended", role="rollout", rank=0)


def raised(cause: Exception) -> WorkerMethodError:
    """The error of a call whose method raised `cause`."""
    error = WorkerMethodError(f"{type(cause).__name__} in rollout.generate_sequences: {cause}")
    error.__cause__ = cause
    return error


class Future:
    """A result after some looks at it, or an error."""

    def __init__(self, result: object = None, error: Exception | None = None, looks: int = 0):
        self.result, self.error, self.looks = result, error, looks
        self.cancelled = False

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def get(self) -> object:
        if self.error is not None:
            raise self.error
        return self.result

    def cancel(self) -> bool:
        self.cancelled = True
        return True


class Method:
    def __init__(self, function):
        self.submit = function

    def __call__(self, *args):
        return self.submit(*args).get()


class Group:
    """The group of one replica.

    Args:
        looks: how often a request is looked at before its answer is there.
        fails: number of a request, from 0 → the error of that request.
        stale: the answers have the version before.
        short: the answers lack a row.
        weights: results or errors of `weight_needs`, `receive_weights` and `finish_weights`.
    """

    world_size = 1

    def __init__(self, *, looks=0, fails=None, stale=False, short=False, weights=None):
        self.looks, self.fails = looks, fails or {}
        self.stale, self.short = stale, short
        self.weights = weights or {}
        self.version = 1
        self.asked: list[list[int]] = []
        self.received = self.ended = 0
        self.init_model = Method(lambda: Future([None]))
        self.generate_sequences = Method(self._generate)
        self.weight_needs = Method(lambda: self._of_sync("weight_needs", [NEEDS]))
        self.receive_weights = Method(self._receive)
        self.finish_weights = Method(self._finish)

    def _generate(self, rows: DataProto) -> Future:
        assert not self.ended, "a lost replica is asked"
        seeds = rows.batch[fields.SAMPLE_SEED]
        error = self.fails.get(len(self.asked))
        self.asked.append(seeds.tolist())
        answer = DataProto.from_dict(
            {
                fields.RESPONSES: seeds[:, None] * 10,
                fields.WEIGHT_VERSION: torch.full_like(seeds, self.version - self.stale),
            }
        )
        return Future(answer[:-1] if self.short else answer, error, self.looks)

    def _of_sync(self, name: str, result: object) -> Future:
        assert not self.ended, "a lost replica takes part in a sync"
        given = self.weights.get(name)
        return (
            Future(result, given) if isinstance(given, QuadrigaError) else Future(given or result)
        )

    def _receive(self, parts) -> Future:
        self.received += 1
        return self._of_sync("receive_weights", [None])

    def _finish(self) -> Future:
        self.version += 1
        return self._of_sync("finish_weights", [self.version])

    def shutdown(self) -> None:
        self.ended += 1
