"""Datasets and samplers that a user writes."""

import pytest
from test_loader import Numbers, numbers

from quadriga.config.schema import DataConfig, DatasetClassConfig, SamplerConfig
from quadriga.data.loader import PromptLoader
from quadriga.data.user_classes import user_dataset, user_sampler
from quadriga.errors import ConfigError, DataError
from quadriga.protocol import DataProto

SAMPLER = """
class Sampler:
    def __init__(self, dataset, seed, step=1):
        self.size, self.step, self.seen = len(dataset), step, 0

    def rows(self, batch, batch_size):
        return [(self.seen + i * self.step) % self.size for i in range(batch_size)]

    def update(self, data):
        self.seen += len(data)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Short(Sampler):
    def rows(self, batch, batch_size):
        return [0]


class Outside(Sampler):
    def rows(self, batch, batch_size):
        return [99] * batch_size
"""
DATASET = """
from quadriga.data import PromptDataset


class Questions(PromptDataset):
    def __init__(self, files, tokenizer, config):
        rows = [{"prompt": f"{file} {i}"} for file in files for i in range(3)]
        made = PromptDataset.from_rows(rows, tokenizer, max_prompt_length=config.max_prompt_length)
        self.__dict__.update(made.__dict__)


class OfImages(Questions):
    def __init__(self, files, tokenizer, config, images=None):
        super().__init__(files, tokenizer, config)
        self.images = images


class Empty:
    def __init__(self, files, tokenizer, config):
        pass
"""


@pytest.fixture
def sampler(tmp_path):
    path = tmp_path / "s.py"
    path.write_text(SAMPLER)

    def make(name="Sampler", size=10, **options):
        settings = SamplerConfig(path=str(path), name=name, options=options)
        return user_sampler(str(path), settings, Numbers(size), 0)

    return make


def batch(rows):
    return DataProto.from_dict(non_tensors={"index": rows})


def test_a_sampler_chooses_rows_learns_and_resumes(sampler):
    loader, again = (PromptLoader(Numbers(10), 4, sampler=sampler(step=2)) for _ in range(2))
    stream = iter(loader)
    assert numbers([next(stream)]) == [[0, 2, 4, 6]]
    loader.update(batch([0, 2, 4]))
    again.load_state_dict(loader.state_dict())
    assert numbers([next(stream)]) == numbers([next(iter(again))]) == [[3, 5, 7, 9]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", "Short.rows must return 4 rows for batch 0, got 1"),
        ("Outside", "Outside.rows: row 99 of batch 0 is not one of 0 to 9"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(sampler, name, message):
    with pytest.raises(DataError, match=message):
        next(iter(PromptLoader(Numbers(10), 4, sampler=sampler(name))))


@pytest.mark.parametrize("method", ["update", "state_dict", "load_state_dict"])
def test_each_method_that_fails_is_named(sampler, method):
    loader = PromptLoader(Numbers(10), 4, sampler=sampler())
    state = loader.state_dict()

    def fails(*args):
        raise SystemExit("no")

    setattr(loader.sampler, method, fails)
    with pytest.raises(DataError, match=rf"Sampler\.{method} failed: SystemExit: no"):
        loader.update(batch([0]))
        loader.state_dict()
        loader.load_state_dict(state)


def test_a_batch_of_another_size_is_refused():
    data = Numbers(10)
    collate = data.collate
    for wrong, found in ((lambda items: collate(items[1:]), "one of 3 rows"), (list, r"\[")):
        data.collate = wrong
        with pytest.raises(DataError, match=rf"Numbers.collate must return .* of 4 rows.*{found}"):
            next(iter(PromptLoader(data, 4)))


def test_a_dataset_of_the_user(tmp_path, tokenizer):
    path = tmp_path / "d.py"
    path.write_text(DATASET)
    config = DataConfig(dataset=DatasetClassConfig(name="Questions"))
    data = user_dataset(str(path), ["a", "b"], tokenizer, config)
    assert len(data) == 6 and data[4]["raw_prompt"][0]["content"] == "b 1"
    config = DataConfig(dataset=DatasetClassConfig(name="Empty"))
    with pytest.raises(ConfigError, match=r"data.dataset.name=Empty: Empty lacks __len__"):
        user_dataset(str(path), ["a"], tokenizer, config)
    rules = object()  # for a class with an argument `images`
    cases = ("OfImages", rules, rules), ("OfImages", None, None), ("Questions", rules, None)
    for name, given, expected in cases:
        config = DataConfig(dataset=DatasetClassConfig(name=name))
        data = user_dataset(str(path), ["a"], tokenizer, config, given)
        assert getattr(data, "images", "no attribute") is expected
