import pytest
import torch

from quadriga.models.tiny import train_tokenizer


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["Tom has 3 apples. He buys 4 more. 3+4=7\n#### 7"] * 4)
