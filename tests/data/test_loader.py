"""`PromptLoader`: a seeded order with every row once, which can be resumed at any batch."""

from itertools import chain, islice, repeat

import pytest
import torch

from quadriga.data.loader import PromptLoader
from quadriga.errors import CheckpointError
from quadriga.protocol import DataProto


class Numbers:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"number": index}

    def collate(self, items):
        return DataProto.from_dict({"number": torch.tensor([item["number"] for item in items])})


def numbers(batches):
    return [batch.batch["number"].tolist() for batch in batches]


def test_an_epoch_has_every_row_once_and_epochs_differ():
    loader = PromptLoader(Numbers(12), 4, seed=1)
    first, second = numbers(loader), numbers(loader)
    assert all(sorted(n for batch in e for n in batch) == list(range(12)) for e in (first, second))
    assert first != second and len(loader) == 3
    assert numbers(PromptLoader(Numbers(12), 4, seed=1)) == first
    assert numbers(PromptLoader(Numbers(12), 4, seed=2)) != first


@pytest.mark.parametrize("stop", range(8))
def test_a_resumed_loader_continues_in_the_original_order(stop):
    def take(loader, count):
        return numbers(islice(chain.from_iterable(repeat(loader)), count))

    whole, stopped, resumed = (PromptLoader(Numbers(13), 4, seed=7) for _ in range(3))
    order = take(whole, 8)
    assert take(stopped, stop) == order[:stop]
    resumed.load_state_dict(stopped.state_dict())
    assert take(resumed, 8 - stop) == order[stop:]


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (PromptLoader(Numbers(13), 4), "rows"),
        (PromptLoader(Numbers(12), 3), "batch_size"),
        (PromptLoader(Numbers(12), 4, seed=1), "seed"),
    ],
)
def test_a_state_of_other_data_is_an_error(other, key):
    with pytest.raises(CheckpointError, match=f"was saved with {key}="):
        PromptLoader(Numbers(12), 4).load_state_dict(other.state_dict())
