"""Updates with a training engine that records the mini-batches it gets."""

import pytest
import torch

from quadriga.config.schema import ActorConfig
from quadriga.errors import FieldError, LengthError
from quadriga.protocol import DataProto, fields
from quadriga.workers.method_fields import UPDATE_ACTOR
from quadriga.workers.updates import check_mini_batches_of_ranks, mini_batches, update_policy


class Recorder:
    """A `TrainEngine` of one rank whose log-probabilities are zero."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def global_counts(self, *counts: float | torch.Tensor) -> list[float]:
        return [float(count) for count in counts]

    def train_step(self, mini_batch, loss_fn, **_settings):
        self.seen.append(mini_batch)
        log_probs = torch.zeros(mini_batch[fields.RESPONSE_MASK].shape, requires_grad=True)
        loss, _ = loss_fn({"log_probs": log_probs}, mini_batch)
        loss.backward()
        return {"loss": float(loss.detach()), "grad": float(log_probs.grad.sum())}


def rows(mask: torch.Tensor) -> DataProto:
    """A batch of the fields that `update_policy` needs; row i has advantage i + 1."""
    size, length = mask.shape
    ids = torch.zeros(size, length + 2, dtype=torch.int64)
    return DataProto.from_dict(
        {
            fields.INPUT_IDS: ids,
            fields.ATTENTION_MASK: torch.ones_like(ids),
            fields.RESPONSE_MASK: mask,
            fields.OLD_LOG_PROBS: torch.zeros(size, length),
            fields.ADVANTAGES: torch.arange(1.0, size + 1)[:, None].expand(size, length).clone(),
        }
    )


def update(data: DataProto, *, n: int = 1, seed: int = 0, **settings) -> tuple[Recorder, DataProto]:
    engine = Recorder()
    report = update_policy(
        engine, data, ActorConfig(**settings), responses_per_prompt=n, temperature=1.0,
        length_scale=4, data_ranks=1, seed=seed,
    )  # fmt: skip
    return engine, report


def test_the_loss_of_a_mini_batch_is_the_mean_over_its_own_tokens() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
    engine, report = update(rows(mask), ppo_mini_batch_size=2)
    assert [len(seen[fields.RESPONSE_MASK]) for seen in engine.seen] == [2, 2]
    # The ratio is 1, so the gradient of each token is −A / tokens. Mini-batch 1 has tokens with
    # A = 1, 1, 2 and mini-batch 2 with A = 3, 3.
    wanted = (-(1 + 1 + 2) / 3 - (3 + 3) / 2) / 2
    assert report.meta_info["metrics"]["actor/grad"] == pytest.approx(wanted)
    assert report.meta_info["metrics"]["actor/optimizer_steps"] == 2.0


def test_a_mini_batch_without_tokens_takes_no_optimizer_step() -> None:
    mask = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 1]])
    engine, report = update(rows(mask), ppo_mini_batch_size=2)
    assert len(engine.seen) == 1
    assert report.meta_info["metrics"]["actor/optimizer_steps"] == 1.0


@pytest.mark.parametrize(("mini", "epochs"), [(2, 1), (None, 2)])
def test_two_optimizer_steps_without_old_log_probs_are_refused(mini, epochs) -> None:
    data = rows(torch.ones(4, 2, dtype=torch.int64)).select(
        batch_keys=[*UPDATE_ACTOR.reads]
    )  # without `old_log_probs`
    with pytest.raises(FieldError, match=r"'old_log_probs', which it needs for 2 optimizer steps"):
        update(data, ppo_mini_batch_size=mini, ppo_epochs=epochs)


class Ranks:
    """The sums that one of several ranks sees, with the numbers of mini-batches of all ranks."""

    def __init__(self, *counts: int) -> None:
        self.sums = [float(sum(count**power for count in counts)) for power in range(3)]
        self.calls = 0

    def global_counts(self, *counts: float) -> list[float]:
        assert len(counts) == 3
        self.calls += 1
        return self.sums


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_ranks_with_different_numbers_of_mini_batches_all_raise(rows) -> None:
    """Also the rank that has the mean of 1, 2 and 3."""
    with pytest.raises(LengthError, match=rf"6 on 3 ranks, {rows // 2} on this one \({rows} rows"):
        check_mini_batches_of_ranks(Ranks(1, 2, 3), rows, 2)


def test_mini_batches_cover_every_row_once_per_epoch() -> None:
    given = {fields.RESPONSE_MASK: torch.ones(5, 1), "row": torch.arange(5)}
    parts = [m["row"].tolist() for m in mini_batches(given, size=2, epochs=2)]
    assert parts == [[0, 1], [2, 3], [4]] * 2
    shuffled = [m["row"].tolist() for m in mini_batches(given, size=5, epochs=2, shuffled_unit=1)]
    assert [sorted(part) for part in shuffled] == [[0, 1, 2, 3, 4]] * 2
    assert shuffled[0] != shuffled[1]


def test_a_shuffle_keeps_whole_prompt_groups_together() -> None:
    given = {fields.RESPONSE_MASK: torch.ones(12, 1), "row": torch.arange(12)}
    seen = [
        m["row"].tolist() for m in mini_batches(given, size=6, epochs=4, shuffled_unit=3, seed=1)
    ]
    assert all(part[i] // 3 == part[i + 2] // 3 for part in seen for i in (0, 3))
    assert all(sorted(seen[i] + seen[i + 1]) == list(range(12)) for i in (0, 2, 4, 6))
    assert len({tuple(part) for part in seen}) > 2


def grouped(prompts: list[int], padded: list[int]) -> dict[str, torch.Tensor]:
    """Rows with a prompt of two tokens, of which the first is padding in the rows `padded`."""
    ids = torch.tensor([[7, prompt, 3] for prompt in prompts], dtype=torch.int64).reshape(-1, 3)
    attention = torch.ones_like(ids)
    attention[padded, 0] = 0
    return {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: attention,
        fields.RESPONSE_MASK: torch.ones(len(prompts), 1, dtype=torch.int64),
    }


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_update_with_shuffle_makes_mini_batches_of_whole_groups(shuffle) -> None:
    given = {**grouped([1, 1, 2, 2, 3, 3], []), fields.ADVANTAGES: torch.ones(6, 1)}
    given[fields.OLD_LOG_PROBS] = torch.zeros(6, 1)
    orders = set()
    for seed in range(10):
        data = DataProto.from_dict(given)
        engine, _ = update(data, n=2, seed=seed, ppo_mini_batch_size=1, shuffle=shuffle)
        prompts = [seen[fields.INPUT_IDS][:, 1].tolist() for seen in engine.seen]
        assert all(len(set(part)) == 1 and len(part) == 2 for part in prompts)
        orders.add(str(prompts))
    assert (len(orders) > 1) is shuffle
